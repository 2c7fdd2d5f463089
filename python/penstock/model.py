"""Models: destinations by name, and construction without initialisation.

``load_model`` builds a module whose parameters have no memory (so that no time goes into initialising what is about to
be overwritten), or takes one that is built, and gives every parameter the tensor that was loaded for it. Buffers are
built for real, so those that no checkpoint holds (rotary frequencies, masks) have the values that the module's
constructor gave them. Tied parameters stay tied.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock._native import LoadOptions
from penstock.arguments import described
from penstock.errors import ConfigError, DestinationError
from penstock.optional import required
from penstock.patches import Replacement
from penstock.progress import ProgressOption
from penstock.state import IncompatibleKeys, report, report_misfits, state_of

if TYPE_CHECKING:
    import torch

    from penstock.arguments import AnyPath
    from penstock.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

M = TypeVar("M", bound="torch.nn.Module")

_here = threading.local()


@contextmanager
def no_init() -> Iterator[None]:
    """While this is active, modules that this thread constructs have parameters without memory and real buffers.

    A parameter that is registered twice (tied) stays one, whether it is taken from the module that has it or from a
    variable. Initialisers do nothing: they write to no memory. Other threads construct as they always do.

    Raises:
        MissingDependencyError: on entering, where torch is absent or too old.
    """
    required("torch", by="penstock.model.no_init")
    import torch
    from torch.utils.weak import WeakIdKeyDictionary

    with _REGISTERING.on(torch.nn.Module):
        _here.depth = getattr(_here, "depth", 0) + 1
        if _here.depth == 1:
            # Weak: what nobody but the module had must go, or the block would hold a whole model.
            _here.without_memory = WeakIdKeyDictionary()
        try:
            yield
        finally:
            _here.depth -= 1
            if not _here.depth:
                del _here.without_memory


def _registering(register: Any) -> Any:
    import torch

    def register_on_meta(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(module, name, param)
        registered = module._parameters.get(name)
        if getattr(_here, "depth", 0) and registered is not None and not _has_no_memory(registered):
            meta = _here.without_memory.get(registered)
            if meta is None:
                meta = torch.nn.Parameter(registered.detach().to("meta"), requires_grad=registered.requires_grad)
                # Some libraries subclass Parameter or hang attributes on it.
                if type(registered) is not torch.nn.Parameter:
                    meta.__class__ = type(registered)
                meta.__dict__.update(registered.__dict__)
                _here.without_memory[registered] = meta
            module._parameters[name] = meta

    return register_on_meta


_REGISTERING = Replacement("torch.nn.Module.register_parameter", _registering)


def _has_no_memory(parameter: torch.nn.Parameter) -> bool:
    import torch

    return torch.nn.parameter.is_lazy(parameter) or parameter.device.type == "meta"


def load_model(
    model: M | Callable[[], M],
    path: AnyPath | Any,
    device: Any = "cpu",
    *,
    dtype: Any = None,
    strict: bool = True,
    progress: ProgressOption = None,
    storage_options: Mapping[str, Any] | None = None,
    trust: Any = None,
    options: LoadOptions | None = None,
) -> M:
    """Loads a model's weights straight to ``device``. Given a function, constructs it first, without initialising it.

    Parameters are replaced by what is loaded, as by ``load_state_dict(assign=True)``: nothing is copied twice.
    To fill the memory that a module has: ``penstock.open(path).load_into(module)``.

    Args:
        model: makes the module, for example ``lambda: MyModel(cfg)`` or the class itself. It may build on any device:
            parameters get no memory. Buffers are built as it says and moved to ``device``. Or a module that is built,
            on any device, ``meta`` too.
        path: what ``penstock.open`` takes, or a ``Checkpoint``.
        device: where parameters and buffers end up.
        dtype: what floating-point parameters become; by default they have the checkpoint's dtypes.
        strict: whether names that only one side has are an error. If not, parameters that the checkpoint lacks are
            initialised by their module's ``reset_parameters``, or left as zeros where it has none; both are logged.
            Those of a module that was built keep their values.
        progress, options: as for ``Checkpoint.load``.
        storage_options: credentials, endpoint and settings of the remote store, as for ``penstock.open``.
        trust: whose signatures are trusted, as for ``penstock.open``.

    Returns:
        The module, in the mode (training or evaluation) that it was in.

    Raises:
        TensorNotFoundError: with ``strict``, for missing or unexpected keys, which it lists as torch does.
        DestinationError: where a shape differs, or a buffer was built on the meta device and is in no checkpoint;
            nothing has been read then.
        ConfigError: ``model`` is neither a module nor a function, or a function that makes no module.
        ConfigError: for an unknown storage option, and for storage options of a ``Checkpoint``, which has its own.
        SelectionError: for a ``dtype`` that is none, or one of integers.
        MissingDependencyError: where torch is absent or too old.
    """
    required("torch", by="penstock.load_model")
    import torch

    from penstock.checkpoint import Checkpoint, open
    from penstock.frameworks.torch import Torch

    if not callable(model) or callable(path):  # as every module is, too
        swapped = callable(path) and not callable(model)
        cause = (
            "load_model takes a module or a function that builds one, then the path; given were "
            f"{described(model)} and {described(path)}"
        )
        remedy = "Write load_model(model, path)" if swapped else "Write load_model(lambda: MyModel(config), path)"
        raise ConfigError(cause=cause, remedy=remedy)
    if dtype is not None:
        dtype = Torch().floating_dtype(dtype)
    if not isinstance(path, Checkpoint):
        checkpoint = open(path, storage_options=storage_options, trust=trust, options=options)
    elif storage_options or trust is not None:
        cause = "storage_options and trust are for opening a checkpoint, and this one is open"
        raise ConfigError(cause=cause, remedy="Give them to penstock.open")
    else:
        checkpoint = path
    where = Torch().device(device)
    if isinstance(model, torch.nn.Module):
        place(model, checkpoint, where, dtype=lambda _: dtype, strict=strict, progress=progress, options=options)
        # What the checkpoint does not hold, of a module that was built elsewhere.
        return cast("M", model.to(where))
    with checkpoint.prefetch(options=options), no_init():
        built = model()
    if not isinstance(built, torch.nn.Module):
        cause = f"what was to build the module returned a {type(built).__name__}"
        raise ConfigError(cause=cause, remedy="Return a torch.nn.Module")
    place(built, checkpoint, where, dtype=lambda _: dtype, strict=strict, progress=progress, options=options)
    return built


def place(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    device: str,
    *,
    dtype: Callable[[str], Any],
    renamed: Mapping[str, str] | None = None,
    strict: bool = True,
    progress: ProgressOption = None,
    options: LoadOptions | None = None,
) -> IncompatibleKeys:
    """Gives a model that was built with ``no_init`` its tensors. What ``load_model`` does, for who builds by own rules.

    Args:
        dtype: from a tensor's name in the model to what it becomes if it holds floating-point numbers; None leaves it.
        renamed: from names of the checkpoint's tensors to the model's, where they differ.
        device, strict, progress, options: as for ``load_model``.

    Returns:
        The names that only the model has, and those that only the checkpoint has.
    """
    import torch

    from penstock.frameworks.torch import Torch

    where = torch.device(device)
    called = renamed or {}
    owner, tensors, aliases = state_of(model)
    names = {called.get(name, name): name for name in checkpoint.offset_keys()}
    wanted = {name: stored for name, stored in names.items() if name in tensors}
    missing = [name for name in tensors if wanted.keys().isdisjoint(aliases[name])]
    keys = IncompatibleKeys(missing, [stored for name, stored in names.items() if name not in tensors])
    misfits = of_other_shapes(checkpoint, wanted, tensors)
    if strict:
        report(owner, keys, misfits)
        check_left_out(model, tensors)
    _check_kinds(wanted, tensors)
    report_misfits(owner, misfits)
    # One name for every tensor: the others follow it.
    single = {id(tensors[name]): name for name in reversed(wanted)}
    check_buffers(model, single.keys())
    by_stored = {wanted[name]: name for name in single.values()}

    library = Torch()
    loaded: dict[int, torch.Tensor] = {}
    for stored, tensor in checkpoint.stream(list(by_stored), device=where, progress=progress, options=options):
        name = by_stored[stored]
        becomes = dtype(name)
        loaded[id(tensors[name])] = tensor if becomes is None else library.cast(tensor, becomes)
        # Not kept until the next one lands: its memory may serve that one.
        del tensor
    _assign(model, loaded, where)
    _fill_rest(model, where, dtype)
    return keys


def check_left_out(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses parameters that are in no state_dict: they were not initialised, and no checkpoint can hold them."""
    there = {id(tensor) for tensor in tensors.values()}
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta" and id(parameter) not in there:
            cause = "a hook of the module leaves this parameter out of its state_dict, so nothing would be loaded to it"
            remedy = "Build the model as usual and fill it with load_into, or give strict=False to initialise it"
            raise DestinationError(f"parameter {name!r}: {cause}. {remedy}", tensor=name, cause=cause, remedy=remedy)


