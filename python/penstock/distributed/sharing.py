"""What was recorded, read together with the other ranks of the model where that spares the storage.

Each rank proposes what it wants (``plan`` makes one plan of all proposals), reads by itself what it alone wants, and
takes part in the ``exchange`` of the rest at the same time. On CPUs it is done where bytes come over a network: a disk
reads them again in the time that handing them on takes. Between GPUs it is done for what comes from a disk too. Where
any rank cannot or will not, or sees another version of the checkpoint, each reads everything for itself, and the
statistics say why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock._native import LoadOptions
from penstock.checkpoint import Checkpoint
from penstock.distributed.background_loads import BackgroundLoads
from penstock.distributed.exchange import INTERRUPT_WAIT_SECONDS, Exchange, ReadPiece, Wanted
from penstock.distributed.peers import Peers
from penstock.distributed.plan import Box, Key, Stored, make_plan, volume
from penstock.frameworks.torch import DTYPES
from penstock.parts import Part, load_parts
from penstock.progress import Progress, ProgressOption, SharedProgress, progress_reporter
from penstock.recording.pending import PendingCopy
from penstock.recording.statistics import Statistics

if TYPE_CHECKING:
    import torch

_PUT_TOGETHER_BYTES = 128 << 20
"""Parts that have to be converted are shared up to this size: they need as much memory besides their destination."""

SHARE_FROM: dict[str, set[str]] = {"cpu": {"network"}, "cuda": {"network", "disk"}}
"""Where bytes come from that are read once and handed on, by what they go to."""
_EVERYWHERE = {"network", "disk", "memory"}


class Proposal(NamedTuple):
    """What one rank proposes to the others."""

    fingerprints: list[int]
    """Of the checkpoints, in the order in which they were handed out."""
    coalesce_gaps: list[int]
    """The largest gap that a load of each reads rather than skips."""
    worth_sharing: bool
    """Whether this rank wants tensors to be shared."""
    wants: dict[Key, list[Box]]


class Sharing:
    """A rank's part in one load of a model.

    Args:
        peers: the ranks.
        always: whether tensors are shared even where reading them again costs little.
    """

    def __init__(self, peers: Peers, *, always: bool = False) -> None:
        self._peers = peers
        self._always = always

    def opt_out(self, why: str | BaseException) -> None:
        """Tells the others that this rank reads for itself, if they have not heard from it yet.

        Returns when they have heard. Where this rank is to stop (Ctrl-C, ``SystemExit``), that is not waited for long.
        """
        if isinstance(why, BaseException):
            seconds = None if isinstance(why, Exception) else INTERRUPT_WAIT_SECONDS
            self._peers.opt_out(f"{type(why).__name__}: {why}".strip(": "), seconds)
        else:
            self._peers.opt_out(why)

    def read(
        self,
        checkpoints: Sequence[Checkpoint],
        writes: Sequence[PendingCopy],
        device: torch.device,
        statistics: Statistics,
        alone: Callable[..., None],
        *,
        progress: ProgressOption,
        options: LoadOptions | None,
    ) -> None:
        """Reads ``writes``, which are all that is left to read.

        Args:
            checkpoints: the checkpoints, in the order in which they were handed out.
            writes: what to read.
            device: where shared tensors are exchanged; what is for elsewhere is not shared.
            statistics: of what was done.
            alone: reads some of the writes by itself; takes them, whom to notify of progress, and whom of loads.
            progress, options: of the loads.
        """
        table = _Table(checkpoints, options)
        proposal: Proposal | str
        try:
            mine = table.wanted(writes, str(device))
            share_from = _EVERYWHERE if self._always else SHARE_FROM[device.type]
            proposal = table.proposal([wanted for wanted, _ in mine], share_from)
        except Exception as error:  # noqa: BLE001 - the others are notified, and reading alone shows what it is
            proposal = f"{type(error).__name__}: {error}"
        try:
            why = _objection(proposals := self._peers.negotiate(proposal))
        except RuntimeError as error:
            why = f"a rank is gone: {error}"
        if why is not None:
            if self._peers.interruption is not None:
                raise self._peers.interruption
            if why:
                statistics.notes.append(f"each rank read for itself: {why}")
            alone(writes)
            return
        began, before = time.perf_counter(), statistics.seconds
        reporter = progress_reporter(progress, sum(write.nbytes for write in writes))
        try:
            with BackgroundLoads(2) as background:
                self._together(
                    table, proposals, mine, writes, device, statistics, alone, background, SharedProgress(reporter)
                )
        finally:
            reporter.close()
        took = time.perf_counter() - began
        statistics.overlap_seconds += max(0.0, statistics.seconds - before - took)

    def _together(
        self,
        table: _Table,
        proposals: list[Proposal],
        mine: list[tuple[Wanted, PendingCopy]],
        writes: Sequence[PendingCopy],
        device: torch.device,
        statistics: Statistics,
        alone: Callable[..., None],
        background: BackgroundLoads,
        reporter: Progress,
    ) -> None:
        def read(pieces: list[ReadPiece]) -> Future[None]:
            return background.submit(lambda: table.read(pieces, str(device), statistics, background))

        try:
            wants = [proposal.wants for proposal in proposals]
            tensors = {key: table.stored(key, proposals[0].coalesce_gaps[key[0]]) for want in wants for key in want}
            plan = make_plan(tensors, wants)
            shared = [(wanted, write) for wanted, write in mine if wanted.key in plan.keys]
            exchange = Exchange(self._peers, plan, tensors, wants, [wanted for wanted, _ in shared], device, read)
            of_others = {id(write) for _, write in shared}
            own = [write for write in writes if id(write) not in of_others]
            rest = background.submit(lambda: alone(own, reporter, background.begun))
        except Exception as error:  # noqa: BLE001 - the others are notified, and reading alone shows what it is
            self._peers.all_ok(ok=False)
            statistics.notes.append(f"each rank read for itself: {type(error).__name__}: {error}")
            alone(writes, reporter, background.begun)
            return
        except BaseException:
            with suppress(RuntimeError):
                self._peers.all_ok(ok=False, seconds=INTERRUPT_WAIT_SECONDS)
            raise
        if not exchange.run(ok=True, on_bytes=reporter.advance):
            why = "another rank could not go on" if exchange.failure is None else str(exchange.failure)
            statistics.notes.append(f"what was left each rank read for itself: {why}")
            left = set(map(id, exchange.left()))
            alone([write for _, write in shared if id(write.part) in left], reporter, background.begun)
        statistics.shared += len(plan.keys)
        statistics.received_bytes += exchange.received_bytes
        rest.result()


class _Table:
    """The checkpoints' tensors by number."""

    def __init__(self, checkpoints: Sequence[Checkpoint], options: LoadOptions | None) -> None:
        self._checkpoints = list(checkpoints)
        self._options = options
        self._names = [checkpoint.offset_keys() for checkpoint in self._checkpoints]
        self._numbers = [{name: number for number, name in enumerate(names)} for names in self._names]
        self._places = {id(checkpoint): number for number, checkpoint in enumerate(self._checkpoints)}

    def wanted(self, writes: Sequence[PendingCopy], device: str) -> list[tuple[Wanted, PendingCopy]]:
        """Those of the writes that could be shared."""
        found = []
        for write in writes:
            part, place = write.part, self._places[id(write.checkpoint)]
            info = write.checkpoint[part.name]
            dtype = DTYPES.get(info.dtype)
            rest = [(0, size) for size in info.shape[len(part.ranges) :]]
            box: Box = (*((start, end) for start, end in part.ranges), *rest)
            if write.device != device or not box or dtype is None or info.dtype == "F4":
                continue
            nbytes = volume(box, dtype.itemsize)
            if nbytes == 0 or (part.out is None and nbytes > _PUT_TOGETHER_BYTES):
                continue
            found.append((Wanted((place, self._numbers[place][part.name]), part, box, dtype), write))
        return found

    def proposal(self, mine: Sequence[Wanted], share_from: Collection[str]) -> Proposal:
        """What this rank proposes to the others; to be shared is what comes from one of ``share_from``."""
        wants: dict[Key, list[Box]] = {}
        for wanted in mine:
            wants.setdefault(wanted.key, []).append(wanted.box)
        reaches = [checkpoint.core.locality(self._options or checkpoint.options) for checkpoint in self._checkpoints]
        fingerprints = [checkpoint.core.fingerprint() for checkpoint in self._checkpoints]
        worth_sharing = any(origin in share_from for origin, _ in reaches)
        return Proposal(fingerprints, [gap for _, gap in reaches], worth_sharing, wants)

    def stored(self, key: Key, coalesce_gap_bytes: int) -> Stored:
        place, number = key
        info = self._checkpoints[place][self._names[place][number]]
        return Stored(tuple(info.shape), DTYPES[info.dtype].itemsize, coalesce_gap_bytes)

    def read(self, pieces: list[ReadPiece], device: str, statistics: Statistics, background: BackgroundLoads) -> None:
        if pieces:
            place = pieces[0].key[0]
            parts = [Part(self._names[place][piece.key[1]], piece.box, out=piece.into) for piece in pieces]
            silent = progress_reporter(None, 0)
            stats = load_parts(self._checkpoints[place], parts, device, silent, self._options, background.begun)
            statistics.loads.append(stats)


def _objection(proposals: list[Any]) -> str | None:
    """Why tensors are not shared; None where they are, nothing where that is nobody's concern."""
    for rank, proposal in enumerate(proposals):
        if not isinstance(proposal, Proposal):
            return f"rank {rank} does: {proposal}"
    if any(proposal.fingerprints != proposals[0].fingerprints for proposal in proposals):
        return "not all see the same version of the checkpoint"
    return None if any(proposal.worth_sharing for proposal in proposals) else ""
