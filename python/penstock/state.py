"""Destinations by name: the tensors of a module or a mapping, and what of them a checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import DestinationError, TensorNotFoundError

if TYPE_CHECKING:
    import torch

_SHOWN = 20
"""Names listed in a message."""
_MISFITS = 10
"""Tensors that do not fit, each with what is wrong with it, listed in a message."""
_REMEDIES = 3
"""What to do about them, listed in a message."""


class IncompatibleKeys(NamedTuple):
    """Names that only one side has, as ``torch.nn.Module.load_state_dict`` returns them."""

    missing_keys: list[str]
    """In the model, not in the checkpoint."""
    unexpected_keys: list[str]
    """In the checkpoint, not in the model."""


def state_of(destinations: Any) -> tuple[str, dict[str, Any], dict[str, list[str]]]:
    """The tensors of a module or a mapping: what they belong to, the tensors by name, and for every name, all names
    of the same tensor (itself included).

    Raises:
        DestinationError: for anything else, and for modules that cannot be filled by name.
        MissingDependencyError: for what may be a module, where torch is absent or too old.
    """
    if isinstance(destinations, Mapping):
        tensors = dict(destinations)
        return "the mapping", tensors, {name: [name] for name in tensors}
    if not hasattr(destinations, "state_dict"):
        raise _no_destinations(destinations)
    from penstock.optional import required

    required("torch", by="load_into with a module")
    import torch

    from penstock.frameworks.sharded import check_module

    if isinstance(destinations, torch.nn.Module):
        # Before its hooks run: those of FSDP change the module.
        check_module(destinations)
    # A module may keep more than tensors (``get_extra_state``), which no checkpoint of tensors holds.
    try:
        state = destinations.state_dict(keep_vars=True)
    except TypeError as error:
        # Of optimizers and schedulers, whose state is none of tensors by name.
        if isinstance(destinations, torch.nn.Module):
            raise
        raise _no_destinations(destinations) from error
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if isinstance(destinations, torch.nn.Module):
        tensors = _own(destinations, tensors)
    for name, tensor in tensors.items():
        if torch.nn.parameter.is_lazy(tensor):
            cause = "it has no shape before the first forward pass (a lazy module)"
            remedy = "Build the module with its sizes, or call it once"
            raise DestinationError(f"parameter {name!r}: {cause}. {remedy}", tensor=name, cause=cause, remedy=remedy)
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    return type(destinations).__name__, tensors, {name: groups[id(tensor)] for name, tensor in tensors.items()}


def _no_destinations(given: object) -> DestinationError:
    what = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
    cause = f"{what} is neither a torch.nn.Module nor a mapping from names to tensors"
    remedy = (
        "Give the module, or a mapping such as {name: tensor}; what an optimizer holds goes through its load_state_dict"
    )
    return DestinationError(cause=cause, remedy=remedy)


def _own(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a module's state, the tensors that are its parameters and buffers, or views of them.

    Raises:
        DestinationError: for a copy that a hook made: what is written to it does not reach the module.
    """
    known = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
    others = {name: tensor for name, tensor in tensors.items() if id(tensor) not in known}
    if not others:
        return tensors
    memories = {_memory(tensor) for tensor in known.values()} - {None}
    for name, tensor in others.items():
        if name.rpartition(".")[2] != "_extra_state" and tensor.numel() and _memory(tensor) not in memories:
            cause = "state_dict() gives a copy of it, so what is written there does not reach the module"
            remedy = "Use load_state_dict, or give a mapping of the tensors to fill"
            raise DestinationError(tensor=name, cause=cause, remedy=remedy)
    return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] != "_extra_state"}


def _memory(tensor: torch.Tensor) -> int | None:
    """What tells a tensor's memory from that of others, on the meta device too."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


def report(owner: str, keys: IncompatibleKeys, misfits: Sequence[DestinationError] = ()) -> None:
    """Raises TensorNotFoundError if there are incompatible keys, in the words of torch.

    Args:
        misfits: what else does not fit; listed in the same message.
    """
    lines = []
    for kind, names in (("Missing", keys.missing_keys), ("Unexpected", keys.unexpected_keys)):
        if names:
            shown = ", ".join(f'"{name}"' for name in names[:_SHOWN]) + _more(names, _SHOWN)
            lines.append(f"{kind} key(s) in the checkpoint ({len(names)}): {shown}.")
    if lines:
        first = (keys.missing_keys or keys.unexpected_keys)[0]
        remedy = "Give strict=False to load what both have"
        if misfits:
            lines.extend(_lines(misfits))
            remedy += f". {_remedies(misfits)}"
        message = f"The checkpoint does not fit {owner}:\n\t" + "\n\t".join(lines) + f"\n{remedy}"
        raise TensorNotFoundError(message, tensor=first, cause=" ".join(lines), remedy=remedy)


def report_misfits(owner: str, misfits: Sequence[DestinationError]) -> None:
    """Raises DestinationError if any tensor does not fit: of several, all are listed, in the words of torch."""
    if len(misfits) == 1:
        raise misfits[0]
    if misfits:
        first, lines, remedy = misfits[0], _lines(misfits), _remedies(misfits)
        where = f"{first.location}: " if len({error.location for error in misfits}) == 1 else ""
        message = f"{where}the checkpoint does not fit {owner}:\n\t" + "\n\t".join(lines) + f"\n{remedy}"
        raise DestinationError(
            message, location=first.location, tensor=first.tensor, cause=" ".join(lines), remedy=remedy, code=first.code
        ) from first


def _lines(misfits: Sequence[DestinationError]) -> list[str]:
    """What is wrong, tensor by tensor."""
    lines = []
    for error in misfits[:_MISFITS]:
        what, mismatch, rest = error.cause.partition(" mismatch: ")
        lines.append(f"{what} mismatch for {error.tensor}: {rest}." if mismatch else f"{error.tensor}: {error.cause}.")
    more = _more(misfits, _MISFITS)
    return [*lines, f"{more.strip()}."] if more else lines


def _remedies(misfits: Sequence[DestinationError]) -> str:
    each = dict.fromkeys(error.remedy for error in misfits[:_MISFITS] if error.remedy)
    return ". ".join(list(each)[:_REMEDIES])


def _more(listed: Sequence[object], shown: int) -> str:
    return f" and {len(listed) - shown} more" if len(listed) > shown else ""
