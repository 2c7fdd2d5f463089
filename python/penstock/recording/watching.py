"""Seeing every use of torch while something is recorded, in the thread that records and in those it starts.

Two modes of torch do it. Functions called from Python pass a ``TorchFunctionMode``. What they are made of, and what
``torch.jit`` and C++ extensions call, passes a ``TorchDispatchMode``. Torch's modes are a thread's own. So threads
that a watched thread starts, and functions that it submits to a ``ThreadPoolExecutor``, are run under them too.

What no mode sees is replaced while any recorder is active: the constructors of ``nn.Parameter`` and ``nn.Buffer``
and ``torch._C._swap_tensor_impl``, which do not know lazy tensors. All is put back when the last recorder ends.

Not seen are threads that existed before and are given work by other means, and C++ code that uses a tensor's address
without calling torch.
"""

from __future__ import annotations

import concurrent.futures.thread
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.recording.lazy import LazyTensor, become_real, has_lazy

if TYPE_CHECKING:
    from penstock.recording.recorder import Recorder

_lock = threading.Lock()
_users = 0
_replaced: list[tuple[Any, str, Any, Any]] = []


class _Here(threading.local):
    def __init__(self) -> None:
        self.recorders: list[Recorder] = []


_here = _Here()


def is_watched(recorder: Recorder) -> bool:
    """Whether what this thread does is seen by a recorder."""
    return recorder in _here.recorders


@contextmanager
def watched(recorder: Recorder) -> Iterator[None]:
    """What this thread does is seen by the recorder."""
    if is_watched(recorder):
        yield
        return
    _here.recorders.append(recorder)
    try:
        with _Functions(recorder), _Operators(recorder):
            yield
    finally:
        _here.recorders.remove(recorder)


@contextmanager
def replaced() -> Iterator[None]:
    """What torch's modes do not see is replaced."""
    global _users  # noqa: PLW0603 - what is replaced is the whole process's, so is the count of its users
    with _lock:
        if not _users:
            _replace()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                while _replaced:
                    owner, name, original, ours = _replaced.pop()
                    # Who has replaced it since keeps what they made; ours below does nothing by itself.
                    if vars(owner)[name] is ours:
                        setattr(owner, name, original)


class _Functions(TorchFunctionMode):  # type: ignore[no-untyped-call, unused-ignore]
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named: dict[str, Any] = {} if kwargs is None else dict(kwargs)
        if LazyTensor not in types:
            if has_lazy(args) or has_lazy(named):
                # Setters, which look for subclasses in their first argument only.
                return LazyTensor.__torch_function__(func, types, args, named)
            if self._recorder.before(func, args, named) and _is_plain(args):
                with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined, unused-ignore]
                    return func(*args, **named)
        return func(*args, **named)


class _Operators(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named: dict[str, Any] = {} if kwargs is None else dict(kwargs)
        if has_lazy(args) or has_lazy(named):
            return LazyTensor.__torch_dispatch__(func, types, args, named)
        if func not in _VIEWS:
            self._recorder.settle((args, named))
        return func(*args, **named)


_aten = torch.ops.aten
_VIEWS = frozenset(
    getattr(getattr(_aten, name), overload)
    for name, overloads in {
        "alias": "default", "as_strided": "default", "detach": "default", "diagonal": "default", "expand": "default",
        "permute": "default", "select": "int", "slice": "Tensor", "split": "Tensor", "split_with_sizes": "default",
        "squeeze": "default dim dims", "t": "default", "transpose": "int", "unbind": "int", "unfold": "default",
        "unsqueeze": "default", "view": "default dtype", "view_as_real": "default", "_reshape_alias": "default",
        "lift_fresh": "default",
    }.items()
    for overload in overloads.split()
)  # fmt: skip
"""Operators that make a view, whatever the strides: they read no element. Composite ones such as reshape may copy."""


def _is_plain(args: tuple[Any, ...]) -> bool:
    """Whether the first argument is a tensor that no subclass's ``__torch_dispatch__`` stands for."""
    disabled = torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined, unused-ignore]
    return bool(args) and isinstance(args[0], torch.Tensor) and type(args[0]).__torch_dispatch__ is disabled


def _replace() -> None:
    def replace(owner: Any, name: str, by: Callable[[Any], Any]) -> None:
        original = vars(owner)[name]
        ours = by(getattr(owner, name))
        _replaced.append((owner, name, original, ours))
        setattr(owner, name, ours)

    replace(threading.Thread, "start", _start)
    replace(ThreadPoolExecutor, "submit", _submit)
    replace(torch.nn.Parameter, "__new__", _new)
    replace(torch.nn.Buffer, "__new__", _new)
    replace(torch._C, "_swap_tensor_impl", _swap)


_WORKER = getattr(concurrent.futures.thread, "_worker", object())


def _start(original: Any) -> Any:
    @functools.wraps(original)
    def start(self: threading.Thread) -> None:
        recorders = tuple(_here.recorders)
        # Workers of pools outlive the recording: what is submitted to them is watched, task by task.
        if recorders and getattr(self, "_target", None) is not _WORKER:
            run = self.run

            def watched_run() -> None:
                del self.run
                _under(recorders, run)

            self.run = watched_run  # type: ignore[method-assign]
        original(self)

    return start


def _submit(original: Any) -> Any:
    @functools.wraps(original)
    def submit(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        recorders = tuple(_here.recorders)
        if not recorders:
            return original(self, fn, *args, **kwargs)
        return original(self, _under, recorders, functools.partial(fn, *args, **kwargs))

    return submit


def _under(recorders: tuple[Recorder, ...], function: Callable[[], Any]) -> Any:
    if not recorders:
        return function()
    with watched(recorders[0]):
        return _under(recorders[1:], function)


def _new(original: Any) -> Any:
    @functools.wraps(original)
    def new(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, LazyTensor):
            data = data._recorder.real_later(data)
        return original(cls, data, *args, **kwargs)

    return staticmethod(new)


def _swap(original: Any) -> Any:
    @functools.wraps(original)
    def swap(one: torch.Tensor, other: torch.Tensor) -> None:
        original(one, other)
        for tensor in (one, other):
            # torch.utils.swap_tensors has exchanged their classes and attributes before.
            if isinstance(tensor, LazyTensor):
                become_real(tensor, original)

    return swap
