"""What ``load_into`` reads where: destinations by name become parts of one load for each device.

Everything that can be wrong with a destination is found here, before a byte is written. Bytes go straight into memory
that is contiguous and of the checkpoint's dtype. What has to be converted, or lies scattered, arrives in pieces of at
most ``PIECE_BYTES`` next to its destination and is copied there; a load's window bounds how many wait at once, so no
second copy of the weights exists.

Knows names, shapes and byte ranges; what a tensor is, and where its memory lies, its framework says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple

from penstock.errors import DestinationError
from penstock.frameworks.base import Destination, WritableFramework
from penstock.parts import Part
from penstock.strides import Strided, are_disjoint, overlaps_itself
from penstock.tensor_info import TensorInfo

DtypeMismatch = Literal["convert", "error"]

PIECE_BYTES = 64 << 20
"""The most bytes of one piece that is converted."""

_FLOATS = frozenset(["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F4"])


class FillPlan(NamedTuple):
    """The parts of a ``load_into``."""

    parts: dict[str, list[Part]]
    """By device."""
    nbytes: int
    """Bytes that will be read of the checkpoint."""
    written: list[Any]
    """Every tensor that is written to: as the caller gave it, and the local shards of it."""


def fit(
    infos: Mapping[str, TensorInfo],
    names: Iterable[str],
    tensors: Mapping[str, Any],
    library: WritableFramework,
    dtype_mismatch: DtypeMismatch,
) -> tuple[list[Fill], list[DestinationError]]:
    """Checks the destinations of ``names``, each by itself: those that fit, and what is wrong with the others.

    Of tied destinations one is left: the last name in the order of ``tensors``, as with ``load_state_dict``.
    """
    chosen = set(names)
    fills: dict[tuple[Destination, ...], Fill] = {}
    misfits: list[DestinationError] = []
    for name, tensor in tensors.items():
        if name in chosen:
            try:
                fill = _fill(infos[name], tensor, library, dtype_mismatch)
            except DestinationError as error:
                misfits.append(error)
                continue
            key = tuple(target.destination for target in fill.targets)
            if key:
                fills[key] = fill
    return list(fills.values()), misfits


def plan(fills: Sequence[Fill], library: WritableFramework) -> FillPlan:
    """Says what is read where.

    Raises:
        DestinationError: for the first destination that overlaps another.
    """
    _check_apart(fills)
    planned = FillPlan({}, 0, [])
    nbytes = 0
    for fill in fills:
        planned.written.append(fill.tensor)
        for target in fill.targets:
            if target.memory is not fill.tensor:
                planned.written.append(target.memory)
            parts = planned.parts.setdefault(target.destination.device, [])
            share = _share(fill.info, target.destination)
            nbytes += share
            parts.extend(_parts(fill.info, target, share, library))
    return planned._replace(nbytes=nbytes)


class _Target(NamedTuple):
    """A box of a tensor, and its memory."""

    ranges: tuple[tuple[int, int], ...]
    memory: Any
    destination: Destination


class Fill(NamedTuple):
    """A tensor of the checkpoint, and what of it goes where."""

    info: TensorInfo
    tensor: Any
    targets: list[_Target]


def _fill(info: TensorInfo, tensor: Any, library: WritableFramework, dtype_mismatch: DtypeMismatch) -> Fill:
    targets: list[_Target] = []
    try:
        pieces = library.pieces(info.name, tensor)
        for ranges, memory in pieces:
            destination = library.destination(info.name, memory)
            if not targets:
                _check_dtype(info, memory, destination, library, dtype_mismatch)
            targets.append(_Target(ranges, memory, destination))
    except DestinationError as error:
        raise _wrong(info, error.cause or str(error), error.remedy) from error
    shape = list(library.shape(tensor))
    if shape != list(info.shape):
        cause = f"size mismatch: the checkpoint's shape is {list(info.shape)}, the destination's {shape}"
        remedy = "Build the destination with that shape, leave the tensor out with names=, or load it and copy_ a part"
        raise _wrong(info, cause, remedy)
    for target in targets:
        destination = target.destination
        element = destination.nbytes // max(prod(destination.shape), 1)
        if destination.strides is not None and overlaps_itself(destination.shape, destination.strides, element):
            cause = f"elements of the destination share memory (strides {list(destination.strides)} bytes)"
            raise _wrong(info, cause, "Give a tensor that was not expanded: destination.contiguous()")
    return Fill(info, tensor, [target for target in targets if target.destination.nbytes])


def _check_dtype(
    info: TensorInfo, memory: Any, destination: Destination, library: WritableFramework, dtype_mismatch: DtypeMismatch
) -> None:
    if info.dtype == destination.dtype and (destination.strides is None or info.dtype != "F4"):
        return
    cause = f"dtype mismatch: the checkpoint's dtype is {info.dtype}, the destination's {destination.dtype}"
    if dtype_mismatch == "error" and info.dtype != destination.dtype:
        remedy = f"Build the destination with dtype {info.dtype} (a module: module.to(…)), or let it be converted"
        raise _wrong(info, cause, f'{remedy}: dtype_mismatch="convert"')
    if not keeps_values(info.dtype, destination.dtype):
        remedy = "Load it with ckpt.load([name]), and convert it as you see fit"
        raise _wrong(info, f"{cause}: only floating-point numbers are converted, no others are cut off", remedy)
    refused = library.cannot_convert(info.dtype, memory)
    if refused is not None:
        remedy = f"Build the destination with dtype {info.dtype}"
        raise _wrong(info, f"{cause}, and {refused}", remedy)


def keeps_values(source: str, destination: str) -> bool:
    """Whether elements of one dtype are copied to another: of floating-point numbers, which are rounded.

    Args:
        source, destination: dtypes as safetensors spells them.
    """
    return source == destination or (source in _FLOATS and destination in _FLOATS | {"C64"})


def _parts(info: TensorInfo, target: _Target, nbytes: int, library: WritableFramework) -> Iterator[Part]:
    """A part that is read in place, or those that are copied."""
    ranges, memory, destination = target
    if destination.strides is None and destination.dtype == info.dtype:
        yield Part(info.name, ranges, out=memory, destination=destination)
        return
    box = [*ranges, *((0, size) for size in info.shape[len(ranges) :])]
    for cut in _cut(box, nbytes):
        inner = [slice(start - first, end - first) for (start, end), (first, _) in zip(cut, box, strict=True)]
        # The ellipsis keeps a numpy array without dimensions an array.
        index = (*inner, Ellipsis)
        yield Part(info.name, cut, on_ready=partial(library.put, memory[index]))


def _cut(box: Sequence[tuple[int, int]], nbytes: int) -> Iterator[list[tuple[int, int]]]:
    """Boxes of at most ``PIECE_BYTES``, each consecutive bytes of ``box`` packed."""
    at = next((at for at, (start, end) in enumerate(box) if end - start > 1), None)
    if nbytes <= PIECE_BYTES or at is None:
        yield list(box)
        return
    start, end = box[at]
    row = nbytes // (end - start)
    step = max(PIECE_BYTES // row, 1)
    for first in range(start, end, step):
        last = min(first + step, end)
        yield from _cut([*box[:at], (first, last), *box[at + 1 :]], row * (last - first))


def _share(info: TensorInfo, destination: Destination) -> int:
    """Bytes of the checkpoint that a destination takes."""
    if destination.shape == info.shape:
        return info.nbytes
    elements, whole = prod(destination.shape), prod(info.shape)
    return info.nbytes * elements // whole if whole else 0


def _check_apart(fills: Iterable[Fill]) -> None:
    """Refuses destinations that share memory without being the same: one would end as a mixture."""
    by_device: dict[str, list[tuple[TensorInfo, Strided]]] = {}
    for fill in fills:
        for target in fill.targets:
            by_device.setdefault(target.destination.device, []).append((fill.info, _strided(target.destination)))
    for destinations in by_device.values():
        spans = sorted((*strided.span(), at) for at, (_, strided) in enumerate(destinations))
        for number, (_, end, at) in enumerate(spans):
            later = number + 1
            while later < len(spans) and spans[later][0] < end:
                (info, one), (other_info, other) = destinations[at], destinations[spans[later][2]]
                if not are_disjoint(one, other):
                    cause = f"its destination overlaps that of {info.name!r} and is not the same tensor"
                    remedy = "Give each tensor memory of its own, or load them one after the other with names="
                    raise _wrong(other_info, cause, remedy)
                later += 1


def _strided(destination: Destination) -> Strided:
    if destination.strides is None:
        return Strided(destination.address, (destination.nbytes,), (1,), 1)
    element = destination.nbytes // prod(destination.shape)
    return Strided(destination.address, destination.shape, destination.strides, element)


def _wrong(info: TensorInfo, cause: str, remedy: str | None) -> DestinationError:
    return DestinationError(location=info.location, tensor=info.name, cause=cause, remedy=remedy)
