"""Whole tensors for all of several processes, each byte of which one of them reads and hands to the others.

The bytes of all tensors, in the order in which they lie, are one stream, cut into rounds. Of a round each process reads
a share, bytes that lie together; ``penstock.distributed`` exchanges the shares while the next are read. Every process
gets the tensors that are complete, in one order. A tensor may be any part of a round or go over several.

A tensor that was handed out has memory of its own. Besides the tensors of a round not more than ``MEMORY_BYTES`` of the
device's memory are held. All processes see the same version of the same files, or none begins. One that cannot go on
says so in the next round, upon which all stop with an error that names it. It knows nothing of this package's names.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from penstock import Checkpoint, LoadOptions, LoadStats, PeerError
from penstock.distributed.background_loads import BackgroundLoads
from penstock.distributed.exchange import Exchange, ReadPiece, Wanted
from penstock.distributed.peers import Peers
from penstock.distributed.plan import Box, ExchangePlan, Stored, Unit
from penstock.frameworks.torch import Torch
from penstock.parts import Part, load_parts
from penstock.progress import progress_reporter

MEMORY_BYTES = 320 << 20
"""Two shares, one of which is being read, and a round that goes and comes."""
_LEAST_SHARE_BYTES = 64 << 10
_ALIGN = 512


class SharedSource(NamedTuple):
    """Tensors of one checkpoint, in the order of their bytes."""

    checkpoint: Checkpoint
    names: Sequence[str]


class _Place(NamedTuple):
    """Where a tensor begins in the stream, and how long it is."""

    source: int
    name: str
    start: int
    nbytes: int


class _Proposal(NamedTuple):
    """What one process tells the others."""

    fingerprints: list[int]
    stream: bytes
    """A digest of what is streamed, and how it is cut."""
    is_short: bool
    """Whether the device has too little memory for it."""


class SharedStream:
    """One process's part in one stream.

    Args:
        peers: the processes. If this raises, telling them is the caller's (``Peers.opt_out``).
        sources: what to stream; the same for all.
        device: where tensors go.
        memory_bytes: the most memory besides them.
        share_bytes: what a process reads for a round, in the place of what ``memory_bytes`` allows.
        options: settings of the loads.

    Attributes:
        loads: figures of what this process has read.
        rounds: what each process reads of which tensor, round by round.
        is_broken: whether the processes cannot be talked to any more.
    """

    def __init__(
        self,
        peers: Peers,
        sources: Sequence[SharedSource],
        device: str,
        *,
        memory_bytes: int = MEMORY_BYTES,
        share_bytes: int | None = None,
        options: LoadOptions | None = None,
    ) -> None:
        self._peers = peers
        self._device = torch.device(Torch().device(device))
        self._options = options
        self._flat = [Checkpoint(of.checkpoint.core.as_bytes(), of.checkpoint.options) for of in sources]
        self._places: list[_Place] = []
        end = 0
        for number, (checkpoint, names) in enumerate(sources):
            for name in names:
                self._places.append(_Place(number, name, end, nbytes := checkpoint[name].nbytes))
                end += nbytes
        shares = 2 * peers.size + 2
        share = max(memory_bytes // shares if share_bytes is None else share_bytes, _LEAST_SHARE_BYTES)
        self.rounds = list(_cut(self._places, share, peers.size))
        self._needs_bytes = min(share * shares, 3 * end) + max((of.nbytes for of in self._places), default=0)
        self._complete: dict[int, torch.Tensor] = {}
        self._next = 0
        self._is_talking = False
        self.loads: list[LoadStats] = []
        self.is_broken = False

    # Agreeing, and ending

    def agree(self) -> bool:
        """Whether all processes take part; False where each had better read for itself, for lack of a device's memory.

        Raises:
            PeerError: a process is gone, cannot begin, or would stream something else.
        """
        digest = hashlib.sha256(repr((self._places, self.rounds, self._device.type)).encode()).digest()
        fingerprints = [checkpoint.core.fingerprint() for checkpoint in self._flat]
        try:
            proposals = self._peers.negotiate(_Proposal(fingerprints, digest, self._is_short()))
        except RuntimeError as error:
            raise _gone(error) from error
        for rank, proposal in enumerate(proposals):
            if isinstance(proposal, str):
                raise PeerError(f"process {rank} of {self._peers.size} cannot load: {proposal}", cause=proposal)
        if any(proposal.fingerprints != fingerprints for proposal in proposals):
            cause = "not all processes see the same version of the files"
            raise PeerError(cause=cause, remedy="Load again when the files are no longer written to")
        if any(proposal.stream != digest for proposal in proposals):
            cause = "not all processes ask for the same tensors, or have the same settings"
            raise PeerError(cause=cause)
        self._is_talking = not any(proposal.is_short for proposal in proposals)
        return self._is_talking

    def _is_short(self) -> bool:
        if self._device.type != "cuda":
            return False
        missing = self._needs_bytes - torch.cuda.mem_get_info(self._device)[0]
        return missing > 0 and not Torch().has_in_reserve(missing, str(self._device))

    def leave(self, why: str) -> None:
        """Tells the others, if they wait for a word, that this process does not go on."""
        if self._is_talking:
            self._break_off()
            try:
                self._peers.all_ok(ok=False)
                self._peers.failure_reasons(why)
            except RuntimeError:
                # They are gone, or have been told by another.
                pass

    def _break_off(self) -> None:
        """Says nothing more, since the others do not listen."""
        self._is_talking, self.is_broken = False, True

    def _stopped(self, exchange: Exchange) -> BaseException:
        """Why the exchange did not come to its end; the others hear of it where it is this process."""
        self._break_off()
        failure = exchange.failure
        why = None if failure is None else f"{type(failure).__name__}: {failure}"
        if exchange.is_cut_off:
            return failure if failure is not None and not isinstance(failure, Exception) else _gone(failure)
        try:
            reasons = self._peers.failure_reasons(why)
        except RuntimeError as error:
            return failure or _gone(error)
        told = [f"process {rank} of {self._peers.size} cannot go on: {why}" for rank, why in enumerate(reasons) if why]
        return failure or PeerError(told[0] if told else "a process cannot go on, and does not say why")

    # Streaming

    def tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Yields ``(number of the source, name, bytes)``, in the order of the sources; once, after ``agree``.

        Bytes are a tensor of one dimension, the caller's to keep.

        Raises:
            PeerError: another process could not go on. What this one fails with comes through; the others hear of it.
        """
        try:
            with BackgroundLoads(1) as background:
                yield from self._stream(background)
        except GeneratorExit:
            self.leave("what it streams was not taken to the end")
            raise
        except Exception as error:
            self.leave(f"{type(error).__name__}: {error}")
            raise
        except BaseException:
            # The process is about to end, by which the others notice; a word might keep it waiting.
            self._break_off()
            raise

    def _stream(self, background: BackgroundLoads) -> Iterator[tuple[int, str, torch.Tensor]]:
        own = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        tensors, mine = {}, []
        for number, place in enumerate(self._places):
            if place.nbytes:
                key, box = (place.source, number), ((0, place.nbytes),)
                tensors[key] = Stored((place.nbytes,), 1, 0)
                part = Part(place.name, box, on_ready=partial(self._complete.__setitem__, number))
                mine.append(Wanted(key, part, box, torch.uint8))
        wants = [{wanted.key: [wanted.box] for wanted in mine}] * self._peers.size
        plan = ExchangePlan(self.rounds, frozenset(tensors))
        exchange = Exchange(self._peers, plan, tensors, wants, mine, self._device, partial(self._read, background))
        taken = exchange.rounds()
        while self._is_talking:
            with ExitStack() as entered:
                # Whoever takes tensors may be in inference mode now and not later: they could not be written to then.
                entered.enter_context(torch.inference_mode(mode=False))
                if own is not None:
                    entered.enter_context(torch.cuda.stream(own))
                went_on = next(taken, None) is not None
            if not (went_on or exchange.is_complete):
                raise self._stopped(exchange)
            self._is_talking = not exchange.is_complete
            yield from self._handed_out(own)

    def _read(self, background: BackgroundLoads, pieces: list[ReadPiece]) -> Future[None]:
        parts: dict[int, list[Part]] = {}
        for (source, number), box, into in pieces:
            parts.setdefault(source, []).append(Part(self._places[number].name, box, out=into))

        def read() -> None:
            for source, some in parts.items():
                silent = progress_reporter(None, 0)
                stats = load_parts(self._flat[source], some, str(self._device), silent, self._options, background.begun)
                self.loads.append(stats)

        return background.submit(read)

    def _handed_out(self, own: Any) -> Iterator[tuple[int, str, torch.Tensor]]:
        """The next tensors, as long as they are complete."""
        while self._next < len(self._places):
            place = self._places[self._next]
            memory = self._complete.pop(self._next, None)
            if memory is None and place.nbytes:
                return
            if memory is None:
                memory = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._next += 1
            if own is not None and (taker := torch.cuda.current_stream(self._device)) != own:
                taker.wait_stream(own)
                memory.record_stream(taker)
            yield place.source, place.name, memory


