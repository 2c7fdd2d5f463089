"""Shared tensors, read once by all ranks together: each reads its pieces, and hands the others what they want of them.

Carries out a plan of ``plan`` among ``peers``, batch after batch: while one batch is handed round, the next is read.
What arrives goes straight to its places; parts that have to be converted are put together first. Besides the
destinations no more than ``plan.BATCH_BYTES`` of the device's memory are held, and one part that is put together.

All or nothing for a batch, and the same on every rank: if any rank cannot go on, all stop after the same batch, and
``left`` says which parts were not completed, for each to read by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from math import gcd
from typing import Any, NamedTuple

import torch

from penstock.distributed.peers import Peers
from penstock.distributed.plan import Box, ExchangePlan, Key, Stored, Unit, common, volume
from penstock.parts import Part

INTERRUPT_WAIT_SECONDS = 2.0
"""How long a rank that is to stop (Ctrl-C) waits until the others have heard of it."""
_ALIGN = 8
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Wanted(NamedTuple):
    """A part that this rank wants of a shared tensor."""

    key: Key
    part: Part
    box: Box
    dtype: torch.dtype
    """The tensor's."""


class ReadPiece(NamedTuple):
    """Consecutive bytes of a tensor to be read into memory."""

    key: Key
    box: Box
    into: torch.Tensor


class _Section(NamedTuple):
    """What one rank hands to another of one unit, for one of the parts that the other wants."""

    unit: int
    want: int
    box: Box
    at: int
    nbytes: int


class _Arriving:
    """A part of this rank that fills as batches come."""

    def __init__(self, wanted: Wanted, device: torch.device, itemsize: int) -> None:
        self.wanted = wanted
        self.missing = volume(wanted.box, itemsize)
        self._device = device
        self._memory: torch.Tensor | None = None

    def memory(self) -> torch.Tensor:
        """Where it goes, as bytes."""
        if self._memory is None:
            into = self.wanted.part.out
            if into is None:
                shape = [end - start for start, end in self.wanted.box]
                into = torch.empty(shape, dtype=self.wanted.dtype, device=self._device)
            self._memory = into.view(-1).view(torch.uint8)
        return self._memory

    def arrived(self, nbytes: int) -> None:
        """So much has been put there. The last of it ends the part."""
        take = self.wanted.part.on_ready
        if self.missing == nbytes:
            if self.wanted.part.out is None and take is not None:
                shape = [end - start for start, end in self.wanted.box]
                take(self.memory().view(self.wanted.dtype).view(shape))
            self._memory = None
        self.missing -= nbytes


