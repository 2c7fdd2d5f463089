"""Whole tensors for all of several ranks, each byte of which one of them reads and hands to the others.

The bytes of all tensors, in the order in which they lie, are one stream, cut into rounds. Of a round each rank reads a
share, bytes that lie together, while the round before is handed out; when all have read theirs, each gives its own and
gets the others', and every rank gets the tensors that are complete, in one order. A tensor may be any part of a round
or go over several.

A tensor that was handed out has memory of its own. Besides those not more than ``MEMORY_BYTES`` of the device's memory
are held, whatever the tensors. On a GPU all is queued on one stream, and nothing waits for it.

All ranks see the same version of the same files, or none begins. One that cannot go on says so in the next round, upon
which all stop with an error that names it; a silence lasts no longer than the process group's timeout.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from penstock._native import LoadOptions, LoadStats
from penstock.checkpoint import Checkpoint
from penstock.distributed.beside import Beside
from penstock.distributed.peers import Peers
from penstock.errors import PeerError
from penstock.frameworks.torch import Torch
from penstock.parts import Part, load_parts
from penstock.progress import teller

MEMORY_BYTES = 320 << 20
"""Shares of three rounds, which are read, waited for and given, and a round that comes."""
_LEAST_SHARE_BYTES = 64 << 10
_ALIGN = 512
_AHEAD = 2
"""Rounds whose shares are asked for while another is handed out, so that the storage is never idle between two."""


class Source(NamedTuple):
    """Tensors of one checkpoint, in the order of their bytes."""

    checkpoint: Checkpoint
    names: Sequence[str]


class _Place(NamedTuple):
    """Where a tensor begins in the stream, and how long it is."""

    source: int
    name: str
    start: int
    nbytes: int


class _Round(NamedTuple):
    """Bytes of the stream, and how many of them each rank reads; the last ranks may have fewer, or none."""

    start: int
    end: int
    share: int


class _Proposal(NamedTuple):
    """What one rank tells the others."""

    fingerprints: list[int]
    stream: bytes
    """A digest of what is streamed, and how it is cut."""
    is_short: bool
    """Whether the device has too little memory for it."""


class Relay:
    """One rank's part in one stream.

    Args:
        peers: the ranks. If this raises, telling them is the caller's (``Peers.withdraw``).
        sources: what to stream; the same for all.
        device: where tensors go.
        memory_bytes: the most memory besides them.
        share_bytes: what a rank reads for a round, in the place of what ``memory_bytes`` allows.
        options: settings of the loads.

    Attributes:
        loads: figures of what this rank has read.
        is_broken: whether the ranks cannot be talked to any more.
    """

    def __init__(
        self,
        peers: Peers,
        sources: Sequence[Source],
        device: Any,
        *,
        memory_bytes: int = MEMORY_BYTES,
        share_bytes: int | None = None,
        options: LoadOptions | None = None,
    ) -> None:
        self._peers = peers
        self._device = torch.device(Torch().device(device))
        self._options = options
        self._flat = [Checkpoint(of.checkpoint._native.as_bytes(), of.checkpoint.options) for of in sources]
        self._places: list[_Place] = []
        end = 0
        for number, (checkpoint, names) in enumerate(sources):
            for name in names:
                nbytes = checkpoint[name].nbytes
                self._places.append(_Place(number, name, end, nbytes))
                end += nbytes
        self._starts = [place.start for place in self._places]
        most = memory_bytes // (peers.size + _AHEAD + 1) if share_bytes is None else share_bytes
        self._rounds = list(_cut(end, max(most, _LEAST_SHARE_BYTES), peers.size))
        # Memory that is used again: fresh memory costs more than what is done in it.
        self._comes: torch.Tensor | None = None
        self._shares: list[torch.Tensor] = []
        self._next = 0
        self._partial: torch.Tensor | None = None
        self._is_talking = False
        self.loads: list[LoadStats] = []
        self.is_broken = False

    # Agreeing, and ending

    def agree(self) -> bool:
        """Whether all ranks take part; False where each had better read for itself, for lack of memory of a device.

        Raises:
            PeerError: a rank is gone, cannot begin, or would stream something else.
        """
        told = hashlib.sha256(repr((self._places, self._rounds, self._device.type)).encode()).digest()
        fingerprints = [checkpoint._native.fingerprint() for checkpoint in self._flat]
        proposals = agreed(self._peers, _Proposal(fingerprints, told, self._is_short()))
        if any(proposal.fingerprints != fingerprints for proposal in proposals):
            cause = "not all processes see the same version of the files"
            raise PeerError(cause, cause=cause, remedy="Load again when the files are no longer written to")
        if any(proposal.stream != told for proposal in proposals):
            cause = "not all processes ask for the same tensors, or have the same settings"
            raise PeerError(cause, cause=cause)
        if any(proposal.is_short for proposal in proposals):
            return False
        self._is_talking = True
        return True

    def _is_short(self) -> bool:
        if self._device.type != "cuda":
            return False
        share = max((of.share for of in self._rounds), default=0)
        needs = share * (self._peers.size + _AHEAD + 1) + max((of.nbytes for of in self._places), default=0)
        missing = needs - torch.cuda.mem_get_info(self._device)[0]
        return missing > 0 and not Torch().has_in_reserve(missing, str(self._device))

    def leave(self, why: str) -> None:
        """Tells the others, if they wait for a word, that this rank does not go on."""
        if self._is_talking:
            self._break_off()
            try:
                self._peers.all_well(well=False)
                self._peers.reasons(why)
            except RuntimeError:
                # They are gone, or have been told by another.
                pass

    def _break_off(self) -> None:
        """Says nothing more, since the others do not listen."""
        self._is_talking, self.is_broken = False, True

    def _hear(self) -> None:
        """Says that this rank is well, and hears whether all are.

        Raises:
            PeerError: one is not, or is gone.
        """
        try:
            if self._peers.all_well(well=True):
                return
            self._break_off()
            reasons = self._peers.reasons(None)
        except RuntimeError as error:
            self._break_off()
            raise _gone(error) from error
        told = [f"process {rank} of {self._peers.size} cannot go on: {why}" for rank, why in enumerate(reasons) if why]
        raise PeerError(told[0] if told else "a process cannot go on, and does not say why")

    # Streaming

    def tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Yields ``(number of the source, name, bytes)``, in the order of the sources; once, after ``agree``.

        Bytes are a tensor of one dimension, the caller's to keep.

        Raises:
            PeerError: another rank could not go on. What this one fails with comes through, and the others hear of it.
        """
        try:
            with Beside(self._device, 1) as beside:
                yield from self._stream(beside)
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

    def _stream(self, beside: Beside) -> Iterator[tuple[int, str, torch.Tensor]]:
        own = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        reading = deque(beside.submit(partial(self._read, of, beside)) for of in self._rounds[:_AHEAD])
        for number, of in enumerate(self._rounds):
            comes = self._exchanged(of, reading, own)
            following = self._rounds[number + _AHEAD : number + _AHEAD + 1]
            reading.extend(beside.submit(partial(self._read, of, beside)) for of in following)
            if number + 1 == len(self._rounds):
                self._ended()
            while (place := self._complete(comes, of, own)) is not None:
                yield place
        if not self._rounds:
            self._ended()
            while (place := self._complete(torch.empty(0), _Round(0, 0, 0), own)) is not None:
                yield place

    def _ended(self) -> None:
        """The last word, after which no rank depends on another."""
        self._hear()
        self._is_talking = False

    def _exchanged(self, of: _Round, reading: deque[Future[torch.Tensor]], own: Any) -> torch.Tensor:
        """What a round holds. The last that a rank has to wait for is its own share."""
        with nullcontext() if own is None else torch.cuda.stream(own):
            nbytes = of.share * self._peers.size
            if self._comes is None:
                self._comes = self._fresh(nbytes)
            comes = self._comes[:nbytes]
            mine = reading.popleft().result()
            self._hear()
            try:
                self._peers.gather(comes, mine[: of.share])
            except RuntimeError as error:
                self._break_off()
                raise _gone(error) from error
        self._shares.append(mine)
        return comes

    def _read(self, of: _Round, beside: Beside) -> torch.Tensor:
        """The share of a round that this rank reads."""
        try:
            memory = self._shares.pop()
        except IndexError:
            memory = self._fresh(self._rounds[0].share)
        start = of.start + of.share * self._peers.rank
        end = min(start + of.share, of.end)
        parts: dict[int, list[Part]] = {}
        # From the last tensor that begins there or before; those without bytes need no reading.
        for index in range(max(0, bisect_right(self._starts, start) - 1), len(self._places)):
            place = self._places[index]
            if place.start >= end:
                break
            first, last = max(place.start, start), min(place.start + place.nbytes, end)
            if first < last:
                box = [(first - place.start, last - place.start)]
                part = Part(place.name, box, into=memory[first - start : last - start])
                parts.setdefault(place.source, []).append(part)
        for source, some in parts.items():
            silent = teller(None, 0)
            stats = load_parts(self._flat[source], some, str(self._device), silent, self._options, beside.begun)
            self.loads.append(stats)
        return memory

    def _fresh(self, nbytes: int) -> torch.Tensor:
        # Whoever takes tensors may be in inference mode now and not later: those made there could not be filled then.
        with torch.inference_mode(mode=False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _complete(self, comes: torch.Tensor, of: _Round, own: Any) -> tuple[int, str, torch.Tensor] | None:
        """The next tensor that is complete with this round; what has come of one that is not is kept."""
        if self._next == len(self._places):
            return None
        place = self._places[self._next]
        first, last = max(place.start, of.start), min(place.start + place.nbytes, of.end)
        with torch.no_grad(), nullcontext() if own is None else torch.cuda.stream(own):
            if self._partial is None:
                if first >= last and place.nbytes:
                    return None
                self._partial = self._fresh(place.nbytes)
            if first < last:
                into = self._partial[first - place.start : last - place.start]
                into.copy_(comes[first - of.start : last - of.start])
        if place.start + place.nbytes > of.end:
            return None
        memory, self._partial = self._partial, None
        self._next += 1
        if own is not None and (taker := torch.cuda.current_stream(self._device)) != own:
            taker.wait_stream(own)
            memory.record_stream(taker)
        return place.source, place.name, memory


def agreed(peers: Peers, proposal: object) -> list[Any]:
    """What all ranks propose.

    Raises:
        PeerError: one withdrew, or is gone.
    """
    try:
        proposals = peers.agree(proposal)
    except RuntimeError as error:
        raise _gone(error) from error
    for rank, told in enumerate(proposals):
        if isinstance(told, str):
            raise PeerError(f"process {rank} of {peers.size} cannot load: {told}", cause=told)
    return proposals


def _gone(error: RuntimeError) -> PeerError:
    cause = f"a process is gone, or did not answer in time: {error}"
    return PeerError(cause, cause=cause, remedy="Look into the logs of the others")


def _cut(end: int, most: int, ranks: int) -> Iterator[_Round]:
    """The rounds of a stream: the fewest whose shares are small enough, all but the last as large as can be."""
    most = -(-most // _ALIGN) * _ALIGN
    for start in range(0, end, most * ranks):
        nbytes = min(most * ranks, end - start)
        share = -(-nbytes // ranks)
        yield _Round(start, start + nbytes, -(-share // _ALIGN) * _ALIGN)
