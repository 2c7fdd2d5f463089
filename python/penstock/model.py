"""Models: destinations by name, and construction without initialisation.

``load_model`` builds a module whose parameters have no memory (so that no time goes into initialising what is about to
be overwritten), then gives every parameter the tensor that was loaded for it. Buffers are built for real, so those
that no checkpoint holds (rotary frequencies, masks) have the values that the module's constructor gave them. Tied
parameters stay tied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock._native import Config
from penstock.errors import DestinationError
from penstock.progress import ProgressOption
from penstock.state import IncompatibleKeys, report, state_of

if TYPE_CHECKING:
    import torch

    from penstock.checkpoint import PathLike

logger = logging.getLogger(__name__)


@contextmanager
def no_init() -> Iterator[None]:
    """While this is active, modules that are constructed have parameters without memory and real buffers.

    A parameter that is registered twice (tied) stays one. Initialisers do nothing: they write to no memory.
    """
    import torch

    register = torch.nn.Module.register_parameter

    def register_on_meta(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(module, name, param)
        registered = module._parameters.get(name)
        if registered is not None and registered.device.type != "meta":
            meta = torch.nn.Parameter(registered.detach().to("meta"), requires_grad=registered.requires_grad)
            # Some libraries subclass Parameter or hang attributes on it.
            if type(registered) is not torch.nn.Parameter:
                meta.__class__ = type(registered)
            meta.__dict__.update(registered.__dict__)
            module._parameters[name] = meta

    torch.nn.Module.register_parameter = register_on_meta  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_model(
    build: Callable[[], torch.nn.Module],
    path: PathLike | Any,
    device: Any = "cpu",
    *,
    dtype: Any = None,
    strict: bool = True,
    progress: ProgressOption = None,
    config: Config | None = None,
) -> torch.nn.Module:
    """Constructs a model without initialising it, and loads its weights straight to ``device``.

    Args:
        build: makes the module, for example ``lambda: MyModel(cfg)``. It may build on any device: parameters get no
            memory. Buffers are built as it says and moved to ``device``.
        path: what ``penstock.open`` takes, or a ``Checkpoint``.
        device: where parameters and buffers end up.
        dtype: what floating-point parameters become; by default they have the checkpoint's dtypes (as with
            ``load_state_dict(assign=True)``).
        strict: whether names that only one side has are an error. If not, parameters that the checkpoint lacks are
            initialised by their module's ``reset_parameters``, or left as zeros where it has none; both are logged.
        progress, config: as for ``Checkpoint.load``.

    Returns:
        The module, in the mode (training or evaluation) that ``build`` left it in.

    Raises:
        TensorNotFoundError: with ``strict``, for missing or unexpected keys, which it lists as torch does.
        DestinationError: where a shape differs; nothing has been read then.
    """
    import torch

    from penstock.checkpoint import Checkpoint, open
    from penstock.frameworks.torch import Torch

    checkpoint = path if isinstance(path, Checkpoint) else open(path, config=config)
    where = torch.device(Torch().device(device))
    with no_init():
        model = build()

    owner, tensors, aliases = state_of(model)
    wanted = [name for name in checkpoint.offset_keys() if name in tensors]
    present = set(wanted)
    missing = [name for name in tensors if present.isdisjoint(aliases[name])]
    keys = IncompatibleKeys(missing, [name for name in checkpoint.offset_keys() if name not in tensors])
    if strict:
        report(owner, keys)
    _check_shapes(checkpoint, wanted, tensors)
    # One name for every tensor: the others follow it.
    wanted = list({id(tensors[name]): name for name in reversed(wanted)}.values())

    loaded: dict[int, torch.Tensor] = {}
    stream = checkpoint.stream(wanted, device=where, dtype=dtype, progress=progress, config=config)
    for name, tensor in stream:
        loaded[id(tensors[name])] = tensor
    _assign(model, loaded, where)
    _fill_rest(model, where, dtype)
    return model


def _check_shapes(checkpoint: Any, names: list[str], tensors: Mapping[str, torch.Tensor]) -> None:
    from penstock.frameworks.torch import torch_shape

    for name in names:
        info = checkpoint[name]
        has, wants = tuple(tensors[name].shape), torch_shape(info.dtype, info.shape)
        if has != wants:
            cause = f"the checkpoint's shape is {list(wants)}, the model's {list(has)}"
            raise DestinationError(
                f"{info.object}: tensor {name!r}: {cause}", object=info.object, tensor=name, cause=cause
            )


def _assign(model: torch.nn.Module, loaded: Mapping[int, torch.Tensor], device: torch.device) -> None:
    """Puts loaded tensors in the place of the parameters and buffers they were loaded for, wherever those are tied."""
    import torch

    parameters: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) not in loaded:
                continue
            key = id(parameter)
            if key not in parameters:
                tensor = loaded[key]
                grad = parameter.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
                made = torch.nn.Parameter(tensor, requires_grad=grad)
                if type(parameter) is not torch.nn.Parameter:
                    made.__class__ = type(parameter)
                made.__dict__.update(parameter.__dict__)
                # Keeps the old one alive too: its id must not be reused while it is a key.
                parameters[key] = made
            module._parameters[name] = parameters[key]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                replacement = loaded.get(id(buffer))
                module._buffers[name] = buffer.to(device) if replacement is None else replacement


def _fill_rest(model: torch.nn.Module, device: torch.device, dtype: Any) -> None:
    """Gives memory to parameters that the checkpoint did not have (only without ``strict``)."""
    import torch

    from penstock.frameworks.torch import Torch

    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for path, module in model.named_modules():
        present = {name: p for name, p in module._parameters.items() if p is not None}
        lacking = {name: p for name, p in present.items() if p.device.type == "meta"}
        for name, parameter in lacking.items():
            if parameter not in made:
                zeros = torch.zeros_like(parameter, device=device)
                zeros = zeros if dtype is None else Torch().cast(zeros, dtype)
                made[parameter] = torch.nn.Parameter(zeros, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[parameter]
        if not lacking:
            continue
        # Where the module has some of its parameters from the checkpoint, initialising would overwrite those.
        reset = getattr(module, "reset_parameters", None) if len(lacking) == len(present) else None
        if callable(reset):
            reset()
        names = ", ".join(f"{path}.{name}" if path else name for name in lacking)
        how = "initialised by reset_parameters" if callable(reset) else "set to zero"
        logger.warning("not in the checkpoint, %s: %s", how, names)
