"""What the ranks of a model want of its tensors, as numbers: who reads what, and who hands what to whom.

Tensor parallelism gives a rank some rows of one tensor and some columns of another. Rows lie together, so each rank
reads its own. Columns lie a little apart in every row: whoever wants them reads the rows whole, and as every rank does,
the storage delivers the tensor once for each. The same holds for what several ranks want all of. Such tensors are
*shared*: cut into **units** of consecutive bytes, every unit into one **piece** for each rank to read, and units put
together in **batches**, after each of which every rank hands the others what they want of its pieces.

Pure arithmetic of boxes, which comes out the same on all ranks for it is made of the same wants. Knows neither tensors
nor files nor processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

Box = tuple[tuple[int, int], ...]
"""``(start, end)`` for every dimension."""
Key = tuple[int, int]
"""A tensor: the number of its checkpoint, and its own among the checkpoint's, in the order of their bytes."""

LEAST_BYTES = 64 << 10
"""What is not larger is read by whoever wants it."""
UNIT_BYTES = 64 << 20
"""The most bytes of a unit."""
BATCH_BYTES = 320 << 20
"""The most memory that a rank needs besides its destinations: pieces of two batches, and what goes and comes of one."""
_GAIN = 8
"""A tensor is shared if that saves an eighth of it."""


class Stored(NamedTuple):
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    itemsize: int
    coalesce_gap_bytes: int
    """The largest gap that a load of it reads rather than skips."""


class Unit(NamedTuple):
    """Consecutive bytes of a shared tensor, and the boxes that make them up: what each rank reads, or None."""

    key: Key
    box: Box
    pieces: list[Box | None]


class ExchangePlan(NamedTuple):
    """A plan. Ranks carry it out batch by batch."""

    batches: list[list[Unit]]
    keys: frozenset[Key]
    """The tensors that are shared; what is wanted of others is read as it is."""


def volume(box: Box, itemsize: int) -> int:
    """Bytes of a box."""
    return itemsize * prod(end - start for start, end in box)


def common(one: Box, other: Box) -> Box | None:
    """What lies in both, or None."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < end for start, end in both) else None


def read_alone(stored: Stored, box: Box) -> int:
    """Bytes that leave the storage for a box that one rank reads by itself."""
    amount = span = pitch = stored.itemsize
    for (start, end), size in zip(reversed(box), reversed(stored.shape), strict=True):
        more = (end - start - 1) * pitch
        coalesced = amount == span and pitch - span <= stored.coalesce_gap_bytes
        amount = more + span if coalesced else amount * (end - start)
        span += more
        pitch *= size
    return amount


def make_plan(tensors: Mapping[Key, Stored], wants: Sequence[Mapping[Key, Sequence[Box]]]) -> ExchangePlan:
    """Which tensors are shared, and how.

    Args:
        tensors: all that are wanted by anyone.
        wants: of every rank, boxes that are not empty.
    """
    ranks = len(wants)
    batches: list[list[Unit]] = []
    shared, room = [], 0
    for key in sorted(set().union(*wants)):
        stored = tensors[key]
        boxes = [box for want in wants for box in want.get(key, ())]
        hull = _consecutive(stored, boxes)
        whole = volume(hull, stored.itemsize)
        alone = sum(min(sum(read_alone(stored, box) for box in want[key]), whole) for want in wants if want.get(key))
        if whole < LEAST_BYTES or (alone - whole) * _GAIN < whole:
            continue
        shared.append(key)
        for box in _cut(stored, hull, ranks):
            unit = Unit(key, box, _pieces(box, ranks))
            needs = _memory(stored, unit, [want.get(key, ()) for want in wants])
            # A batch is one load, so it is of one checkpoint.
            if not batches or needs > room or batches[-1][-1].key[0] != key[0]:
                batches.append([])
                room = BATCH_BYTES
            batches[-1].append(unit)
            room -= needs
    return ExchangePlan(batches, frozenset(shared))


def _consecutive(stored: Stored, boxes: Sequence[Box]) -> Box:
    """The smallest consecutive bytes that hold all boxes, of a tensor in row-major order."""
    hull = [(min(start for start, _ in of), max(end for _, end in of)) for of in zip(*boxes, strict=True)]
    outer = _outer(tuple(hull))
    return (*hull[: outer + 1], *((0, size) for size in stored.shape[outer + 1 :]))


def _outer(box: Box) -> int:
    """The first dimension in which a box is more than one thick; the last if there is none."""
    return next((d for d, (start, end) in enumerate(box) if end - start > 1), len(box) - 1)


def _cut(stored: Stored, box: Box, ranks: int) -> Iterator[Box]:
    """Consecutive boxes, in the order of their bytes, each small enough, with a row or more for every rank."""
    outer = _outer(box)
    start, end = box[outer]
    row = volume(box, stored.itemsize) // (end - start)
    if outer + 1 < len(box) and (row * ranks > UNIT_BYTES or end - start < ranks):
        for at in range(start, end):
            yield from _cut(stored, (*box[:outer], (at, at + 1), *box[outer + 1 :]), ranks)
        return
    step = max(1, UNIT_BYTES // (row * ranks)) * ranks
    for at in range(start, end, step):
        yield (*box[:outer], (at, min(at + step, end)), *box[outer + 1 :])


def _pieces(box: Box, ranks: int) -> list[Box | None]:
    outer = _outer(box)
    start, end = box[outer]
    cuts = [start + (end - start) * rank // ranks for rank in range(ranks + 1)]
    return [
        (*box[:outer], (cuts[rank], cuts[rank + 1]), *box[outer + 1 :]) if cuts[rank] < cuts[rank + 1] else None
        for rank in range(ranks)
    ]


def _memory(stored: Stored, unit: Unit, wants: Sequence[Sequence[Box]]) -> int:
    """The most that a rank needs for a unit: its piece, what goes and comes, and a piece that is read meanwhile."""
    start, end = unit.box[_outer(unit.box)]
    rows = end - start
    most = max(volume(piece, stored.itemsize) for piece in unit.pieces if piece is not None)
    most_rows = -(-rows // len(wants))
    comes, goes = 0, 0
    for boxes in wants:
        wanted = 0
        for box in boxes:
            part = common(box, unit.box)
            if part is not None:
                wanted += volume(part, stored.itemsize)
                first, last = part[_outer(unit.box)]
                goes += volume(part, stored.itemsize) // (last - first) * min(most_rows, last - first)
        comes = max(comes, wanted)
    return 2 * most + goes + comes
