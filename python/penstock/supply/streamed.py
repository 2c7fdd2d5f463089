"""Tensors of a checkpoint, each when it is asked for, at the speed of loading all of them.

Libraries that take a ``state_dict`` of lazy values ask for one tensor at a time, from a few threads of their own. A
load for each would be slow: nothing is read ahead, and storage waits while the library thinks. A ``Supply`` reads in
large groups instead and hands out what it has.

Whoever asks drives: a thread that needs a tensor takes what lands off the group's stream, keeps what others will ask
for, and returns with its own. So an error is raised where it can be caught, and no order of asking can lead to a
deadlock; an unexpected one only makes more tensors wait here. With ``begin``, a thread drives before anyone asks.

What waits here is bounded by the size of a group. Tensors that become parameters as they are may wait in any number,
since they are the model: they go in one group, in the order of the files. Tensors that will be converted, or of which
nobody knows whether they are wanted, are grouped in the order in which they will be asked for, so that the originals
are gone soon and what nobody asks for is hardly read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock._native import LoadStats
from penstock.errors import LoadCancelledError
from penstock.frameworks.streams import as_here
from penstock.loading import Load, window_of
from penstock.patterns import natural_sort_key
from penstock.progress import ProgressOption, progress_reporter

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoint
    from penstock.selection import Selection

GROUP_BYTES = 256 << 20
"""How much is read of tensors that are to be converted, or that nobody may want, before any of it is asked for."""


def one_group(checkpoint: Checkpoint) -> list[list[str]]:
    """All tensors at once, for those that are adopted as they are."""
    return [checkpoint.offset_keys()]


def small_groups(checkpoint: Checkpoint) -> list[list[str]]:
    """Groups in the order in which libraries ask for tensors."""
    return groups_of(checkpoint, sorted(checkpoint.offset_keys(), key=natural_sort_key), GROUP_BYTES)


def groups_of(checkpoint: Checkpoint, names: Iterable[str], limit: int) -> list[list[str]]:
    """Groups of about ``limit`` bytes in the order of ``names``. A tensor larger than that is a group of its own."""
    groups: list[list[str]] = []
    room = 0
    for name in names:
        nbytes = checkpoint[name].nbytes
        if not groups or nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= nbytes
    return groups


class Supply:
    """Hands out tensors of a checkpoint on one device. May be asked by several threads at once.

    Args:
        checkpoint: whose tensors.
        groups: names of tensors that are read together; a group is begun when one of its tensors is asked for.
        device: ``"cpu"`` or ``"cuda:N"``.
        framework, progress: as for ``Checkpoint.load``.

    Attributes:
        failure: the first exception that a load raised. Libraries may wrap it or lose it.
        bytes: bytes of the tensors handed out.
        stats: figures of the groups that were read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        groups: Sequence[Sequence[str]],
        device: Any,
        *,
        framework: str = "pt",
        progress: ProgressOption = None,
    ) -> None:
        self.failure: BaseException | None = None
        self.bytes = 0
        self.stats: list[LoadStats] = []
        self._checkpoint = checkpoint
        self._device = device
        self._framework = framework
        self._groups = groups
        self._group_of = {name: number for number, group in enumerate(groups) for name in group}
        self._streams: dict[int, Iterator[tuple[str, Any]]] = {}
        self._loads: dict[int, Load] = {}
        self._ready: dict[str, Any] = {}
        self._unread: dict[int, int] = {}
        """Of the groups that were begun, how many tensors have not landed."""
        self._progress = progress_reporter(progress, checkpoint.nbytes)
        self._changed = threading.Condition()
        self._driven = False
        """Whether a thread is waiting for what lands next. One does, for all."""
        self._ahead: threading.Thread | None = None
        self._closed = False

    def begin(self) -> None:
        """Reads the first group before anyone asks, for what is wanted as a whole and may all wait here."""
        if self._groups and self._groups[0]:
            ahead = threading.Thread(target=as_here(self._read_ahead), name="penstock-supply", daemon=True)
            # Without a thread nothing is read before it is asked for, and nothing is wrong.
            with suppress(RuntimeError):
                ahead.start()
                self._ahead = ahead

    def take(self, name: str) -> Any:
        """The whole tensor, which is the caller's from then on. Asked for again, it is read again.

        Raises:
            PenstockError: see ``Checkpoint.stream``.
            LoadCancelledError: after ``close``.
        """
        number = self._group_of[name]
        with self._changed:
            while name not in self._ready:
                self._check_open()
                if self._driven:
                    self._changed.wait()
                elif self._unread.get(number, 1):
                    self._drive(number)
                else:
                    break
            tensor = self._ready.pop(name, None)
        if tensor is None:
            # It was taken before.
            return self.part(name, ...)
        return self._handed_out(tensor)

    def part(self, name: str, selection: Selection) -> Any:
        """A part of a tensor, read by itself: who wants parts (of tensor parallelism) does not want the whole."""
        return self._handed_out(self._guarded(lambda: self._load(name, selection)))

    def take_all(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Several tensors, or all."""
        return {name: self.take(name) for name in (self._group_of if names is None else names)}

    def offers(self, name: str) -> bool:
        """Whether taking this tensor reads ahead: its group is being read, or is the next and nothing waits here."""
        with self._changed:
            number = self._group_of.get(name)
            if number is None or number in self._unread:
                return name in self._ready or (number is not None and number in self._streams)
            return number == len(self._unread) and self._is_idle()

    def is_idle(self, name: str) -> bool:
        """Whether this tensor is none that is offered, nothing is being read, and nothing waits to be taken."""
        return not self.offers(name) and self._is_idle()

    def _is_idle(self) -> bool:
        return not self._driven and not self._ready and not self._streams

    def close(self) -> None:
        """Ends what is being read and lets go of what nobody asked for."""
        with self._changed:
            self._closed = True
            if self._driven:
                # Else the thread that waits would go on until something lands.
                for load in list(self._loads.values()):
                    load.cancel()
            self._changed.wait_for(lambda: not self._driven)
            for load in self._loads.values():
                load.cancel()
            for stream in self._streams.values():
                stream.close()  # type: ignore[attr-defined]
            self._streams.clear()
            self._loads.clear()
            self._ready.clear()
            self._changed.notify_all()
        if self._ahead is not None:
            self._ahead.join()
        self._progress.close()

    def _drive(self, number: int) -> None:
        """Takes what lands next off the stream of a group, which is begun if it is not. Waits without the lock."""
        self._driven = True
        self._changed.release()
        landed = None
        try:
            landed = self._guarded(lambda: self._next(number))
        finally:
            self._changed.acquire()
            self._driven = False
            if landed is not None:
                self._ready[landed[0]] = landed[1]
                self._unread[number] -= 1
            self._changed.notify_all()

    def _next(self, number: int) -> tuple[str, Any]:
        if number not in self._unread:
            names = list(self._groups[number])
            load = self._checkpoint.begin(names, self._device, self._framework)
            self._loads[number], self._streams[number] = load, load.stream(window_of(self._checkpoint.options))
            self._unread[number] = len(names)
            self._check_open()
        stream = self._streams[number]
        landed = next(stream)
        if self._unread[number] == 1:
            # Its end is when it is checked that no file has changed, and when its figures are there.
            next(stream, None)
            stats = self._loads[number].stats
            del self._streams[number], self._loads[number]
            if stats is not None:
                self.stats.append(stats)
        return landed

    def _read_ahead(self) -> None:
        # What goes wrong is raised again for whoever asks.
        with self._changed, suppress(Exception):
            while not self._closed and self.failure is None and self._unread.get(0, 1):
                if self._driven:
                    self._changed.wait()
                else:
                    self._drive(0)

    def _load(self, name: str, selection: Selection) -> Any:
        self._check_open()
        return self._checkpoint.get_tensor(name, selection, device=self._device, framework=self._framework)

    def _guarded(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except BaseException as error:
            if self.failure is None and not isinstance(error, LoadCancelledError):
                self.failure = error
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise LoadCancelledError("the load has ended")
        if self.failure is not None:
            raise self.failure

    def _handed_out(self, tensor: Any) -> Any:
        nbytes = getattr(tensor, "nbytes", 0)  # a DLPack capsule does not say
        with self._changed:
            self.bytes += nbytes
            self._progress.advance(nbytes)
        return tensor
