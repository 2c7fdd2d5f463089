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
cached. Where it is not, many threads read it ahead of whoever takes tensors one by one. ``mmap=False`` gives
tensors that own their memory.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ContextDecorator, contextmanager
from functools import partial, wraps
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from penstock._native import LoadOptions, shown
from penstock.errors import MissingDependencyError, PenstockError, SafetensorError
from penstock.patches import DISABLE, is_disabled, listed
from penstock.safetensors import safe_open as our_safe_open

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
    _replaced.append((safetensors.safe_open, _opening(safetensors.safe_open)))
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        pass  # without torch, there is no such function
    else:
        listed("safetensors.torch.load_file")
        _replaced.append((safetensors.torch.load_file, _loading(safetensors.torch.load_file)))
    _everywhere(_replaced)


def _remove() -> None:
    _everywhere([(ours, theirs) for theirs, ours in _replaced])
    _replaced.clear()


def _everywhere(pairs: list[tuple[Any, Any]]) -> None:
    """Puts each second in the place of its first, in the namespace of every module but Penstock's."""
    new = {id(old): made for old, made in pairs}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] == "penstock":
            continue
        namespace = vars(module)
        # A process has thousands of modules: by far the most have none of these, which is found without Python's help.
        if not new.keys().isdisjoint(map(id, list(namespace.values()))):
            for key, value in list(namespace.items()):
                if id(value) in new:
                    namespace[key] = new[id(value)]


def adjust(module: ModuleType) -> None:
    """Gives a module the ``safe_open`` that it is to have now, after a replacement of another kind in it has ended:
    blocks may have been entered or left meanwhile, and did not find theirs there.
    """
    with _lock:
        current = vars(module).get("safe_open")
        plain = getattr(current, "_stands_for", current)
        if plain is not None:
            vars(module)["safe_open"] = next((ours for theirs, ours in _replaced if theirs is plain), plain)


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
        _stands_for = theirs

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


class _Opened(our_safe_open):
    """``penstock.safe_open`` as a block has it: by default with views of the file, and with safetensors' errors."""

    _theirs: Callable[[], Any]

    def __init__(self, filename: Any, framework: str, device: Any = "cpu", *, backend: Any = None) -> None:
        del backend
        settings = _settings()
        self._own: Any = None
        with _as_theirs():
            super().__init__(filename, framework, device, mmap=settings.mmap, options=settings.options)
        logger.debug("safetensors' safe_open of %s is Penstock's, to %s", shown(str(filename)), device)

    def _besides(self) -> Any:
        """The handle that safetensors has of the file, for what only that can do."""
        self.keys()  # which refuses a file that is closed
        if self._own is None:
            self._own = self._theirs()
        return self._own

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        own, self._own = self._own, None
        if own is not None:
            own.__exit__(kind, value, traceback)
        super().__exit__(kind, value, traceback)


def _translating(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with _as_theirs():
            return method(*arguments, **keywords)

    return call


for _name in ("keys", "offset_keys", "metadata", "get_tensor", "get_tensors", "get_slice", "_part"):
    setattr(_Opened, _name, _translating(getattr(our_safe_open, _name)))


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
