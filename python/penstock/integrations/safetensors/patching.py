"""``with penstock.patch_safetensors():`` for libraries that call safetensors themselves.

While such a block is open, ``safetensors.safe_open`` and ``safetensors.torch.load_file`` are Penstock's, in every
module of the process that has them by name, however it imported them. When the last block closes, everything is as it
was, also in modules that were imported meanwhile.

* **Scope**: the process, not the thread, because libraries load in threads of their own. Blocks nest and overlap, in
  one thread or several; the one that was entered last, of those still open, decides on the settings.
* **What stays Penstock's**: files that were opened within a block, until they are closed.
* **What is not reached**: a function that someone keeps elsewhere than in a module's namespace (a default argument, a
  class attribute, a closure), and ``safetensors.torch.load``, which is given bytes.
* **What Penstock does not load** goes to safetensors as before: frameworks and devices that it does not know, and what
  a later ``safe_open`` does besides (0.9's ``prefetch`` and ``get_tensor_meta``).
* **How to turn it off**: with ``PENSTOCK_DISABLE=1`` in the environment when a block is entered, it does nothing.

Tensors on the CPU are views of the mapped file, as safetensors' are: the same memory, the same cost where the file is
cached. Where it is not, many threads bring it in ahead of whoever takes tensors one by one. ``mmap=False`` gives
tensors that own their memory.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ContextDecorator, contextmanager
from functools import partial
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from penstock._native import LoadOptions
from penstock.errors import MissingDependencyError, PenstockError, SafetensorError
from penstock.integrations.safetensors.read_ahead import ReadAhead
from penstock.patches import DISABLE, is_disabled, listed
from penstock.safetensors import Slice
from penstock.safetensors import safe_open as our_safe_open
from penstock.selection import Selection, is_basic, resolve

logger = logging.getLogger(__name__)

_BACKENDS = {"mmap", "pread"}
_TORCH = {"pt", "torch", "pytorch"}
_NUMPY = {"np", "numpy"}


class _Settings(NamedTuple):
    mmap: bool
    options: LoadOptions | None


_lock = threading.Lock()
_open: list[_Settings] = []
"""Of the blocks that are open, in the order in which they were entered."""
_replaced: list[tuple[Any, Any]] = []
"""(safetensors' own, Penstock's) while a block is open."""


class patch_safetensors(ContextDecorator):  # noqa: N801 - called like the function it reads as
    """Makes libraries that call safetensors load through Penstock, for as long as the block is open.

    Also a decorator. See the module's description for what exactly is replaced. Where a block is entered and never left
    (``patch_safetensors().__enter__()``), that is for the rest of the process.

    Args:
        mmap: whether tensors on the CPU are views of the mapped file (as safetensors' are), or own their memory.
        options: settings of the loads.

    Raises:
        MissingDependencyError: on entering, where safetensors is not installed.
    """

    # No generator: one that is dropped, at the latest when the interpreter ends, would leave the block.

    def __init__(self, *, mmap: bool = True, options: LoadOptions | None = None) -> None:
        self._mmap = mmap
        self._options = options
        self._entered: list[_Settings | None] = []
        """None for what was entered while it was turned off."""

    def _recreate_cm(self) -> patch_safetensors:
        return patch_safetensors(mmap=self._mmap, options=self._options)

    def __enter__(self) -> None:
        if is_disabled():
            logger.debug("%s is set: patch_safetensors does nothing", DISABLE)
            self._entered.append(None)
            return
        settings = _Settings(self._mmap, self._options)
        with _lock:
            if not _open:
                _install()
            _open.append(settings)
            self._entered.append(settings)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _lock:
            settings = self._entered.pop()
            if settings is None:
                return
            # This very one: another block may have equal settings.
            at = next(number for number, item in enumerate(_open) if item is settings)
            del _open[at]
            if not _open:
                _remove()


def _install() -> None:
    try:
        import safetensors
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "patch_safetensors needs the package 'safetensors', which is not installed (pip install safetensors)",
            cause=str(error),
            remedy="pip install safetensors",
        ) from error
    listed("safetensors.safe_open")
    pairs: list[tuple[Any, Any]] = [(safetensors.safe_open, _opening(safetensors.safe_open))]
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        pass  # without torch, there is no such function
    else:
        listed("safetensors.torch.load_file")
        pairs.append((safetensors.torch.load_file, _loading(safetensors.torch.load_file)))
    _replaced.extend(pairs)
    for theirs, ours in pairs:
        _everywhere(theirs, ours)


def _remove() -> None:
    for theirs, ours in _replaced:
        _everywhere(ours, theirs)
    _replaced.clear()


def _everywhere(old: Any, new: Any) -> None:
    """Puts ``new`` in the place of ``old`` in the namespace of every module but Penstock's."""
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] == "penstock":
            continue
        namespace = vars(module)
        for key, value in list(namespace.items()):
            if value is old:
                namespace[key] = new


def _settings() -> _Settings:
    # A name that was kept somewhere may be called after the last block has closed.
    return _open[-1] if _open else _Settings(mmap=True, options=None)


def _ours(framework_name: Any, device: Any, options: Mapping[str, Any]) -> bool:
    """Whether Penstock loads to there, and knows what else is asked for."""
    if any(name != "backend" or value not in _BACKENDS for name, value in options.items()):
        return False  # a later safetensors may know it; any other says what is wrong
    if framework_name in _NUMPY:
        return str(device) == "cpu"
    if framework_name not in _TORCH:
        return False
    import torch

    try:
        kind = "cuda" if isinstance(device, int) else torch.device(device).type
    except (RuntimeError, TypeError):
        return False  # safetensors says what is wrong with it
    return kind == "cpu" or (kind == "cuda" and torch.version.hip is None)


