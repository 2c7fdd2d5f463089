"""Seeing every use of torch while something is recorded, in the thread that records and in those it starts.

Two modes of torch do it. Functions called from Python pass a ``TorchFunctionMode``. What they are made of, and what
``torch.jit`` and C++ extensions call, passes a ``TorchDispatchMode``. Torch's modes are a thread's own. So threads
that a watched thread starts, and functions that it submits to a ``ThreadPoolExecutor``, are run under them too. Where
they outlive the recording, their modes do nothing any more, hold nothing of it, and go at the next use of torch.

What no mode sees is replaced while any recorder is active (``patches`` lists it all): the constructors of
``nn.Parameter`` and ``nn.Buffer`` and ``torch._C._swap_tensor_impl``, which do not know lazy tensors, and the functions
that make DLPack capsules. All is put back when the last recorder ends.

Not seen are threads that existed before and are given work by other means, C++ code that uses a tensor's address
without calling torch, ``numpy()`` under ``torch._C.DisableTorchFunction``, and settings of the processor that are
changed around arithmetic (``set_flush_denormal``).
"""

from __future__ import annotations

import concurrent.futures.thread
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from penstock.patches import Replacement
from penstock.recording.here import Watch, here, is_watched, others_watch
from penstock.recording.kept import Kept
from penstock.recording.lazy import DEEPCOPY, LazyTensor, has_lazy, in_place_of, materialise_in_place

if TYPE_CHECKING:
    from penstock.recording.recorder import Recorder


@contextmanager
def watched(recorder: Recorder) -> Iterator[None]:
    """What this thread does, and what others do for it, is seen by the recorder until this ends, and no longer."""
    if is_watched(recorder):
        yield
        return
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
    if watch.recorder is None or watch in here.watches:
        yield
        return
    thread = threading.get_ident()
    here.watches.append(watch)
    modes = _Modes(watch)
    try:
        yield
    finally:
        if threading.get_ident() != thread:
            raise RuntimeError("a Recorder has to be left in the thread that entered it")
        # Gone already where its modes have ended before this: they outlived the recording.
        here.watches = [other for other in here.watches if other is not watch]
        modes.leave()


def _under(watches: tuple[Watch, ...], function: Callable[[], Any]) -> Any:
    with ExitStack() as entered:
        for watch in watches:
            entered.enter_context(_seen_by(watch))
        return function()


@contextmanager
def replaced() -> Iterator[None]:
    """What torch's modes do not see is replaced."""
    _find_dlpack()
    with ExitStack() as entered:
        for owner, replacement in _REPLACEMENTS:
            entered.enter_context(replacement.on(owner))
        yield


class _Modes:
    """The modes of one thread: on its stacks until ``leave``, or until torch is used after the recording has ended."""

    def __init__(self, watch: Watch) -> None:
        self._functions: Any = _Functions(watch, self)
        self._functions.__enter__()  # type: ignore[no-untyped-call, unused-ignore]
        self._operators: Any = _Operators(watch, self)
        self._operators.__enter__()  # type: ignore[no-untyped-call, unused-ignore]
        self._watch = watch
        here.modes.append(self)

    def is_on(self) -> bool:
        return self._operators is not None

    def leave(self) -> None:
        """Takes them off the stacks of their thread, which this is, where they are on top."""
        operators: Any = _get_current_dispatch_mode()
        if self._operators is not None and operators is self._operators:
            self._operators.__exit__(None, None, None)
            self._operators = None
        if self._functions is not None and _get_current_function_mode() is self._functions:  # type: ignore[no-untyped-call, unused-ignore]
            self._functions.__exit__(None, None, None)
            self._functions = None
        if self._functions is self._operators is None:
            here.modes = [modes for modes in here.modes if modes is not self]
            # Of a recorder that was left in another thread.
            here.watches = [watch for watch in here.watches if watch is not self._watch or watch.recorder is not None]

    def unwatched_call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Calls a function of torch after the recording has ended."""
        try:
            return func(*args, **named)
        finally:
            self.leave_soon()

    def leave_soon(self) -> None:
        """Takes them off once torch, which is calling one of them, has put that back on its stack.

        Torch has no means to do that. Python tells who profiles a thread of the next call or return in it.
        """
        if sys.getprofile() is not None:
            return
        left = _EVENTS

        def after(frame: Any, event: str, argument: Any) -> None:
            nonlocal left
            del frame, event, argument
            self.leave()
            left -= 1
            if left == 0 or self._functions is self._operators is None:
                sys.setprofile(None)

        sys.setprofile(after)


_EVENTS = 20
"""Calls and returns that are looked at for one at which no other mode lies on ours; then at the next use of torch."""


class _Functions(TorchFunctionMode):  # type: ignore[no-untyped-call, unused-ignore]
    def __init__(self, watch: Watch, modes: _Modes) -> None:
        super().__init__()
        self._watch = watch
        self._modes = modes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named: dict[str, Any] = {} if kwargs is None else dict(kwargs)
        recorder = self._watch.recorder
        if recorder is None:
            return self._modes.unwatched_call(func, args, named)
        if LazyTensor not in types:
            # What a deep copy has copied before is among its arguments too.
            if has_lazy(args[:1] if func is DEEPCOPY else args) or has_lazy(named):
                # Setters, which look for subclasses in their first argument only.
                return LazyTensor.__torch_function__(func, types, args, named)
            if recorder.before(func, args, named) and _is_plain(args) and not others_watch():
                with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined, unused-ignore]
                    return func(*args, **named)
        return func(*args, **named)


class _Operators(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, watch: Watch, modes: _Modes) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._watch = watch
        self._modes = modes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named: dict[str, Any] = {} if kwargs is None else dict(kwargs)
        recorder = self._watch.recorder
        if recorder is None:
            return self._modes.unwatched_call(func, args, named)
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
        watches = here.lasting()
        # Workers of pools outlive the recording: what is submitted to them is watched, task by task.
        if watches and getattr(self, "_target", None) is not _WORKER:
            run = self.run

            def watched_run() -> None:
                # The instance's, which hides the class's. Who replaced ``start`` too may have called this one twice.
                vars(self).pop("run", None)
                _under(watches, run)

            self.run = watched_run  # type: ignore[method-assign]
        original(self)

    return start


def _submit(original: Any) -> Any:
    @functools.wraps(original)
    def submit(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        watches = here.lasting()
        if not watches:
            return original(self, fn, *args, **kwargs)
        return original(self, _under, watches, functools.partial(fn, *args, **kwargs))

    return submit


def _taking(original: Any) -> Any:
    """Takes lazy tensors: regular ones stand in their places, which are filled with what else is recorded."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: in_place_of(value, _later) for name, value in kwargs.items()}
        return original(*(in_place_of(value, _later) for value in args), **kwargs)

    return call