def check_buffers(model: torch.nn.Module, loaded: Any) -> None:
    """Refuses buffers that would stay without memory: nobody knows what was to be in them."""
    for name, buffer in model.named_buffers():
        if buffer.device.type == "meta" and id(buffer) not in loaded:
            cause = "this buffer was built on the meta device, and the checkpoint does not hold it"
            remedy = "Build the model without torch.device('meta'): load_model keeps parameters off memory by itself"
            raise DestinationError(f"buffer {name!r}: {cause}. {remedy}", tensor=name, cause=cause, remedy=remedy)


def _check_kinds(names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses parameters in whose place a regular tensor cannot be put: sharded ones, and wrapper subclasses."""
    import torch

    for name in names:
        kind = type(tensors[name])
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            cause = f"it is a {kind.__qualname__}, which a loaded tensor cannot take the place of"
            remedy = "Use module.to_empty(device=…), then penstock.open(path).load_into(module)"
            raise DestinationError(f"parameter {name!r}: {cause}. {remedy}", tensor=name, cause=cause, remedy=remedy)


def of_other_shapes(
    checkpoint: Checkpoint, names: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> list[DestinationError]:
    """What is wrong with the tensors that have another shape than the checkpoint's."""
    from penstock.frameworks.torch import torch_shape

    misfits = []
    for name, stored in names.items():
        info = checkpoint[stored]
        has, wants = tuple(tensors[name].shape), torch_shape(info.dtype, info.shape)
        if has != wants:
            cause = f"size mismatch: the checkpoint's shape is {list(wants)}, the model's {list(has)}"
            remedy = "Build the model with the checkpoint's sizes (its configuration)"
            misfits.append(DestinationError(location=info.location, tensor=name, cause=cause, remedy=remedy))
    return misfits


def _assign(model: torch.nn.Module, loaded: Mapping[int, torch.Tensor], device: torch.device) -> None:
    """Puts loaded tensors in the place of the parameters and buffers they were loaded for, wherever those are tied."""
    import torch

    parameters: dict[int, torch.nn.Parameter] = {}
    buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
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
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in buffers:
                replacement = parameters.get(id(buffer), loaded.get(id(buffer)))
                # With the old one, whose id must not be reused while it is a key.
                buffers[id(buffer)] = (buffer, buffer.to(device) if replacement is None else replacement)
            module._buffers[name] = buffers[id(buffer)][1]


def _fill_rest(model: torch.nn.Module, device: torch.device, dtype: Callable[[str], Any]) -> None:
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
                becomes = dtype(f"{path}.{name}" if path else name)
                zeros = zeros if becomes is None else Torch().cast(zeros, becomes)
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