def _opening(theirs: Any) -> type:
    """The class that stands for ``safetensors.safe_open``."""

    class safe_open(_Opened):  # noqa: N801 - the name people know
        def __new__(cls, filename: Any, framework: Any, device: Any = "cpu", **options: Any) -> Any:
            if not _ours(framework, device, options):
                return theirs(filename, framework, device, **options)
            made = super().__new__(cls)
            made._theirs = partial(theirs, filename, framework, device, **options)
            return made

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or not hasattr(theirs, name):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self._besides(), name)

    return safe_open


def _loading(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """The function that stands for ``safetensors.torch.load_file``."""

    def load_file(filename: Any, device: Any = "cpu", **options: Any) -> dict[str, Any]:
        if not _ours("pt", device, options):
            loaded: dict[str, Any] = theirs(filename, device, **options)
            return loaded
        with _Opened(filename, "pt", device) as file:
            return file.get_tensors()

    return load_file


class _Opened:
    """What ``safe_open`` gives within a block. As ``penstock.safe_open``, and with views of the file on the CPU."""

    _theirs: Callable[[], Any]

    def __init__(self, filename: Any, framework: str, device: Any = "cpu", *, backend: Any = None) -> None:
        del backend
        settings = _settings()
        self._framework = framework
        self._own: Any = None
        with _as_theirs():
            self._file = our_safe_open(filename, framework, device, options=settings.options)
            checkpoint = self._file._checkpoint
            self._views: dict[str, Any] | None = None
            self._ahead: ReadAhead | None = None
            on_host = str(device) == "cpu" and not any("://" in name for name, _ in checkpoint.files)
            if settings.mmap and on_host:
                self._views = checkpoint.load(framework=framework, mmap=True)
                self._ahead = ReadAhead(checkpoint, settings.options or LoadOptions())

    def _besides(self) -> Any:
        """The handle that safetensors has of the file, for what only that can do."""
        self._file.keys()  # which refuses a file that is closed
        if self._own is None:
            self._own = self._theirs()
        return self._own

    def __enter__(self) -> _Opened:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._ahead is not None:
            self._ahead.close()
        # Tensors that were handed out keep the mapping alive.
        self._views = None
        own, self._own = self._own, None
        if own is not None:
            own.__exit__(kind, value, traceback)
        self._file.__exit__(kind, value, traceback)

    def keys(self) -> list[str]:
        with _as_theirs():
            return self._file.keys()

    def offset_keys(self) -> list[str]:
        with _as_theirs():
            return self._file.offset_keys()

    def metadata(self) -> dict[str, str] | None:
        with _as_theirs():
            return self._file.metadata()

    def get_tensor(self, name: str) -> Any:
        with _as_theirs():
            if self._views is None or self._ahead is None or name not in self._views:
                return self._file.get_tensor(name)
            self._ahead.want(name)
            return _alias(self._views[name])

    def get_tensors(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        with _as_theirs():
            if self._views is None or self._ahead is None:
                return self._file.get_tensors(names)
            if names is not None:
                return {name: self.get_tensor(name) for name in names}
            self._ahead.everything()
            return {name: _alias(tensor) for name, tensor in self._views.items()}

    def get_slice(self, name: str) -> Any:
        with _as_theirs():
            return _OpenedSlice(self, name, self._file.get_slice(name))


class _OpenedSlice:
    """What ``get_slice`` gives within a block: of a mapped file a part of the view, else what is read for it."""

    def __init__(self, file: _Opened, name: str, part: Slice) -> None:
        self._file = file
        self._name = name
        self._part = part

    def get_shape(self) -> list[int]:
        return self._part.get_shape()

    def get_dtype(self) -> str:
        return self._part.get_dtype()

    def __getitem__(self, selection: Selection) -> Any:
        with _as_theirs():
            if self._file._views is None:
                return self._part[selection]
            if self._file._framework in _NUMPY or is_basic(selection):
                resolve(self._name, self._part.get_shape(), selection)
            whole = self._file.get_tensor(self._name)
            part = whole[selection]
            return part.contiguous() if hasattr(part, "contiguous") else part


def _alias(tensor: Any) -> Any:
    """The same memory as a tensor of its own: attributes that are set on one do not show on the other."""
    return tensor.detach() if hasattr(tensor, "detach") else tensor[...]


@contextmanager
def _as_theirs() -> Iterator[None]:
    """Makes errors that safetensors has a name for catchable under that name too."""
    try:
        yield
    except SafetensorError as error:
        kind = _both(type(error))
        if isinstance(error, kind):
            raise
        made = kind(error.message)
        made.__dict__.update(error.__dict__)
        raise made from error.__cause__


_BOTH: dict[type[PenstockError], type[PenstockError]] = {}


def _both(kind: type[PenstockError]) -> type[PenstockError]:
    """An exception that is one of Penstock's and safetensors' own."""
    from safetensors import SafetensorError as Theirs

    if issubclass(kind, Theirs):
        return kind
    if kind in _BOTH:
        return _BOTH[kind]

    def reduce(self: PenstockError) -> Any:
        # Another process may have no safetensors.
        return kind, (self.message,), self.__dict__

    _BOTH[kind] = type(kind.__name__, (kind, Theirs), {"__reduce__": reduce, "__module__": kind.__module__})
    return _BOTH[kind]
