"""The recorder: what of a checkpoint goes where, as a model's own loading code says, read as one plan.

A model's ``load_weights`` takes ``(name, tensor)`` pairs and copies parts of tensors into its parameters. Given lazy
tensors, it copies nothing: the recorder notes each copy, and ``flush`` reads exactly those bytes straight into their
places, all at once, with full read-ahead. So a rank of a tensor-parallel model reads its share and nothing else.

It is exactly as if the copies had been made when they were asked for, because the recorder watches (as a
``TorchFunctionMode``) every use of torch while it is active: whoever reads or writes memory that something is still to
be read into makes the recorder flush first. What is not recorded falls back to real tensors and is counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from penstock._native import Config
from penstock.checkpoint import Checkpoint
from penstock.frameworks.torch import DTYPES, Torch
from penstock.loading import Load
from penstock.parts import load_parts
from penstock.progress import Progress, ProgressOption, teller
from penstock.recording.at_once import AtOnce, is_small
from penstock.recording.calls import HARMLESS
from penstock.recording.lazy import LazyTensor, NotRecordableError, name_of
from penstock.recording.places import Places, memory_of, place_of
from penstock.recording.sharing import Sharing
from penstock.recording.sources import Computed, Stored, computed
from penstock.recording.statistics import Statistics
from penstock.recording.writes import Copy, Place, Write

logger = logging.getLogger(__name__)

_LARGE_AT_ONCE = 16
"""After this many larger tensors were needed at once, more than were recorded, the others come as ordinary ones."""


class Recorder(TorchFunctionMode):
    """Use as a context around the code that loads; what was recorded is read when the context ends without an error.

    ::

        with Recorder("cuda:0") as recorder:
            model.load_weights(recorder.weights(penstock.open(path)))
        print(recorder.statistics)

    Args:
        device: where lazy tensors say they are, and where those are made that are needed at once.
        progress: ``True`` for a bar, or a function, for each of the loads.
        config: settings of the loads.
        sharing: the other ranks of the model, to read with them what several want. They are told how it ends, whatever
            happens in the context.
    """

    def __init__(
        self,
        device: Any = "cpu",
        *,
        progress: ProgressOption = None,
        config: Config | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        super().__init__()
        self._device = torch.device(Torch().device(device))
        self._progress = progress
        self._config = config
        self._sharing = sharing
        self._checkpoints: list[Checkpoint] = []
        self._pending: dict[int, Write] = {}
        self._places: dict[int, Places] = {}
        self._written: dict[int, dict[Place, int]] = {}
        """By the address of a memory, which of those that are pending writes exactly there."""
        self._computed: dict[tuple[int, str], int] = {}
        """Which of those that are pending is of a computed value, by that and the device."""
        self._numbers = count()
        self._at_once = AtOnce(self._load)
        self._real: list[tuple[str, torch.Tensor, int]] = []
        """Names, tensors and versions of what was needed at once, to see whether somebody writes to it."""
        self._active = False
        self._thread = 0
        self._elsewhere: NotRecordableError | None = None
        self.statistics = Statistics()

    # Handing out

    def weights(
        self,
        checkpoint: Checkpoint,
        names: Iterable[str] | None = None,
        *,
        prefix: str = "",
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields ``(prefix + name, lazy tensor)``; ordinary tensors where it turned out that most have to be real.

        Args:
            checkpoint: where from.
            names: which tensors, in this order; all in the order of their bytes by default.
            prefix: put before the names.
        """
        order = list(checkpoint.offset_keys() if names is None else names)
        if not any(checkpoint is known for known in self._checkpoints):
            self._checkpoints.append(checkpoint)
        for index, name in enumerate(order):
            info = checkpoint[name]
            recorded = self.statistics.places + self.statistics.converted
            if self._at_once.large >= max(_LARGE_AT_ONCE, recorded):
                yield from self._ordinary(checkpoint, order[index:], prefix)
                return
            self.statistics.tensors += 1
            self.statistics.available_bytes += info.nbytes
            dtype = DTYPES.get(info.dtype)
            if dtype is None or info.dtype == "F4":
                # torch has no such dtype, or packs its elements: not a matter of strides.
                self.statistics.materialised.setdefault(name, f"its dtype {info.dtype}")
                yield prefix + name, self._load(checkpoint, [name])[name]
                continue
            meta = torch.empty(info.shape, dtype=dtype, device="meta")
            self._at_once.hands_out(checkpoint, order, index)
            lazy = LazyTensor(self, Stored(checkpoint, name, info.shape), meta, (), self._device)
            lazy._is_own = True
            yield prefix + name, lazy
            self._check_real()

    def _ordinary(self, checkpoint: Checkpoint, names: list[str], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        self.statistics.notes.append(f"{len(names)} tensors as ordinary ones: most before them were needed at once")
        yield from self.ordinary(checkpoint, names, prefix=prefix)

    def ordinary(
        self, checkpoint: Checkpoint, names: Iterable[str] | None = None, *, prefix: str = ""
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields ``(prefix + name, tensor)``: ordinary tensors on the device, in the order of their bytes."""
        for name, tensor in checkpoint.stream(names, device=self._device, progress=self._progress, config=self._config):
            self.statistics.tensors += 1
            self.statistics.ordinary += 1
            self.statistics.available_bytes += tensor.numel() * tensor.element_size()
            yield prefix + name, tensor
        if checkpoint.stats is not None:
            self.statistics.loads.append(checkpoint.stats)

    # Recording

    def record(self, memory: torch.Tensor, lazy: LazyTensor) -> bool:
        """Notes that ``memory`` gets the value of ``lazy``. False where it has to be done at once."""
        self.check_thread("copy_")
        with torch._C.DisableTorchFunctionSubclass():
            memory = memory.detach()
        shape = lazy._meta.shape
        if not self._active or lazy._real is not None or memory.device.type not in {"cpu", "cuda"}:
            return False
        if memory.layout != torch.strided or memory.is_quantized or memory.is_conj() or memory.is_neg():
            return False
        if type(memory) is not torch.Tensor or (memory.shape != shape and not _broadcasts(shape, memory.shape)):
            return False
        if memory.numel() == 0:
            return True
        place = (memory_of(memory), *place_of(memory))
        before = self._written.get(place[0], {}).get(place)
        if before is None:
            self._settle(memory)
        else:
            # All of it is written again (one parameter for what three layers have each): the first need not be read.
            self._forget(place, before)
        number = self._noted(place, memory, lazy)
        if place[0]:
            self._written.setdefault(place[0], {})[place] = number
            if before is None:
                self._places.setdefault(place[0], Places()).add(memory)
        return True

    def _noted(self, place: Place, memory: torch.Tensor, lazy: LazyTensor) -> int:
        root, device, number = lazy._root, Torch().device(memory.device), next(self._numbers)
        # Memory without an address is told from other such memory by the number.
        key = place if place[0] else (0, number, 0, place[3])
        if isinstance(root, Computed):
            # Worked out once, however many places its parts go to.
            number = self._computed.setdefault((id(root), device), number)
            if number not in self._pending:
                self._pending[number] = Write(computed(root), device, {}, None)
            self._pending[number].copies[key] = Copy(memory, lazy.of_computed)
            self.statistics.converted += 1
            return number
        source = lazy.source()
        plain = source.is_plain and memory.shape == lazy._meta.shape and memory.is_contiguous()
        # Bytes are bytes: what was reinterpreted as another dtype goes there as it is.
        into = memory if plain and memory.dtype == lazy._meta.dtype else None
        self._pending[number] = Write(source, device, {key: Copy(memory, _as_it_is)}, into)
        self._count(self._pending[number], 1)
        return number

    def _forget(self, place: Place, number: int) -> None:
        write = self._pending[number]
        self._count(write, -1)
        del write.copies[place]
        if not write.copies:
            del self._pending[number]

    def _count(self, write: Write, by: int) -> None:
        if write.part.into is None:
            self.statistics.converted += by
        else:
            self.statistics.places += by

    def materialise(self, lazy: LazyTensor, func: Callable[..., Any]) -> torch.Tensor:
        """The real tensor in the place of a lazy one, which ``func`` needs."""
        self.check_thread(name_of(func))
        if lazy._real is None:
            stored = lazy.stored()
            self.statistics.materialised.setdefault(stored.name, name_of(func))
            source = lazy.source()
            # Tensors made under inference mode would not tell that they were written to.
            with torch.inference_mode(mode=False):
                real = source.make(self._at_once.box(stored, source.ranges)).to(_device_of(lazy))
            if not lazy._is_own:
                self._real.append((stored.name, real, real._version))
            lazy._real = real
        return lazy._real

    def check_thread(self, what: str) -> None:
        """Raises NotRecordableError in threads other than the one that records: what those do is not watched."""
        if self._active and threading.get_ident() != self._thread:
            # Kept, since whoever made the thread may not ask what became of it.
            self._elsewhere = NotRecordableError(f"{what} of a weight of the checkpoint in another thread")
            raise self._elsewhere

    def _check_real(self) -> None:
        """Raises NotRecordableError if one of the real tensors was written to: other views of it would not know."""
        for name, real, version in self._real:
            if real._version != version:
                raise NotRecordableError(f"something writes to the weight {name!r} of the checkpoint")
        self._real.clear()

    def _load(self, checkpoint: Checkpoint, names: list[str], slices: Any = None) -> dict[str, torch.Tensor]:
        loaded = checkpoint.load(names, slices=slices, device=self._device, config=self._config)
        if checkpoint.stats is not None:
            self.statistics.loads.append(checkpoint.stats)
        return loaded

    # Watching

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = {} if kwargs is None else kwargs
        # Those with lazy tensors settle themselves what they need: a copy is recorded, so only its own place matters.
        if self._pending and func not in HARMLESS and LazyTensor not in types:
            self.settle((args, named))
        return func(*args, **named)

    def settle(self, value: Any) -> None:
        """Flushes if any tensor in ``value`` shares memory with what is still to be read."""
        if not self._pending:
            return
        if isinstance(value, torch.Tensor):
            if not isinstance(value, LazyTensor):
                self._settle(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.settle(item)
        elif isinstance(value, Mapping):
            for item in value.values():
                self.settle(item)

    def _settle(self, tensor: torch.Tensor) -> None:
        if self._pending:
            memory = memory_of(tensor)
            places = self._places.get(memory)
            hidden = memory == 0 and tensor.numel() > 0 and not tensor.is_meta
            if hidden or not (places is None or places.are_clear_of(tensor) or self._filled(memory)):
                self.flush()

    def _filled(self, memory: int) -> bool:
        """Makes now what is to be read to one memory, if all of it is of small tensors.

        Code that works on a parameter of every layer once it is copied (``a.copy_(-a.exp())``), or looks at the scale
        that another expert's tensor left there, would make a plan of each. False where there is more to be read.
        """
        numbers = self._written[memory]
        writes = {number: self._pending[number] for number in numbers.values()}
        if not all(is_small(write.checkpoint, write.part.name) for write in writes.values()):
            return False
        for place in numbers:
            write = writes[numbers[place]]
            self.statistics.materialised.setdefault(write.part.name, "a use of what it was copied to")
            packed = self._at_once.box(write.source.stored, write.source.ranges)
            Write(write.source, write.device, {place: write.copies.pop(place)}, None).fill(packed)
            if not write.copies:
                del self._pending[numbers[place]]
        del self._written[memory], self._places[memory]
        return True

    # Reading

    def flush(self) -> None:
        """Reads everything that was recorded, and returns when it is where it belongs."""
        self._read(self._taken())

    def _taken(self) -> list[Write]:
        pending = list(self._pending.values())
        self._pending.clear()
        self._places.clear()
        self._written.clear()
        self._computed.clear()
        self.statistics.plans += bool(pending)
        return pending

    def _read(
        self,
        writes: Sequence[Write],
        told: Progress | None = None,
        begun: Callable[[Load], object] | None = None,
    ) -> None:
        loads: dict[tuple[int, str], list[Write]] = {}
        for write in writes:
            loads.setdefault((id(write.checkpoint), write.device), []).append(write)
        for (_, device), of in loads.items():
            progress = teller(self._progress, sum(write.nbytes for write in of)) if told is None else told
            parts = [write.part for write in of]
            stats = load_parts(of[0].checkpoint, parts, device, progress, self._config, begun)
            self.statistics.loads.append(stats)

    def _finish(self) -> None:
        if self._sharing is None:
            self.flush()
            return
        self._sharing.read(
            self._checkpoints,
            self._taken(),
            self._device,
            self.statistics,
            self._read,
            progress=self._progress,
            config=self._config,
        )

    def __enter__(self) -> Recorder:  # noqa: PYI034 - Self is newer than Python 3.10
        self._active = True
        self._thread = threading.get_ident()
        super().__enter__()  # type: ignore[no-untyped-call, unused-ignore]
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call, unused-ignore]
        self._active = False
        try:
            failure = self._elsewhere if kind is None else error
            if failure is None:
                self._finish()
            elif self._sharing is not None and isinstance(failure, Exception):
                self._sharing.withdraw(f"{type(failure).__name__}: {failure}")
            if kind is None and self._elsewhere is not None:
                raise self._elsewhere
        finally:
            self._pending.clear()
            self._places.clear()
            self._written.clear()
            self._computed.clear()
            self._at_once.clear()


def _device_of(lazy: LazyTensor) -> torch.device:
    with torch._C.DisableTorchFunctionSubclass():
        return lazy.device


def _as_it_is(value: torch.Tensor) -> torch.Tensor:
    return value


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    try:
        return bool(torch.broadcast_shapes(shape, to) == to)  # type: ignore[no-untyped-call, unused-ignore]
    except RuntimeError:
        return False