class Exchange:
    """One rank's side of a plan. Made before the first round, in which the others learn whether that succeeded.

    Args:
        peers: the ranks.
        plan: the plan, the same for all.
        tensors: those of the plan.
        wants: boxes that every rank wants, as the plan was made of.
        mine: what those of this rank are for, in the same order for each tensor.
        device: where everything goes.
        read: begins to read pieces; its future ends when they are there. Called for one batch at a time.
    """

    def __init__(
        self,
        peers: Peers,
        plan: ExchangePlan,
        tensors: Mapping[Key, Stored],
        wants: Sequence[Mapping[Key, Sequence[Box]]],
        mine: Iterable[Wanted],
        device: torch.device,
        read: Callable[[list[ReadPiece]], Future[None]],
    ) -> None:
        self._peers = peers
        self._batches = plan.batches
        self._tensors = tensors
        self._wants = wants
        self._device = device
        self._read = read
        self._memory = torch.empty(0, dtype=torch.uint8)
        """What is sent, then what comes, between CPUs. Used again: fresh memory costs more than what is done in it."""
        self._arriving: dict[Key, list[_Arriving]] = {}
        for wanted in mine:
            arriving = _Arriving(wanted, device, tensors[wanted.key].itemsize)
            self._arriving.setdefault(wanted.key, []).append(arriving)
        self.received_bytes = 0
        """What arrived from other ranks."""
        self.failure: BaseException | None = None
        """Why this rank could not go on."""
        self.is_complete = False
        """Whether all ranks came to the end."""
        self.is_cut_off = False
        """Whether a rank is gone, so that nothing more can be said."""

    def left(self) -> list[Part]:
        """The parts that are not complete."""
        return [arriving.wanted.part for many in self._arriving.values() for arriving in many if arriving.missing]

    def run(self, ok: bool, on_bytes: Callable[[int], object]) -> bool:
        """Takes all rounds. Whether all ranks came to the end.

        What ``on_bytes`` raises, or a signal's handler, comes through once the other ranks were told.

        Args:
            ok: whether this rank can begin.
            on_bytes: called with the number of bytes that have come.
        """
        of_caller: BaseException | None = None
        for nbytes in self.rounds(ok):
            try:
                on_bytes(nbytes)
            except BaseException as error:  # noqa: BLE001, PERF203 - the others are notified in the next round
                self.failure = of_caller = error
        if of_caller is None and self.failure is not None and not isinstance(self.failure, Exception):
            of_caller = self.failure
        if of_caller is not None:
            raise of_caller
        return self.is_complete

    def rounds(self, ok: bool = True) -> Iterator[int]:
        """Takes one round at a time, and yields how many bytes arrived in it; ``is_complete`` says how it ended.

        No rank depends on another any more when the last is yielded. Who stops before that has to notify the others.
        A round ends as usual where this rank is interrupted in it (Ctrl-C), and ``failure`` is that.

        Args:
            ok: whether this rank can begin.
        """
        reading = self._begin(0) if ok else None
        for number, batch in enumerate(self._batches, start=1):
            ready = None
            try:
                if self.failure is None:
                    ready = self._made_ready(reading, batch)
            except BaseException as error:  # noqa: BLE001 - the others are notified first, and who asked hears of it from `failure`
                self.failure = error
            if not self._all_ok(ready is not None) or ready is None:
                return
            memory, send, send_bytes, receive, sections, receive_bytes = ready
            del ready
            reading = self._begin(number)
            nbytes = 0
            try:
                self._peers.exchange(receive, receive_bytes, send, send_bytes)
                nbytes = self._deliver(batch, memory, receive, sections)
            except BaseException as error:  # noqa: BLE001 - as above
                self.failure = error
            del memory, send, receive
            if number == len(self._batches):
                self.is_complete = self._all_ok(self.failure is None)
            if self.failure is None:
                yield nbytes
        if not self._batches:
            self.is_complete = self._all_ok(ok)

    def _all_ok(self, ok: bool) -> bool:
        self.failure = self.failure or self._peers.interruption
        # Who is to stop does not wait for long until the others, who may be busy, have heard of it.
        seconds = None if self.failure is None or isinstance(self.failure, Exception) else INTERRUPT_WAIT_SECONDS
        try:
            is_ok = self._peers.all_ok(ok and self.failure is None, seconds)
        except RuntimeError as error:
            self.failure, self.is_cut_off = self.failure or error, True
            return False
        self.failure = self.failure or self._peers.interruption
        return is_ok

    def _begin(self, number: int) -> tuple[dict[int, torch.Tensor], Future[None]] | None:
        """Begins to read this rank's pieces of a batch: their memory by unit, and when it is filled."""
        if number >= len(self._batches) or self.failure is not None:
            return None
        try:
            batch, rank = self._batches[number], self._peers.rank
            sizes = {
                index: volume(piece, self._tensors[unit.key].itemsize)
                for index, unit in enumerate(batch)
                if (piece := unit.pieces[rank]) is not None
            }
            memory = _parted(sizes, self._device)
            pieces = [
                ReadPiece(unit.key, piece, memory[index])
                for index, unit in enumerate(batch)
                if (piece := unit.pieces[rank]) is not None
            ]
            return memory, self._read(pieces)
        except BaseException as error:  # noqa: BLE001 - the others are notified in the next round
            self.failure = error
            return None

    def _made_ready(
        self, reading: tuple[dict[int, torch.Tensor], Future[None]] | None, batch: list[Unit]
    ) -> tuple[dict[int, torch.Tensor], torch.Tensor, list[int], torch.Tensor, list[list[_Section]], list[int]] | None:
        """What this rank has read of a batch, what of that it sends, and the memory for what comes."""
        if reading is None:
            return None
        memory, done = reading
        rank, ranks = self._peers.rank, range(self._peers.size)
        goes = [self._sections(batch, rank, to) if to != rank else [] for to in ranks]
        comes = [self._sections(batch, of, rank) for of in ranks]
        send_bytes = [_length(sections) for sections in goes]
        receive_bytes = [_length(sections) if of != rank else 0 for of, sections in enumerate(comes)]
        send, receive = self._round_memory(sum(send_bytes), sum(receive_bytes))
        done.result()
        begin = 0
        for sections, nbytes in zip(goes, send_bytes, strict=True):
            for section in sections:
                unit = batch[section.unit]
                place = send[begin + section.at : begin + section.at + section.nbytes]
                itemsize = self._tensors[unit.key].itemsize
                _copy(section.box, place, section.box, memory[section.unit], _piece(unit, rank), itemsize)
            begin += nbytes
        return memory, send, send_bytes, receive, comes, receive_bytes

    def _round_memory(self, send_bytes: int, receive_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for what is sent in a round and for what comes."""
        if self._device.type != "cpu":
            # Of torch's allocator, for the stream that is current now: rounds may be taken on several.
            send = torch.empty(send_bytes, dtype=torch.uint8, device=self._device)
            return send, torch.empty(receive_bytes, dtype=torch.uint8, device=self._device)
        end = send_bytes + receive_bytes
        if self._memory.numel() < end:
            # In this order, so that there are never two.
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(end, dtype=torch.uint8)
        return self._memory[:send_bytes], self._memory[send_bytes:end]

    def _sections(self, batch: list[Unit], of: int, to: int) -> list[_Section]:
        sections: list[_Section] = []
        end = 0
        for index, unit in enumerate(batch):
            piece = unit.pieces[of]
            if piece is None:
                continue
            for number, box in enumerate(self._wants[to].get(unit.key, ())):
                part = common(piece, box)
                if part is not None:
                    nbytes = volume(part, self._tensors[unit.key].itemsize)
                    sections.append(_Section(index, number, part, end, nbytes))
                    end = _aligned(end + nbytes)
        return sections

    def _deliver(
        self, batch: list[Unit], memory: dict[int, torch.Tensor], receive: torch.Tensor, comes: list[list[_Section]]
    ) -> int:
        begin = total = 0
        for rank, sections in enumerate(comes):
            is_own = rank == self._peers.rank
            for section in sections:
                unit = batch[section.unit]
                arriving = self._arriving[unit.key][section.want]
                if is_own:
                    of, of_box = memory[section.unit], _piece(unit, rank)
                else:
                    of, of_box = receive[begin + section.at : begin + section.at + section.nbytes], section.box
                    self.received_bytes += section.nbytes
                with torch.no_grad():
                    itemsize = self._tensors[unit.key].itemsize
                    _copy(section.box, arriving.memory(), arriving.wanted.box, of, of_box, itemsize)
                    arriving.arrived(section.nbytes)
                total += section.nbytes
            begin += 0 if is_own else _length(sections)
        return total


def _parted(sizes: Mapping[int, int], device: torch.device) -> dict[int, torch.Tensor]:
    """One memory, cut into one for each."""
    memory = torch.empty(sum(map(_aligned, sizes.values())), dtype=torch.uint8, device=device)
    made, at = {}, 0
    for index, nbytes in sizes.items():
        made[index] = memory[at : at + nbytes]
        at += _aligned(nbytes)
    return made


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _length(sections: list[_Section]) -> int:
    return _aligned(sections[-1].at + sections[-1].nbytes) if sections else 0


def _piece(unit: Unit, rank: int) -> Box:
    """The piece of a rank that has one."""
    return unit.pieces[rank] or unit.box


def _copy(box: Box, into: torch.Tensor, into_box: Box, of: torch.Tensor, of_box: Box, itemsize: int) -> None:
    """Copies a box of elements between the bytes of two boxes that hold it, by the largest words that suit all."""
    word = gcd(
        _ALIGN, _address(into), _address(of), *(edge * itemsize for b in (box, into_box, of_box) for edge in b[-1])
    )

    def inside(memory: torch.Tensor, of: Box) -> Any:
        shape = [end - start for start, end in of]
        shape[-1] = shape[-1] * itemsize // word
        places = [slice(start - first, end - first) for (start, end), (first, _) in zip(box, of, strict=True)]
        last = places[-1]
        places[-1] = slice(last.start * itemsize // word, last.stop * itemsize // word)
        return memory.view(_WORDS[word]).view(shape)[tuple(places)]

    inside(into, into_box).copy_(inside(of, of_box))


def _address(memory: torch.Tensor) -> int:
    """What words have to fit: where bytes begin in their storage, which is well aligned, and how many they are."""
    return gcd(int(memory.storage_offset()), memory.numel()) or _ALIGN
