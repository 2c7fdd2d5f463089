"""Tensors of a checkpoint, each when it is asked for, at the speed of loading all of them.

Libraries that take a ``state_dict`` of lazy values ask for one tensor at a time, from a few threads of their own. A
load for each would be slow: nothing is read ahead, and storage waits while the library thinks. A ``Supply`` reads in
large groups instead and hands out what it has.

Whoever asks drives: the first thread to need a tensor takes what lands off the group's stream, keeps what others will
ask for, and returns with its own. So there is no thread to end, an error is raised where it can be caught, and no order
of asking can lead to a deadlock; an unexpected one only makes more tensors wait here.

What waits here is bounded by the size of a group. Tensors that become parameters as they are may wait in any number,
since they are the model: they go in one group, in the order of the files. Tensors that will be converted, or of which
nobody knows whether they are wanted, are grouped in the order in which they will be asked for, so that the originals
are gone soon and what nobody asks for is hardly read.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from penstock._native import Config, LoadStats
from penstock.errors import CancelledError
from penstock.progress import ProgressOption, teller

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoint
    from penstock.selection import Selection

GROUP_BYTES = 256 << 20
"""How much is read of tensors that are to be converted, or that nobody may want, before any of it is asked for."""


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key to sort names by, numbers by their value: the order of layers, in which libraries ask for tensors."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]


def one_group(checkpoint: Checkpoint) -> list[list[str]]:
    """All tensors at once, for those that are adopted as they are."""
    return [checkpoint.offset_keys()]


def small_groups(checkpoint: Checkpoint, limit: int = GROUP_BYTES) -> list[list[str]]:
    """Groups of about ``limit`` bytes in the order in which they will be asked for.

    A tensor larger than that is a group of its own.
    """
    groups: list[list[str]] = []
    room = 0
    for name in sorted(checkpoint.offset_keys(), key=natural):
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
        progress, config: as for ``Checkpoint.load``.

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
        progress: ProgressOption = None,
        config: Config | None = None,
    ) -> None:
        self.failure: BaseException | None = None
        self.bytes = 0
        self.stats: list[LoadStats] = []
        self._checkpoint = checkpoint
        self._device = device
        self._config = config
        self._groups = groups
        self._group_of = {name: number for number, group in enumerate(groups) for name in group}
        self._streams: dict[int, Iterator[tuple[str, Any]]] = {}
        self._ready: dict[str, Any] = {}
        self._unread: dict[int, int] = {}
        """Of the groups that were begun, how many tensors have not landed."""
        self._progress = teller(progress, checkpoint.nbytes)
        self._lock = threading.Lock()
        self._closed = False

    def take(self, name: str) -> Any:
        """The whole tensor, which is the caller's from then on. Asked for again, it is read again.

        Raises:
            PenstockError: see ``Checkpoint.stream``.
            CancelledError: after ``close``.
        """
        with self._lock:
            tensor = self._landed(name)
            if tensor is None:
                tensor = self._guarded(lambda: self._load(name, ...))
        return self._handed_out(tensor)

    def part(self, name: str, selection: Selection) -> Any:
        """A part of a tensor, read by itself: who wants parts (of tensor parallelism) does not want the whole."""
        return self._handed_out(self._guarded(lambda: self._load(name, selection)))

    def close(self) -> None:
        """Ends what is being read and lets go of what nobody asked for. Waits for a thread that is taking a tensor."""
        self._closed = True
        with self._lock:
            for stream in self._streams.values():
                stream.close()  # type: ignore[attr-defined]
            self._streams.clear()
            self._ready.clear()
            self._progress.close()

    def _landed(self, name: str) -> Any:
        """The tensor off its group's stream, or None where the group has been read and the tensor taken."""
        number = self._group_of[name]
        if number not in self._unread:
            names = list(self._groups[number])
            self._unread[number] = len(names)
            self._streams[number] = self._guarded(
                lambda: self._checkpoint.stream(names, device=self._device, config=self._config)
            )
        while name not in self._ready:
            self._check_open()
            stream = self._streams.get(number)
            if stream is None:
                return None
            landed, tensor = self._guarded(lambda stream=stream: next(stream))  # type: ignore[misc]
            self._ready[landed] = tensor
            self._unread[number] -= 1
            if not self._unread[number]:
                # Its end is when it is checked that no file has changed, and when its figures are there.
                self._guarded(lambda stream=stream: next(stream, None))  # type: ignore[misc]
                del self._streams[number]
                if self._checkpoint.stats is not None:
                    self.stats.append(self._checkpoint.stats)
        return self._ready.pop(name)

    def _load(self, name: str, selection: Selection) -> Any:
        self._check_open()
        slices = {} if selection is ... else {name: selection}
        return self._checkpoint.load([name], slices=slices, device=self._device, config=self._config)[name]

    def _guarded(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except BaseException as error:
            if self.failure is None and not isinstance(error, CancelledError):
                self.failure = error
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise CancelledError("the load has ended")

    def _handed_out(self, tensor: Any) -> Any:
        nbytes = tensor.numel() * tensor.element_size()
        self.bytes += nbytes
        self._progress.advance(nbytes)
        return tensor
