"""How long a load of a checkpoint will take, found by loading parts of it.

Penstock's own load is the probe: it meets the storage, the link and the cores as the whole load will. Parts grow until
one takes long enough to tell, each of other tensors than the one before, spread over the files: what is cached is met
in the share that it has. What is left is taken to come at the rate of the last part. The interval is that
rate's own scatter, and what loads differ by from one run to the next.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from penstock._native import LoadOptions
from penstock.checkpoint import Checkpoint
from penstock.doctor import limits
from penstock.doctor.facts import Prediction

_FIRST = 48 << 20
"""Bytes of the first part."""
_MOST = 2 << 30
"""Bytes of all parts at most: they are in memory until the end."""
_GROWTH = 16
_SPANS = 8
"""So many places of the checkpoint a part is taken from."""
_ENOUGH = 2.5
"""Seconds of a part that tells enough."""
_MADE, _MAKING = 256 << 20, 1.0
"""Bytes, and seconds, of host memory that is touched to see how fast that is."""
_AGAIN = 2.0
"""Seconds more for a load to memory that is there."""
SLOW_MEMORY = 1.0
"""GB/s of touching memory for the first time below which that is a stage of its own."""
_BETWEEN_RUNS = 0.1
"""What two loads of the same differ by, as a standard deviation."""
_OF_PRESSURE = 0.25
"""What that grows by where somebody always waits for a core."""


@dataclass
class Part:
    """A load of some tensors."""

    nbytes: int
    seconds: float
    samples: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since its start, and bytes that had come by then."""


class _LongEnoughError(Exception):
    """The part takes too long: what came until now must do."""