def _cut(places: Sequence[_Place], share: int, ranks: int) -> Iterator[list[Unit]]:
    """What each rank reads of every round: ``share`` bytes that lie together, of the last round less."""
    share = -(-share // _ALIGN) * _ALIGN
    end = places[-1].start + places[-1].nbytes if places else 0
    starts = [place.start for place in places]
    for begin in range(0, end, share * ranks):
        until = min(begin + share * ranks, end)
        each = -(-(until - begin) // ranks // _ALIGN) * _ALIGN
        edges = [min(begin + each * rank, until) for rank in range(ranks)] + [until]
        units = []
        for number in range(max(0, bisect_right(starts, begin) - 1), bisect_left(starts, until)):
            place = places[number]
            whole = _box(place, begin, until)
            if whole is not None:
                pieces = [_box(place, *edge) for edge in pairwise(edges)]
                units.append(Unit((place.source, number), whole, pieces))
        yield units


def _box(place: _Place, begin: int, end: int) -> Box | None:
    """What of a tensor lies between two places of the stream."""
    first, last = max(place.start, begin), min(place.start + place.nbytes, end)
    return ((first - place.start, last - place.start),) if first < last else None


def _gone(error: BaseException | None) -> PeerError:
    cause = f"a process is gone, or did not answer in time: {error}"
    return PeerError(cause=cause, remedy="Look into the logs of the others")