def _new(original: Any) -> Any:
    return staticmethod(_taking(original))


def _later(recorder: Recorder, lazy: LazyTensor) -> torch.Tensor:
    return recorder.materialise_later(lazy)


def _swap(original: Any) -> Any:
    @functools.wraps(original)
    def swap(one: torch.Tensor, other: torch.Tensor) -> None:
        original(one, other)
        for tensor in (one, other):
            # torch.utils.swap_tensors has exchanged their classes and attributes before.
            if isinstance(tensor, LazyTensor):
                materialise_in_place(tensor, original)

    return swap


def _to_dlpack(original: Any) -> Any:
    @functools.wraps(original)
    def to_dlpack(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = in_place_of(tensor, lambda recorder, lazy: recorder.materialise(lazy, original, only_read=False))
        if isinstance(tensor, torch.Tensor):
            for watch in here.lasting():
                if watch.recorder is not None:
                    watch.recorder.expose(tensor)
        return original(tensor, *args, **kwargs)

    return to_dlpack


def _freeze(original: Any) -> Any:
    @functools.wraps(original)
    def freeze() -> None:
        Kept.freezes += 1
        original()

    return freeze


_REPLACEMENTS: list[tuple[Any, Replacement]] = [
    (gc, Replacement("gc.freeze", _freeze)),
    (threading.Thread, Replacement("threading.Thread.start", _start)),
    (ThreadPoolExecutor, Replacement("concurrent.futures.ThreadPoolExecutor.submit", _submit)),
    (torch.nn.Parameter, Replacement("torch.nn.Parameter.__new__", _new)),
    (torch.nn.Buffer, Replacement("torch.nn.Buffer.__new__", _new)),
    (torch.Tensor, Replacement("torch.Tensor._make_subclass", _new)),
    (torch.Tensor, Replacement("torch.Tensor.as_subclass", _taking)),
    (torch._C, Replacement("torch._C._swap_tensor_impl", _swap)),
    (torch._C, Replacement("torch._C._to_dlpack", _to_dlpack)),
    (torch._C, Replacement("torch._C._to_dlpack_versioned", _to_dlpack)),
    # And ``torch.to_dlpack``, in every module that has it.
]
_TO_DLPACK = vars(torch._C).get("_to_dlpack", object())
_searched: set[str] = set()
_lock = threading.Lock()


def after_fork() -> None:
    """Another thread may have held it when the process was forked."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


def _find_dlpack() -> None:
    """Finds the modules that have imported ``torch.to_dlpack``: it is a function of C++, which looks at no mode."""
    with _lock:
        for name in set(sys.modules) - _searched:
            _searched.add(name)
            module = sys.modules.get(name)
            # Not by getattr: some modules import what they are asked for.
            for attribute, value in list(getattr(module, "__dict__", {}).items()) if module is not torch._C else []:
                if value is _TO_DLPACK:
                    _REPLACEMENTS.append((module, Replacement("torch.to_dlpack", _to_dlpack, attribute)))
