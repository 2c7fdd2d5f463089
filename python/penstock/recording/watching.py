"""Seeing every use of torch while something is recorded, in the thread that records and in those it starts.

Two modes of torch do it. Functions called from Python pass a ``TorchFunctionMode``. What they are made of, and what
``torch.jit`` and C++ extensions call, passes a ``TorchDispatchMode``. Torch's modes are a thread's own. So threads that
a watched thread starts, functions that it submits to a ``ThreadPoolExecutor``, and what it has a ``Future`` call when
done, are run under them too. The modes of a thread that outlives the recording do nothing any more, and hold nothing of
it.

What no mode sees is replaced while a recorder is active (``_REPLACEMENTS``): what starts threads and hands them work,
what makes tensors of a class and does not know lazy ones, and ``to_dlpack``, a function of C++. All is put back when
the recorder ends. What is not seen even so, docs/recording.md lists.
"""

from __future__ import annotations

import concurrent.futures.thread
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.patches import Replacement
from penstock.recording.here import Watch, here, others_watch
from penstock.recording.lazy import LazyTensor, has_lazy, in_place_of
from penstock.recording.waiting import before

if TYPE_CHECKING:
    from penstock.recording.recorder import Recorder


@contextmanager
def watched(recorder: Recorder) -> Iterator[None]:
    """What this thread does, and what others do for it, is seen by the recorder until this ends, and no longer."""
    watch = Watch(recorder)
    try:
        with _seen_by(watch):
            yield
    finally:
        watch.recorder = None


@contextmanager
def _seen_by(watch: Watch) -> Iterator[None]:
    """What this thread does is seen."""
    # It may have come here by two replacements of ours, one above the other.
    if watch.recorder is None or watch is here.watch:
        yield
        return
    thread, before = threading.get_ident(), here.watch
    functions: Any = _Functions(watch)
    operators: Any = _Operators(watch)
    functions.__enter__()
    operators.__enter__()
    here.watch, here.modes = watch, here.modes + 1
    try:
        yield
    finally:
        if threading.get_ident() != thread:
            raise RuntimeError("a Recorder has to be left in the thread that entered it")
        here.watch, here.modes = before, here.modes - 1
        operators.__exit__(None, None, None)
        functions.__exit__(None, None, None)


def _under(watch: Watch, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with _seen_by(watch):
        return function(*args, **kwargs)


@contextmanager
def replaced() -> Iterator[None]:
    """What torch's modes do not see is replaced."""
    with ExitStack() as entered:
        for owner, replacement in _REPLACEMENTS:
            entered.enter_context(replacement.on(owner))
        yield


class _Functions(TorchFunctionMode):  # type: ignore[no-untyped-call, unused-ignore]
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named: dict[str, Any] = {} if kwargs is None else dict(kwargs)
        recorder = self._watch.recorder
        if recorder is None:
            return func(*args, **named)
        if LazyTensor not in types:
            if has_lazy(args) or has_lazy(named):
                # Setters, which look for subclasses in their first argument only.
                return LazyTensor.__torch_function__(func, types, args, named)
            if recorder.before(func, args, named) and _is_plain(args) and not others_watch():
                with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined, unused-ignore]
                    return func(*args, **named)
        return func(*args, **named)


class _Operators(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named: dict[str, Any] = {} if kwargs is None else dict(kwargs)
        recorder = self._watch.recorder
        if recorder is None:
            return func(*args, **named)
        if has_lazy(args) or has_lazy(named):
            return LazyTensor.__torch_dispatch__(func, types, args, named)
        if func not in _VIEWS:
            recorder.flush_overlapping((args, named))
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


_WORKER = getattr(concurrent.futures.thread, "_worker", object())


def _start(original: Any) -> Any:
    @functools.wraps(original)
    def start(self: threading.Thread) -> None:
        watch = here.lasting()
        # Workers of pools outlive the recording: what is submitted to them is watched, task by task.
        if watch is not None and getattr(self, "_target", None) is not _WORKER:
            run = self.run

            def watched_run() -> None:
                # The instance's, which hides the class's. Who replaced ``start`` too may have called this one twice.
                vars(self).pop("run", None)
                _under(watch, run)

            self.run = watched_run  # type: ignore[method-assign]
        original(self)

    return start


def _submit(original: Any) -> Any:
    @functools.wraps(original)
    def submit(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        watch = here.lasting()
        if watch is None:
            return original(self, fn, *args, **kwargs)
        return original(self, _under, watch, fn, *args, **kwargs)

    return submit


def _add_done_callback(original: Any) -> Any:
    @functools.wraps(original)
    def add_done_callback(self: Future[Any], fn: Callable[[Future[Any]], Any]) -> None:
        # The worker calls it when what was submitted, which is watched, has ended.
        watch = here.lasting()
        original(self, fn if watch is None else functools.partial(_under, watch, fn))

    return add_done_callback


def _taking(original: Any) -> Any:
    """Takes lazy tensors: regular ones stand in their places, which are filled with what else is recorded."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*map(_later, args), **{name: _later(value) for name, value in kwargs.items()})

    return call


def _new(original: Any) -> Any:
    return staticmethod(_taking(original))


def _later(value: Any) -> Any:
    return in_place_of(value, lambda recorder, lazy: recorder.materialise_later(lazy))


def _to_dlpack(original: Any) -> Any:
    @functools.wraps(original)
    def to_dlpack(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = in_place_of(tensor, lambda recorder, lazy: recorder.materialise(lazy, original))
        # What torch's own method means to a recorder.
        before(torch.Tensor.__dlpack__, (tensor,), {})
        return original(tensor, *args, **kwargs)

    return to_dlpack


_REPLACEMENTS: list[tuple[Any, Replacement]] = [
    (threading.Thread, Replacement("threading.Thread.start", _start)),
    (ThreadPoolExecutor, Replacement("concurrent.futures.ThreadPoolExecutor.submit", _submit)),
    (Future, Replacement("concurrent.futures.Future.add_done_callback", _add_done_callback)),
    (torch.nn.Parameter, Replacement("torch.nn.Parameter.__new__", _new)),
    (torch.nn.Buffer, Replacement("torch.nn.Buffer.__new__", _new)),
    (torch.Tensor, Replacement("torch.Tensor._make_subclass", _new)),
    (torch.Tensor, Replacement("torch.Tensor.as_subclass", _taking)),
    (torch, Replacement("torch.to_dlpack", _to_dlpack)),
    (torch.utils.dlpack, Replacement("torch.utils.dlpack.to_dlpack", _to_dlpack)),
]
