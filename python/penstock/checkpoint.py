"""``penstock.open`` and what it returns.

A ``Checkpoint`` is a catalogue: opening reads headers and keeps no file open. Its methods load: ``load`` everything at
once, ``stream`` in the order in which tensors become ready and with bounded memory, ``load_into`` existing memory.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import perf_counter
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from penstock import _native
from penstock._native import LoadOptions, LoadStats, Prefetch, shown
from penstock.arguments import AnyPath, is_http, location, locations, name_filter, settings, tensor_names
from penstock.destinations import DtypeMismatch, fit, plan
from penstock.errors import ConfigError, LocationNotFoundError, SelectionError, TensorNotFoundError
from penstock.frameworks.base import Framework, framework, writable_framework
from penstock.loading import FreshDevice, FreshHost, Load, SessionTensors, collection_paused, window_of
from penstock.neighbours import with_neighbours
from penstock.parts import load_parts
from penstock.progress import ProgressOption, SharedProgress, progress_reporter
from penstock.selection import Selection, resolve
from penstock.state import IncompatibleKeys, report, report_misfits, state_of
from penstock.storage_options import core_options
from penstock.tensor_info import TensorInfo
from penstock.units import size

logger = logging.getLogger(__name__)


def open(  # noqa: A001
    path: AnyPath | Iterable[AnyPath],
    *,
    cache_dir: AnyPath | None = None,
    cache_bytes: int | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    trust: Any = None,
    options: LoadOptions | None = None,
) -> Checkpoint:
    """Opens a checkpoint: reads the headers of its safetensors files, all of them in parallel, and nothing else.

    Args:
        path: a safetensors file, several of them, a directory, a glob, or a shard index
            (``model.safetensors.index.json``). Or any of these on an object store or HTTP server: ``s3://``,
            ``gs://``, ``az://``, ``abfss://``, ``https://``; or a repository of the Hugging Face hub:
            ``hf://org/name[@revision][/path]``. Paths may be ``bytes`` or hold surrogate escapes, as file names need
            not be UTF-8; a leading ``~`` is the home directory.
        cache_dir: a local directory in which what comes over the network is kept for the next load; by default
            ``PENSTOCK_CACHE_DIR``, else nothing is kept. ``""`` for nothing in any case.
        cache_bytes: the most bytes kept there, a number or such as ``"500GB"`` (``PENSTOCK_CACHE_BYTES``); those used
            longest ago go first. By default 80 % of the disk's free space and what is there already.
        storage_options: credentials, endpoint and settings of the remote store, under the names of fsspec (s3fs, gcsfs,
            adlfs, huggingface_hub) or object_store: ``{"key": …, "secret": …, "endpoint_url": …}``. They come before
            the environment and serve the checkpoint's loads. The environment itself is read here, once.
        trust: whose signatures are trusted: a ``Policy``, its names and values as a dict, or the path of a JSON file
            with them; by default that of ``PENSTOCK_TRUST``. Then everything that is read has to be signed, and is
            verified before it is handed out. What has no manifest is read whole for that, here.
        options: settings; by default each is found by itself (or read from ``PENSTOCK_*``).

    Returns:
        The checkpoint. No file stays open, so nothing has to be closed; ``with`` works all the same.

    Raises:
        ConfigError: ``path`` is neither a path nor several of them, or a setting is impossible.
        LocationNotFoundError: nothing is there, or a directory holds no checkpoint.
        LocationAccessError: a file may not be read, or is no regular file; a store denies access, or there are no
            credentials for it.
        IntegrityError: a file is not what its manifest says, or ``options`` require a manifest and there is none.
        SignatureError: with ``trust``: there is no signature that is trusted, or the files are not those of it.
        FormatError: a header or an index is malformed.
        StorageError: reading failed.
        ConfigError: a storage option is unknown, or an impossible setting of the environment.
    """
    paths = locations(path)
    options = settings(options)
    if cache_dir is not None or cache_bytes is not None:
        # The empty directory says that there is no cache.
        directory = location(cache_dir, "cache_dir") if cache_dir else cache_dir
        options = options.with_disk_cache(directory, cache_bytes)
    if options.cache_dir is not None:
        _flush_at_exit()
    storage = core_options(storage_options, paths)
    began = perf_counter()
    try:
        signed = signed_by(trust, paths, storage)
        opened = _native.Checkpoint(paths, options, storage, signed)
    except LocationNotFoundError as error:
        raise with_neighbours(error, paths, storage) from None
    # Storage options may be secrets: a checkpoint that was opened with some is not pickled.
    ckpt = Checkpoint(opened, options, None if storage else _anywhere(paths), trust)
    logger.debug("opened %r in %.3f s: storage %s", ckpt, perf_counter() - began, ckpt.storage)
    return ckpt


def _anywhere(paths: list[str]) -> list[str]:
    """Locations as they are from any working directory."""
    return [path if "://" in path or path.startswith("~") else os.path.abspath(path) for path in paths]  # noqa: PTH100 - follows no links


def _may_hold_secrets(path: str) -> bool:
    """Whether the location of a checkpoint, which was opened, has a user, a password or a query."""
    if is_http(path):
        # What may be a password where nobody knows (``http://host:9000/models@v1``) was a port.
        parts = urlsplit(path)
        return "@" in parts.netloc or bool(parts.query or parts.fragment)
    return shown(path) != path


@functools.cache
def _flush_at_exit() -> None:
    """A load does not wait for its disk cache, so the process does when it ends: else the last bytes are not kept."""
    atexit.register(_native.flush_disk_cache)


def is_trust_asked(trust: Any) -> bool:
    """Whether a call, or the process, says whose signatures are trusted. Imports nothing, so asking costs nothing."""
    return trust is not None or bool(os.environ.get("PENSTOCK_TRUST", "").strip())


def signed_by(trust: Any, paths: list[str], storage: list[tuple[str, str]] | None) -> Any:
    """What is signed of the directories of these paths, for the core; None where nothing has to be signed."""
    if not is_trust_asked(trust):
        return None
    from penstock.trust.opening import signed_trees
    from penstock.trust.policy import Policy

    policy = Policy.of(trust)
    return None if policy is None else signed_trees(paths, policy, storage)


def _reopened(paths: list[str], options: LoadOptions, trust: Any = None) -> Checkpoint:
    return open(paths, options=options, trust=trust)


class Checkpoint(Mapping[str, TensorInfo]):
    """The tensors of a checkpoint, and the ways to load them. A mapping from names to ``TensorInfo``.

    Made by ``penstock.open``. May be used from several threads at once.

    """

    def __init__(
        self, native: _native.Checkpoint, options: LoadOptions, paths: list[str] | None = None, trust: Any = None
    ) -> None:
        self._native = native
        self._trust = trust
        self._options = options
        self._paths = paths
        self._last: LoadStats | None = None
        self._here = threading.local()

    def __enter__(self) -> Checkpoint:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Does nothing: a checkpoint keeps no file open, and may be used after the block."""

    def __reduce__(self) -> tuple[Callable[..., Checkpoint], tuple[list[str], LoadOptions, Any]]:
        """Pickles where the checkpoint is and its settings: unpickling opens it again, with that process's credentials.

        Raises:
            ConfigError: for a URL with a user or a query, and for a checkpoint that was opened with storage options:
                what may be secret does not belong into a pickle.
        """
        if self._paths is None or any(map(_may_hold_secrets, self._paths)):
            cause = (
                "this checkpoint cannot be pickled: its location or storage options may hold secrets, or are not known"
            )
            remedy = "Pass the location by a safe way, and open it in the other process"
            raise ConfigError(cause=cause, remedy=remedy)
        return _reopened, (self._paths, self._options, self._trust)

    def __getitem__(self, name: str) -> TensorInfo:
        return TensorInfo(self._native.tensor(*tensor_names([name])), self)

    def __iter__(self) -> Iterator[str]:
        return iter(self._native.keys())

    def __len__(self) -> int:
        return len(self._native)

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and name in self._native
        except UnicodeEncodeError:
            return False

    @property
    def core(self) -> _native.Checkpoint:
        """What the Rust core has of it. For Penstock's own modules; it may change in any release."""
        return self._native

    @property
    def stats(self) -> LoadStats | None:
        """Figures of the last load that ended well in the calling thread; if there was none, in any thread; or None.

        A load ends in the thread that takes its last tensor. ``load_into`` to several devices is a load for each.
        """
        mine: LoadStats | None = getattr(self._here, "stats", None)
        return self._last if mine is None else mine

    @property
    def options(self) -> LoadOptions:
        """The settings of its loads, where a load says nothing else."""
        return self._options

    def __repr__(self) -> str:
        objects = self._native.files
        where = objects[0][0] if len(objects) == 1 else f"{len(objects)} files"
        return f"<penstock.Checkpoint {where}: {len(self)} tensors, {size(self.nbytes)}>"

    def offset_keys(self) -> list[str]:
        """Names of all tensors in the order of their bytes, object by object."""
        return self._native.offset_keys()

    def metadata(self) -> dict[str, str] | None:
        """The ``__metadata__`` of the headers, merged, or None where no header has any."""
        return self._native.metadata() if self._native.has_metadata else None

    @property
    def files(self) -> list[tuple[str, int]]:
        """(path or URL, bytes) of every file of the checkpoint."""
        return self._native.files

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self._native.nbytes

    @property
    def storage(self) -> str:
        """What most of the bytes lie on, in a few words: ``"ext4 on nvme0n1p2"``, ``"nfs4"``, ``"s3"``."""
        return self._native.storage()

    def get_tensor(
        self,
        name: str,
        selection: Selection | None = None,
        *,
        device: Any = "cpu",
        dtype: Any = None,
        framework: str = "pt",
        options: LoadOptions | None = None,
    ) -> Any:
        """Loads one tensor, or a part of it. For several at once, ``load`` is faster.

        Args:
            name: which tensor.
            selection: integers, slices with positive steps, an ellipsis; the whole tensor by default.
            device, dtype, framework, options: as for ``load``.

        Raises:
            TensorNotFoundError: where there is none of that name; it suggests the closest.
            PenstockError: see ``load``.
        """
        (name,) = tensor_names([name])
        slices = None if selection is None or selection is ... else {name: selection}
        return self.load([name], slices=slices, device=device, dtype=dtype, framework=framework, options=options)[name]

    def load(
        self,
        names: Iterable[str] | None = None,
        *,
        filter: Callable[[str], bool] | None = None,  # noqa: A002 - as in the integrations
        slices: Mapping[str, Selection] | None = None,
        device: Any = "cpu",
        dtype: Any = None,
        framework: str = "pt",
        mmap: bool = False,
        prefault: bool = False,
        pin_memory: bool = False,
        progress: ProgressOption = None,
        options: LoadOptions | None = None,
    ) -> dict[str, Any]:
        """Loads tensors and returns them by name, in the order of ``names``, else of their bytes.

        Each tensor owns its memory and is freed when it is dropped, unless ``mmap`` is set.

        Args:
            names: which tensors; all by default. A single string is one name.
            filter: of those, only the ones for whose names this is true.
            slices: parts of tensors: integers and slices by tensor name, such as ``{"w": (slice(0, 10), 3)}``.
            device: ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or what the framework uses.
            dtype: the floating-point dtype that floating-point tensors are converted to, on the device, as they arrive.
            framework: ``"pt"``, ``"np"``, ``"jax"``, or ``"dlpack"``.
            mmap: views of the mapped files instead (``device="cpu"`` only). Nothing is read before it is touched, but
                for what a manifest verifies. Writes stay in this process; a file truncated later kills the process
                that touches its pages.
            prefault: with ``mmap``, bring all pages in first, with many threads.
            pin_memory: torch tensors on the CPU in pinned memory of the current GPU, for programs that copy them to it
                by themselves. They are read straight into one allocation of the size that they need (torch's own
                rounds up to a power of two), which is freed with the last of them. Not with ``slices`` or ``mmap``.
            progress: ``True`` for a bar, or a function of (bytes done, bytes in all).
            options: settings of this load.

        Raises:
            TensorNotFoundError, SelectionError, DeviceError, InsufficientMemoryError, StorageError,
                LocationChangedError: what cannot be found, taken, placed or read.
            IntegrityError: for bytes that are not what the manifest says; ``details["tensors"]`` names their tensors.
            LocationNotFoundError, LocationAccessError: for a file that is gone, or closed to this user, since it was
                opened.
            ConfigError, MissingDependencyError: for settings that do not go together, and a framework that is not
                there.
            LoadCancelledError: where another thread ended the load.
            DeviceError: for ``pin_memory`` without a GPU, as torch refuses it.
        """
        if pin_memory:
            return self._pinned(names, filter, slices, device, dtype, framework, mmap, progress, options)
        if prefault and not mmap:
            remedy = "Give mmap=True too, or leave prefault out: without mmap everything is read before load returns"
            raise ConfigError(f"prefault=True is for mapped files. {remedy}", remedy=remedy)
        if mmap:
            return self._views(names, filter, slices, device, dtype, framework, prefault, options)
        options = settings(options, self._options)
        names = None if names is None else tensor_names(names)
        load, library, indices = self._start(names, filter, slices, device, framework, progress, options, dtype)
        if dtype is None and not indices:
            loaded = load.collect()
        else:
            # What is converted or indexed exists twice for a moment: a stream keeps that to a few at a time.
            loaded = dict(_finished(load.stream(window_of(options)), library, indices, dtype))
        return loaded if names is None else {name: loaded[name] for name in names if name in loaded}

    def stream(
        self,
        names: Iterable[str] | None = None,
        *,
        filter: Callable[[str], bool] | None = None,  # noqa: A002
        slices: Mapping[str, Selection] | None = None,
        device: Any = "cpu",
        dtype: Any = None,
        framework: str = "pt",
        progress: ProgressOption = None,
        options: LoadOptions | None = None,
    ) -> Iterator[tuple[str, Any]]:
        """Yields ``(name, tensor)`` as tensors become ready: about in the order of their bytes, not by name.

        Reads at most ``options.window_bytes`` ahead of the consumer. Each tensor is the consumer's to keep.
        Closing or dropping the iterator ends the load; nothing of it remains.

        Args and exceptions are those of ``load``. What is wrong with them is raised here, not by the first ``next``.
        """
        options = settings(options, self._options)
        load, library, indices = self._start(names, filter, slices, device, framework, progress, options, dtype)
        tensors = load.stream(window_of(options))
        return tensors if dtype is None and not indices else _finished(tensors, library, indices, dtype)

    def load_into(
        self,
        destinations: Any,
        *,
        names: Iterable[str] | None = None,
        strict: bool = True,
        dtype_mismatch: DtypeMismatch = "convert",
        progress: ProgressOption = None,
        options: LoadOptions | None = None,
    ) -> IncompatibleKeys:
        """Fills existing tensors in place: no second copy of the weights exists at any time.

        Everything is checked before the first byte is written: a refused call has changed nothing. A load that fails
        later (the storage, a file that changes) leaves the destinations partly written, and says so by raising.

        The result is that of ``destination.copy_(tensor)`` for every tensor: version counters are bumped, leaf
        parameters that require gradients are fine, elements are converted. Contiguous memory of the checkpoint's dtype
        is read into directly; for the rest, temporary memory is bounded by ``options.window_bytes``.

        Of a ``DTensor`` (``fully_shard``, ``parallelize_module``, ``distribute_tensor``), each rank reads its local
        shard and nothing else; no rank waits for another. A tensor under several names (tied) is read once. Nobody
        else may resize or free destinations meanwhile: ``untyped_storage().resize_()`` in another thread is a write to
        freed memory.

        Args:
            destinations: a ``torch.nn.Module`` (its parameters and persistent buffers), or a mapping from names to
                torch tensors or numpy arrays. Of the checkpoint's shapes; on any mix of devices.
            names: of the checkpoint's tensors, only these.
            strict: whether names that only one side has are an error.
            dtype_mismatch: ``"convert"`` rounds floating-point numbers to the destination's dtype as ``copy_`` does.
                ``"error"`` refuses any other dtype than the checkpoint's. Integers are never converted.
            progress, options: as for ``load``.

        Returns:
            The names that only the destinations have, and those that only the checkpoint has, as torch does.

        Raises:
            DestinationError: a destination does not fit. It has another shape, another dtype of integers, or memory
                that overlaps another's. Or it has no memory of its own: meta tensors, wrapper subclasses, ``Partial``
                placements, a module that FSDP has gathered at the moment. Of several that do not fit, ``tensor`` is
                the first, and the message lists them.
            ConfigError: for another ``dtype_mismatch``.
            TensorNotFoundError: with ``strict``, for names that only one side has.
            StorageError, LocationChangedError, LocationNotFoundError, LocationAccessError, DeviceError,
                InsufficientMemoryError, LoadCancelledError: once bytes are on their way; some destinations are
                filled then.
        """
        if dtype_mismatch not in {"convert", "error"}:
            raise ConfigError(f'dtype_mismatch={dtype_mismatch!r} is neither "convert" nor "error"')
        owner, tensors, aliases = state_of(destinations)
        wanted = self._names(names, None)
        chosen = set(wanted)
        unexpected = [name for name in wanted if name not in tensors]
        missing = [name for name, group in aliases.items() if chosen.isdisjoint(group)] if names is None else []
        keys = IncompatibleKeys(missing, unexpected)
        library = writable_framework("np" if _are_numpy(tensors.values()) else "pt")
        shared = [name for name in wanted if name in tensors]
        with collection_paused():
            fills, misfits = fit(self, shared, tensors, library, dtype_mismatch)
            if strict:
                report(owner, keys, misfits)
            report_misfits(owner, misfits)
            planned = plan(fills, library)
        options = settings(options, self._options)
        reporter = progress_reporter(progress, planned.nbytes)
        try:
            for device, parts in (planned.parts or {"cpu": []}).items():
                self._done(load_parts(self, parts, device, SharedProgress(reporter), options, library=library))
        finally:
            library.written(planned.written)
            reporter.close()
        return keys

    def prefetch(
        self,
        names: Iterable[str] | None = None,
        *,
        options: LoadOptions | None = None,
    ) -> Prefetch:
        """Has the disk work before the load begins: brings files into the page cache, on a thread of its own.

        ::

            with checkpoint.prefetch():
                model = build()  # whatever takes time and needs no disk
            checkpoint.load_into(model)

        A load takes what is cached from the cache and reads the rest as always. This is a hint: it fills at most half
        of the memory that is free. It does nothing for object stores, for FUSE mounts and parallel file systems, which
        a load reads better in another way, and with ``cache="bypass"``. What cannot be read is the load's to report.

        Args:
            names: of which tensors; all by default.
            options: settings: ``cache`` is heeded.

        Returns:
            A context manager that ends it. Also ``stop()``, ``done`` (nothing more will be asked for) and ``bytes``
            (not cached, and asked for so far). It ends when it is dropped.

        Raises:
            TensorNotFoundError: for a name that is not there.
        """
        wanted = None if names is None else self._names(names, None)
        return self._native.prefetch(wanted, settings(options, self._options))

    def prefault(self, names: Iterable[str]) -> None:
        """Brings the pages of these tensors of local files into memory, with many threads. For ``penstock.supply``.

        Raises:
            StorageError, LocationChangedError: naming what cannot be read, or is no longer what was opened.
        """
        self._native.map(list(names), self._options).prefault()

    def begin(self, names: list[str], device: Any, framework: str) -> Load:
        """A load of whole tensors that the caller drives, and may cancel from another thread. For ``penstock.supply``.

        Raises:
            PenstockError: as ``load``.
        """
        return self._start(names, None, None, device, framework, None, self._options)[0]

    def _names(self, names: Iterable[str] | None, keep: Callable[[str], bool] | None) -> list[str]:
        wanted = self._native.offset_keys() if names is None else tensor_names(names)
        if keep is None:
            return wanted
        wants = name_filter(keep)
        return [name for name in wanted if wants(name)]

    def _start(
        self,
        names: Iterable[str] | None,
        keep: Callable[[str], bool] | None,
        slices: Mapping[str, Selection] | None,
        device: Any,
        framework_name: str,
        progress: ProgressOption,
        options: LoadOptions,
        dtype: Any = None,
    ) -> tuple[Load, Framework, dict[str, tuple[int | slice, ...]]]:
        library = framework(framework_name)
        where = library.device(device)
        if options.cache_dir is not None:
            _flush_at_exit()
        wanted = None if names is None and keep is None else self._names(names, keep)
        if dtype is not None:
            library.check_cast((self[name] for name in (self if wanted is None else wanted)), dtype)
        boxes, indices = self._boxes({} if slices is None else slices, wanted)
        session = self._native.session(wanted, boxes, "slab" if where == "cpu" else where, options)
        planned = SessionTensors(*session.tensors)
        fresh = FreshHost(session, library) if where == "cpu" else FreshDevice(session, planned, library, where)
        return (
            Load(session, planned, fresh, progress_reporter(progress, sum(planned.nbytes)), self._done),
            library,
            indices,
        )

    def _boxes(
        self, slices: Mapping[str, Selection], names: list[str] | None
    ) -> tuple[dict[str, list[tuple[int, int]]], dict[str, tuple[int | slice, ...]]]:
        if not isinstance(slices, Mapping):
            raise SelectionError(
                cause=f"slices must be a mapping from names of tensors to slices, not {type(slices).__name__}",
                remedy='Write slices={"lm_head.weight": slice(0, 10)}',
            )
        boxes, indices = {}, {}
        wanted = self if names is None else set(names)
        for name, selection in slices.items():
            info = self[name]
            if name not in wanted:
                raise TensorNotFoundError(tensor=name, cause="it is sliced but not among the names to load")
            boxes[name], index = resolve(name, info.shape, selection)
            if index is not None:
                indices[name] = index
        return boxes, indices

    def _views(
        self,
        names: Iterable[str] | None,
        keep: Callable[[str], bool] | None,
        slices: Mapping[str, Selection] | None,
        device: Any,
        dtype: Any,
        framework_name: str,
        prefault: bool,
        options: LoadOptions | None,
    ) -> dict[str, Any]:
        wrong = [
            f"{argument}={value!r}"
            for argument, value in (("device", device), ("slices", slices or None), ("dtype", dtype))
            if value is not None and not (argument == "device" and str(value).partition(":")[0] == "cpu")
        ]
        if wrong:
            cause = f"mmap=True gives views of the files as they are, on the CPU: not with {' and '.join(wrong)}"
            raise SelectionError(cause=cause, remedy="Load without mmap")
        library = framework(framework_name)
        library.device(device)
        options = settings(options, self._options)
        wanted = self._names(names, keep)
        mapped = self._native.map(wanted, options)
        if prefault:
            mapped.prefault()
        views = mapped.views()
        # A misaligned tensor (its file's header was not padded) cannot be viewed as its dtype; it gets its own memory.
        copied = [name for name, view in views if view is None]
        loaded = self.load(copied, framework=framework_name, options=options) if copied else {}
        return {name: loaded[name] if view is None else library.adopt(view) for name, view in views}

    def _pinned(
        self,
        names: Iterable[str] | None,
        keep: Callable[[str], bool] | None,
        slices: Mapping[str, Selection] | None,
        device: Any,
        dtype: Any,
        framework_name: str,
        mmap: bool,
        progress: ProgressOption,
        options: LoadOptions | None,
    ) -> dict[str, Any]:
        if slices or mmap or framework_name != "pt" or str(device).partition(":")[0] != "cpu":
            cause = "pin_memory=True is for whole torch tensors on the CPU: not with slices, mmap, or another device"
            raise ConfigError(cause=cause, remedy="Load without pin_memory")
        from penstock.frameworks.torch import Torch, pinned_tensors

        wanted = self._names(names, keep)
        infos = [self[name] for name in wanted]
        if dtype is not None:
            Torch().check_cast(infos, dtype)
        tensors = pinned_tensors(infos, dtype)
        self.load_into(tensors, names=wanted, progress=progress, options=options)
        return tensors

    def _done(self, stats: LoadStats) -> None:
        self._last = self._here.stats = stats
        logger.debug("loaded from %r: %r", self, stats)


def _finished(
    tensors: Iterator[tuple[str, Any]],
    library: Framework,
    indices: Mapping[str, tuple[int | slice, ...]],
    dtype: Any,
) -> Iterator[tuple[str, Any]]:
    """What the core does not do: integer indices and steps, and conversion."""
    for name, tensor in tensors:
        if name in indices:
            tensor = library.index(tensor, indices[name])  # noqa: PLW2901
        yield name, tensor if dtype is None else library.cast(tensor, dtype)


def _are_numpy(tensors: Iterable[Any]) -> bool:
    return all(type(tensor).__module__.partition(".")[0] == "numpy" for tensor in tensors)
