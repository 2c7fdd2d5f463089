"""The recorder: what of a checkpoint goes where, as a model's own loading code says, read as one plan.

A model's ``load_weights`` takes ``(name, tensor)`` pairs and copies parts of tensors into its parameters. Given lazy
tensors, it copies nothing: the recorder notes each copy, and ``flush`` reads exactly those bytes straight into their
places, all at once, with full read-ahead. So a rank of a tensor-parallel model reads its share and nothing else.

While it is active, uses of torch are watched (``watching``): whoever reads or writes memory that something is still to
be read into makes the recorder flush first. Memory that others than torch may see (a NumPy array is made of it, its
address was taken) is filled when it is copied to. What is not recorded is materialised, tensor by tensor, and counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from penstock._native import LoadOptions
from penstock.checkpoint import Checkpoint
from penstock.frameworks.torch import DTYPES, Torch, copy_refused, has_version
from penstock.loading import Load
from penstock.parts import load_parts
from penstock.progress import Progress, ProgressOption, progress_reporter
from penstock.recording import calls, waiting
from penstock.recording.calls import EXPOSES, MAY_COPY, METADATA_ONLY, is_static
from penstock.recording.eager_reader import EagerReader, is_small
from penstock.recording.here import is_watched
from penstock.recording.kept import Kept
from penstock.recording.lazy import (
    LazyStorage,
    LazyTensor,
    NotRecordableError,
    empty_for,
    materialise_in_place,
    name_of,
    unwatched,
)
from penstock.recording.pending import Pending, PendingCopy
from penstock.recording.places import has_no_overlap, place_of, storage_address
from penstock.recording.sources import TensorRef, Value
from penstock.recording.statistics import Statistics
from penstock.recording.watching import replaced, watched

if TYPE_CHECKING:
    from penstock.distributed import Sharing

logger = logging.getLogger(__name__)

calls.register()

_LARGE_EAGER = 16
"""After this many larger tensors were read eagerly, more than were recorded, the others come as eager ones."""


class Recorder:
    """Use as a context around the code that loads; what was recorded is read when the context ends without an error.

    ::

        with Recorder("cuda:0") as recorder:
            model.load_weights(recorder.weights(penstock.open(path)))
        print(recorder.statistics)

    A process records one load at a time: a recorder that is entered while another is hands out eager tensors.

    ``torch.vmap``, ``torch.func``, ``torch.jit.trace``, ``make_fx`` and functions of autograd's with weights are not
    recorded, and may raise torch's errors of tensors without storage: such code loads with eager tensors.

    Args:
        device: where lazy tensors say they are, and where those are made that are read eagerly. What is recorded is
            read to where it is copied to, wherever that is.
        progress: ``True`` for a bar, or a function, for each of the loads.
        options: settings of the loads.
        sharing: the other ranks of the model, to read with them what several want. They are notified how it ends,
            whatever happens in the context.
        keep: what becomes of lazy tensors that the loading code has kept when the context ends. ``"lazy"``: they stay
            lazy, and each is read when it is used. ``"eager"``: they become eager tensors, read with all else.
        shared_on: where the other ranks read together what goes there; ``device`` by default.
    """

    def __init__(
        self,
        device: Any = "cpu",
        *,
        progress: ProgressOption = None,
        options: LoadOptions | None = None,
        sharing: Sharing | None = None,
        keep: Literal["lazy", "eager"] = "lazy",
        shared_on: Any = None,
    ) -> None:
        self._device = torch.device(Torch().device(device))
        self._shared_on = self._device if shared_on is None else torch.device(Torch().device(shared_on))
        self._progress = progress
        self._options = options
        self._sharing = sharing
        self._checkpoints: list[Checkpoint] = []
        self._eager_reader = EagerReader(self._load)
        self._keep = keep
        self._kept = Kept()
        self._failed: BaseException | None = None
        """The first read that failed: loading code may have caught it, and what it was to fill is not filled."""
        self._exposed: set[int] = set()
        """Addresses of storages that were taken: others than torch may read or write there.

        What is copied to a later storage at such an address is read at once too, which is never wrong.
        """
        self._active = False
        self._is_aside = False
        """Whether another recorder was active when this one was entered."""
        self._reading = False
        """Whether memory is being filled of what is no longer pending."""
        self._filling: frozenset[int] = frozenset()
        """The addresses of that memory: other threads that use it wait for the lock."""
        self._lock = threading.RLock()
        self._entered = ExitStack()
        self.statistics = Statistics()
        self._plan = Pending(self.statistics)
        # Asked at every call of torch.
        self._pending, self._places = self._plan.copies, self._plan.places

    # Handing out

    def weights(
        self,
        checkpoint: Checkpoint,
        names: Iterable[str] | None = None,
        *,
        prefix: str = "",
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields ``(prefix + name, lazy tensor)``; eager tensors where it turned out that most are needed at once.

        Args:
            checkpoint: where from.
            names: which tensors; all by default. Lazy tensors come in this order, or in that of their bytes by default,
                eager ones always in the order of their bytes.
            prefix: put before the names.
        """
        order = list(checkpoint.offset_keys() if names is None else names)
        if not any(checkpoint is known for known in self._checkpoints):
            self._checkpoints.append(checkpoint)
        if self._is_aside:
            self.statistics.notes.append(_ASIDE)
            yield from self.eager(checkpoint, order, prefix=prefix)
            return
        for index, name in enumerate(order):
            info = checkpoint[name]
            recorded = self.statistics.in_place + self.statistics.converted
            if self._eager_reader.large >= max(_LARGE_EAGER, recorded):
                note = f"{len(order) - index} tensors as eager ones: most before them were needed eagerly"
                self.statistics.notes.append(note)
                yield from self.eager(checkpoint, order[index:], prefix=prefix)
                return
            self.statistics.tensors += 1
            self.statistics.available_bytes += info.nbytes
            dtype = DTYPES.get(info.dtype)
            if dtype is None or info.dtype == "F4":
                # torch has no such dtype, or packs its elements: not a matter of strides.
                self.statistics.eager.setdefault(name, f"its dtype {info.dtype}")
                yield prefix + name, self._load(checkpoint, [name])[name]
                continue
            meta = torch.empty(info.shape, dtype=dtype, device="meta")
            self._eager_reader.hands_out(checkpoint, order, index)
            yield prefix + name, LazyTensor(self, Value(TensorRef(checkpoint, name, info.shape), meta), self._device)

    def eager(
        self, checkpoint: Checkpoint, names: Iterable[str] | None = None, *, prefix: str = ""
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields ``(prefix + name, tensor)``: eager tensors on the device, in the order of their bytes."""
        tensors = checkpoint.stream(names, device=self._device, progress=self._progress, options=self._options)
        while True:
            # What a load does with addresses of tensors concerns no recording.
            with unwatched():
                name, tensor = next(tensors, (None, None))
            if name is None or tensor is None:
                break
            self.statistics.tensors += 1
            self.statistics.fallback += 1
            self.statistics.available_bytes += tensor.numel() * tensor.element_size()
            yield prefix + name, tensor
        if checkpoint.stats is not None:
            self.statistics.loads.append(checkpoint.stats)

    # Recording

    def storage(self, value: Value, device: torch.device) -> LazyStorage:
        """A storage for lazy tensors."""
        storage = LazyStorage(value, device)
        if self._keep == "eager":
            self._kept.add(storage)
        return storage

    def record(self, memory: torch.Tensor, lazy: LazyTensor) -> bool:
        """Notes that ``memory`` gets the value of ``lazy``. False where that has to be copied now."""
        with self._lock:
            # What a thread does that is not watched would not make it be read first.
            return self._active and is_watched(self) and self._record(memory, lazy.lazy_value)

    def _record(self, memory: torch.Tensor, value: Value) -> bool:
        if memory.requires_grad and torch.is_grad_enabled():
            return False
        with unwatched():
            if not (has_version(memory) or torch.is_inference_mode_enabled()):
                return False
            written = memory
            with torch.inference_mode(mode=False):
                # Its version changes now, and not when it is filled.
                memory = memory.data
            if not _takes(memory, value):
                return False
            if memory.numel() == 0:
                return True
            place = (storage_address(memory), *place_of(memory))
            # NumPy and others who share memory with torch forbid torch to resize it.
            if place[0] in self._exposed or not place[0] or not memory.untyped_storage().resizable():
                return False
            before = self._plan.at(place)
            if before is None:
                self._flush_overlapping(memory)
            else:
                # All of it is written again (one parameter for what three layers have each): no need to read the first.
                self._plan.drop_pending(place, before)
            self._plan.add_pending(place, memory, value)
            if has_version(written):
                torch.autograd.graph.increment_version(written)
            return True

    def alone(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Does what no other thread may see half of."""
        with self._lock:
            return work()

    def materialise(self, lazy: LazyTensor, func: Callable[..., Any]) -> torch.Tensor:
        """The tensor in the place of a lazy one, for ``func``, which needs it."""
        with self._lock:
            if lazy.materialised() is None:
                storage = lazy.lazy_storage
                self.statistics.eager.setdefault(storage.value.stored().name, name_of(func))
                storage.materialised = self._read_now(storage.value, storage.device)
            return lazy.materialised_now()

    def materialise_later(self, lazy: LazyTensor) -> torch.Tensor:
        """A tensor in the place of a lazy one, which is filled with what else is recorded."""
        with self._lock:
            storage = lazy.lazy_storage
            if lazy.materialised() is None:
                with unwatched():
                    tensor = empty_for(storage)
                    recorded = self._active and is_watched(self) and self._record(tensor, storage.value)
                if not recorded:
                    return self.materialise(lazy, torch.Tensor.detach)
                # Not before: other threads would use it as memory that nothing is to be read into.
                storage.materialised = tensor
            return lazy.materialised_now()

    def overwrite(self, lazy: LazyTensor, tensor: torch.Tensor) -> bool:
        """Makes a tensor a lazy one's storage, of which nothing is read. False where it is materialised already."""
        with self._lock:
            if lazy.materialised() is not None:
                return False
            lazy.lazy_storage.materialised = tensor
            return True

    def _read_now(self, value: Value, device: torch.device) -> torch.Tensor:
        """Reads a value, to memory of its own that is laid out as the value is."""
        read = value.deferred_read()
        # Tensors made under inference mode could not be written to outside of it.
        with unwatched(), torch.inference_mode(mode=False), torch.no_grad():
            made = read.make(self._eager_reader.box(value.stored(), read.ranges)).to(device)
            packed = (
                made.storage_offset() == 0 and made.untyped_storage().nbytes() == made.numel() * made.element_size()
            )
            if packed and made.stride() == value.meta.stride():
                return made
            return torch.empty_strided(made.shape, value.meta.stride(), dtype=made.dtype, device=device).copy_(made)

    def _load(self, checkpoint: Checkpoint, names: list[str], slices: Any = None) -> dict[str, torch.Tensor]:
        loaded = checkpoint.load(names, slices=slices, device=self._device, options=self._options)
        if checkpoint.stats is not None:
            self.statistics.loads.append(checkpoint.stats)
        return loaded

    # Watching

    def before(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Called before a function of torch, with no lazy tensors. Whether it reads no element of a tensor."""
        if not (self._active or self._reading):
            return False
        seen = is_watched(self)
        metadata_only = func in METADATA_ONLY and is_static(args[1:]) and is_static(kwargs)
        # Functions that may copy call operators, which are seen too.
        if (self._pending or self._reading) and not (seen and (metadata_only or func in MAY_COPY)):
            self.flush_overlapping((args, kwargs))
        if func in EXPOSES:
            self.expose(args[0])
        return metadata_only

    def expose(self, tensor: torch.Tensor) -> None:
        """From now on the memory of a tensor, all of it, may be used without calling torch."""
        with self._lock, unwatched():
            memory = storage_address(tensor)
            if not self._active or not memory:
                return
            if memory in self._places and not self._flush_small(memory):
                self.flush()
            self._exposed.add(memory)

    def flush_overlapping(self, value: Any) -> None:
        """Flushes if any tensor in ``value`` shares memory with what is still to be read; waits for what another thread
        reads there.
        """
        if not (self._places or self._filling):
            return
        if isinstance(value, torch.Tensor):
            if not isinstance(value, LazyTensor):
                with unwatched():
                    memory = storage_address(value)
                    # Without the lock: what is no longer among places is being filled.
                    if memory in self._places or memory in self._filling or _is_hidden(value, memory):
                        with self._lock:
                            self._flush_overlapping(value)
        elif isinstance(value, (list, tuple, set, frozenset)):
            for item in value:
                self.flush_overlapping(item)
        elif isinstance(value, Mapping):
            for item in value.values():
                self.flush_overlapping(item)

    def _flush_overlapping(self, tensor: torch.Tensor) -> None:
        if self._pending:
            memory = storage_address(tensor)
            places = self._places.get(memory)
            if _is_hidden(tensor, memory) or not (
                places is None or places.are_clear_of(tensor) or self._flush_small(memory)
            ):
                self.flush()

    def _flush_small(self, memory: int) -> bool:
        """Makes now what is to be read to one memory, if all of it is of small tensors.

        Code that works on a parameter of every layer once it is copied (``a.copy_(-a.exp())``), or looks at the scale
        that another expert's tensor left there, would make a plan of each. False where there is more to be read.
        """
        copies = self._plan.of_memory(memory)
        if not all(is_small(copy.checkpoint, copy.part.name) for copy in copies.values()):
            return False
        for place, copy in copies.items():
            self.statistics.eager.setdefault(copy.part.name, "a use of what it was copied to")
            packed = self._eager_reader.box(copy.read.stored, copy.read.ranges)
            with self._noticed():
                PendingCopy(copy.read, copy.device, {place: copy.copies[place]}, None).fill(packed)
            self._plan.filled(place)
        _wait_for(copies.values())
        return True

    # Reading

    @contextmanager
    def _noticed(self) -> Iterator[None]:
        """Remembers that a read failed, so that the recording ends with its error."""
        try:
            yield
        except BaseException as error:
            self._failed = self._failed or error
            raise

    def flush(self) -> None:
        """Reads everything that was recorded, and returns when it is where it belongs."""
        with self._lock, unwatched():
            before = self._reading, self._filling
            self._reading = True
            try:
                writes = self._take_pending()
                with self._noticed():
                    self._read(writes)
            finally:
                self._reading, self._filling = before
            _wait_for(writes)

    def _take_pending(self) -> list[PendingCopy]:
        self._filling |= self._places.keys()
        return self._plan.take_pending()

    def _read(
        self,
        writes: Sequence[PendingCopy],
        reporter: Progress | None = None,
        begun: Callable[[Load], object] | None = None,
    ) -> None:
        loads: dict[tuple[int, str], list[PendingCopy]] = {}
        for write in writes:
            loads.setdefault((id(write.checkpoint), write.device), []).append(write)
        for (_, device), of in loads.items():
            progress = (
                progress_reporter(self._progress, sum(write.nbytes for write in of)) if reporter is None else reporter
            )
            parts = [write.part for write in of]
            stats = load_parts(of[0].checkpoint, parts, device, progress, self._options, begun)
            self.statistics.loads.append(stats)

    def _finish(self) -> None:
        if self._sharing is None:
            self.flush()
            return
        self._sharing.read(
            self._checkpoints,
            self._take_pending(),
            self._shared_on,
            self.statistics,
            self._read,
            progress=self._progress,
            options=self._options,
        )

    def __enter__(self) -> Recorder:  # noqa: PYI034 - Self is newer than Python 3.10
        self._is_aside = not waiting.begin(self)
        if self._is_aside:
            if self._sharing is not None:
                self._sharing.opt_out(_ASIDE)
            return self
        with ExitStack() as entered:
            entered.callback(waiting.end, self)
            entered.enter_context(replaced())
            entered.enter_context(watched(self))
            self._entered = entered.pop_all()
        self._active = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._is_aside:
            return
        try:
            if error is None:
                self._end()
            else:
                self._tell(error)
        except BaseException as failure:
            self._tell(failure)
            raise
        finally:
            with self._lock:
                self._active = False
                self._reading, self._filling = False, frozenset()
                self._plan.clear()
                self._exposed.clear()
                self._eager_reader.clear()
            self._entered.close()

    def _end(self) -> None:
        if self._failed is not None:
            raise self._failed
        # Weights that loading code kept become eager tensors, read with all else. Whoever uses them from here on, in
        # work that has not ended, waits until they are.
        self._reading = True
        self._kept.release(LazyTensor, self._materialise_kept)
        with self._lock, unwatched():
            # From here on nothing is recorded, in other threads neither.
            self._active = False
            self._check()
            self._finish()

    def _materialise_kept(self, kept: object) -> None:
        if type(kept) is LazyTensor and getattr(kept, "lazy_recorder", None) is self:
            materialise_in_place(kept)

    def after_fork(self) -> None:
        """In a child of this process: another thread may have held the lock, and is not there to end what it read."""
        self._lock = threading.RLock()
        if self._filling:
            self._reading, self._filling = False, frozenset()
            cause = "the process was forked while another of its threads read weights, which are not filled here"
            self._failed = self._failed or NotRecordableError(cause=cause)

    def _tell(self, failure: BaseException) -> None:
        if self._sharing is not None:
            self._sharing.opt_out(failure)

    def _check(self) -> None:
        """Raises NotRecordableError if memory was replaced in a way that was not seen."""
        for write in self._pending.values():
            for (address, *_), copy in write.copies.items():
                if storage_address(copy.memory) != address:
                    cause = "the memory that it was copied to was replaced, past torch's functions"
                    raise NotRecordableError(
                        tensor=write.part.name,
                        cause=cause,
                        remedy='Load this model with {"record": false}',
                    )


def _wait_for(copies: Iterable[PendingCopy]) -> None:
    """Other threads' streams do not wait for that of this one, which has filled something."""
    if threading.current_thread() is not threading.main_thread():
        for device in {copy.device for copy in copies} - {"cpu"}:
            torch.cuda.synchronize(device)


_ASIDE = "eager tensors: another load of this process is being recorded"


def _is_hidden(tensor: torch.Tensor, memory: int) -> bool:
    """Whether torch does not say where a tensor's elements are."""
    return memory == 0 and tensor.numel() > 0 and not tensor.is_meta


def _takes(memory: torch.Tensor, value: Value) -> bool:
    """Whether ``copy_`` of a value into memory is what a load does, later: torch refuses or warns of all else."""
    if type(memory) is not torch.Tensor or memory.device.type not in {"cpu", "cuda"}:
        return False
    if memory.layout != torch.strided or memory.is_quantized or memory.is_conj() or memory.is_neg():
        return False
    if memory.dtype.is_complex != value.dtype.is_complex or not has_no_overlap(memory):
        return False
    if memory.dtype != value.dtype and copy_refused(value.dtype, memory.dtype, memory.device.type) is not None:
        return False
    return memory.shape == value.meta.shape or _broadcasts(value.meta.shape, memory.shape)


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    try:
        return bool(torch.broadcast_shapes(shape, to) == to)  # type: ignore[no-untyped-call, unused-ignore]
    except RuntimeError:
        return False