def predict(
    ckpt: Checkpoint,
    device: str,
    opening: float,
    *,
    seconds: float,
    memory: int | None = None,
    pressure: float = 0.0,
    options: LoadOptions | None = None,
) -> Prediction | None:
    """Predicts a load of the whole checkpoint to a device, into fresh memory, by a process that has loaded nothing.

    Args:
        ckpt: the open checkpoint.
        device: ``"cpu"`` or ``"cuda:N"``.
        opening: how long opening it took.
        seconds: for all parts together, about.
        memory: bytes that may be taken meanwhile.
        pressure: the share of the time in which somebody waits for a core: then loads differ more.
        options: settings of the loads; by default the checkpoint's.

    Returns:
        None for a checkpoint without bytes, and where there is not enough memory for any part.

    Raises:
        PenstockError: the load failed, as the whole one would.
    """
    left = min(_MOST, _MOST if memory is None else memory // 3, _room_on(device))
    until, wanted, turn = time.perf_counter() + seconds, _FIRST, 0
    part: Part | None = None
    held: list[dict[str, Any]] = []
    parts: list[Part] = []
    while left > 0 and (part is None or part.seconds < _ENOUGH):
        names, slices, nbytes = spread(ckpt, min(wanted, left), turn)
        spare = until - time.perf_counter()
        if not nbytes or (part is not None and spare <= 0):
            break
        came, tensors = _load(ckpt, names, slices, nbytes, device, until, options)
        parts.append(came)
        if part is None or came.nbytes > part.nbytes:
            part = came
        if came.nbytes < nbytes:  # it was broken off
            break
        # What is freed would be given to the next part, as memory that is there already. The whole load has none.
        held.append(tensors)
        turn, left = turn + 1, left - nbytes
        if part.nbytes >= ckpt.nbytes:
            break
        # The next one takes most of the time that is left, if it is no faster.
        spare = until - time.perf_counter()
        reachable = int(part.nbytes / part.seconds * min(spare * 0.6, 1.2 * _ENOUGH)) if part.seconds else 0
        wanted = min(max(reachable, part.nbytes * 2), part.nbytes * _GROWTH)
    if part is None or not part.nbytes:
        return None
    # Measured last, since it takes memory that the parts would have had.
    made = limits.fresh_memory(min(_MADE, ckpt.nbytes), _MAKING)[0] if device == "cpu" else None
    is_slow = made is not None and made < SLOW_MEMORY
    # Memory gets the slower the more is taken: then all parts together are what the whole load goes through.
    loading, scatter = extrapolated(joined(parts) if is_slow else part, ckpt.nbytes)
    total, least = opening + loading, loading
    if is_slow:
        # A load that meets memory which is there is faster by far: the interval begins with that.
        held.clear()
        names, slices, nbytes = spread(ckpt, part.nbytes, turn)
        again, _ = _load(ckpt, names, slices, nbytes, device, until + _AGAIN, options)
        least = min(extrapolated(again, ckpt.nbytes)[0], loading) if again.nbytes else loading
    around = 2 * math.hypot(scatter, _BETWEEN_RUNS + _OF_PRESSURE * pressure)
    stats = ckpt.stats
    return Prediction(
        seconds=total,
        low=(opening + least) / (1 + around),
        high=total * (1 + around),
        gb_per_s=ckpt.nbytes / total / 1e9,
        limited_by=stats.limited_by if stats else "unknown",
        readers=stats.readers if stats else 0,
        probed_bytes=part.nbytes,
        fresh_memory=made,
        pinned=bool(stats and stats.pinned),
        notes=tuple(stats.notes) if stats else (),
    )


def _room_on(device: str) -> int:
    """Bytes that a part may take of a device's memory."""
    if device == "cpu":
        return _MOST
    import torch

    return int(torch.cuda.mem_get_info(device)[0]) // 4


def joined(parts: list[Part]) -> Part:
    """Parts, one after the other, as one."""
    whole = Part(0, 0.0, [(0.0, 0)])
    for part in parts:
        whole.samples += [(whole.seconds + seconds, whole.nbytes + nbytes) for seconds, nbytes in part.samples[1:]]
        whole.nbytes, whole.seconds = whole.nbytes + part.nbytes, whole.seconds + part.seconds
    return whole


def extrapolated(part: Part, nbytes: int) -> tuple[float, float]:
    """The seconds of a load of so many bytes, and how far that scatters, as a share of it.

    What the part lacks comes at the rate of its second half, since readers are added in the first; or at its own where
    that is faster: a pause in one half is not to count twice.
    """
    rates = [(b2 - b1) / (t2 - t1) for (t1, b1), (t2, b2) in pairwise(_sliced(part))]
    rate = part.nbytes / part.seconds
    if len(rates) >= 4:  # noqa: PLR2004 - else there is no second half to speak of
        rate = max(rate, statistics.harmonic_mean(rates[len(rates) // 2 :]))
    scatter = statistics.pstdev(rates) / statistics.fmean(rates) / math.sqrt(len(rates)) if len(rates) > 1 else 0.0
    if part.nbytes > nbytes:
        return next((seconds for seconds, came in part.samples if came >= nbytes), part.seconds), scatter
    return part.seconds + (nbytes - part.nbytes) / rate, scatter


def _sliced(part: Part, slices: int = 8) -> Iterator[tuple[float, int]]:
    """Points of a part's samples at about equal distances, as many as there are samples for."""
    step = part.seconds / slices
    at = -step
    for seconds, nbytes in part.samples:
        if seconds >= at + step:
            at = seconds
            yield seconds, nbytes


def spread(ckpt: Checkpoint, nbytes: int, turn: int) -> tuple[list[str], dict[str, tuple[slice, ...]], int]:
    """Tensors of so many bytes from several places of a checkpoint; each turn others, as far as there are others.

    A tensor that is larger than its place's share is cut in its first dimension.

    Returns:
        Names, slices of those that are cut, and the bytes of all.
    """
    names = [name for name in ckpt.offset_keys() if ckpt[name].nbytes]
    if nbytes >= ckpt.nbytes:
        return names, {}, ckpt.nbytes
    share = max(nbytes // _SPANS, 1)
    total = ckpt.nbytes
    chosen: list[str] = []
    slices: dict[str, tuple[slice, ...]] = {}
    taken, begin = 0, 0
    starts = [total * (2 * place + turn % 2) // (2 * _SPANS) for place in range(_SPANS)]
    place, of_place = -1, share
    for name in names:
        info = ckpt[name]
        while place + 1 < _SPANS and begin + info.nbytes > starts[place + 1]:
            place, of_place = place + 1, 0
        begin += info.nbytes
        if place < 0 or of_place >= share or taken >= nbytes:
            continue
        size = info.nbytes
        rows = info.shape[0] if info.shape else 1
        if size > 2 * (share - of_place) and rows > 1:
            keep = max(rows * (share - of_place) // size, 1)
            slices[name] = (slice(0, keep),)
            size = size // rows * keep
        chosen.append(name)
        of_place += size
        taken += size
    return chosen, slices, taken


def _load(
    ckpt: Checkpoint,
    names: list[str],
    slices: dict[str, tuple[slice, ...]],
    nbytes: int,
    device: str,
    until: float,
    options: LoadOptions | None,
) -> tuple[Part, dict[str, Any]]:
    """Loads them, and returns them too; what takes far longer than it may is broken off."""
    framework = "dlpack" if device == "cpu" else "pt"
    began = time.perf_counter()
    part = Part(0, 0.0, [(0.0, 0)])

    def came(done: int, _total: int) -> None:
        now = time.perf_counter()
        part.samples.append((now - began, done))
        if now > until and done < nbytes:
            raise _LongEnoughError

    try:
        tensors = ckpt.load(names, slices=slices, device=device, framework=framework, progress=came, options=options)
        if device != "cpu":
            import torch

            torch.cuda.synchronize(device)
    except _LongEnoughError:
        part.seconds, part.nbytes = part.samples[-1]
        return part, {}
    part.nbytes, part.seconds = nbytes, time.perf_counter() - began
    return part, tensors
