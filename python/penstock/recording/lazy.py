"""Lazy tensors: tensors of a checkpoint that are read when it is known what for.

A ``LazyTensor`` is a ``torch.Tensor`` with shape, dtype and device, and without storage. What torch makes views of
(``narrow``, indexing, ``chunk``, ``view``, ``t`` …) gives another lazy tensor: the views are torch's own, made of a
tensor on the meta device, so sizes, strides and offsets are right by construction. Conversions of dtype (``to``,
``float``) and what is computed from one weight alone (``contiguous``, ``exp``, ``cat`` of its parts …) are noted.
``copy_`` and assignment into existing memory go to the recorder, which reads all such places together later.

Everything else is done by torch with a materialised tensor. Lazy tensors that alias each other share a ``LazyStorage``.
It is materialised as a whole, once; all lazy tensors of that storage are views of it from then on. So nobody can tell a
lazy tensor from an eager one by writing to it.

Which function of torch is treated how is in ``calls``. This module knows recorders by what it asks of them only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import PenstockError
from penstock.recording.here import others_watch
from penstock.recording.sources import Value, mapped, view_of
from penstock.recording.waiting import before

if TYPE_CHECKING:
    from penstock.recording.recorder import Recorder


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

HANDLERS: dict[Any, list[Handler]] = {}
"""By functions of torch, what does them, or returns NotImplemented: then the next, at last torch, materialised."""
DESCRIBES: set[Any] = set()
"""Functions whose handlers only say what a lazy tensor is: no element of it is asked for."""
KEEPS: dict[Any, int] = {}
"""Functions that change what an argument, by its number, is (its shape, dtype or memory), or keep the Python object."""


class NotRecordableError(PenstockError, RuntimeError):
    """Memory that something was to be read into was replaced by code that recording does not see.

    It is raised before the model is used. ``{"record": false}`` loads such a model.
    """


@contextmanager
def unwatched() -> Iterator[None]:
    """Torch's functions are called as they are, past modes and subclasses."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined, unused-ignore]
        yield


class LazyStorage:
    """What lazy tensors that alias each other have in common.

    Attributes:
        value: what all of the storage holds, as it was read.
        device: where it is, or will be.
        materialised: the storage itself as a tensor of ``value``'s sizes and strides, once there has to be one.
    """

    __slots__ = ("__weakref__", "device", "materialised", "value")

    def __init__(self, value: Value, device: torch.device) -> None:
        self.value = value
        self.device = device
        self.materialised: torch.Tensor | None = None

    def is_all(self, value: Value) -> bool:
        """Whether a value of this storage is all of it."""
        whole, part = view_of(self.value.meta), view_of(value.meta)
        same = value.meta.element_size() == self.value.meta.element_size() and whole.offset == part.offset
        return same and whole.numel() == part.numel() and (whole == part or part._replace(offset=0).is_packed())

    def offset_of(self, value: Value) -> int:
        """The storage offset, in its elements, of a value in this storage."""
        base, view = self.value.meta, value.meta
        nbytes = view.storage_offset() * view.element_size() - base.storage_offset() * base.element_size()
        return int(nbytes // view.element_size())

    def tensor(self, value: Value) -> torch.Tensor:
        """The tensor of a value in this storage, which is materialised."""
        if self.materialised is None:
            raise RuntimeError("this storage is not materialised yet")
        return self.tensor_in(self.materialised, value)

    def tensor_in(self, whole: torch.Tensor, value: Value) -> torch.Tensor:
        """The tensor of a value in this storage, if that were ``whole``."""
        meta = value.meta
        with unwatched(), torch.inference_mode(mode=False):
            begin = int(whole.storage_offset()) * whole.element_size()
            offset = self.offset_of(value) + begin // value.dtype.itemsize
            # To autograd it is no view, which it would not let be written to in another mode than it was made in.
            empty = torch.empty(0, dtype=value.dtype, device=whole.device)
            return empty.set_(whole.untyped_storage(), offset, meta.shape, meta.stride())


class LazyTensor(torch.Tensor):
    """A tensor of a checkpoint without memory, whose uses are recorded. Made by a ``Recorder``."""

    lazy_recorder: Recorder
    lazy_value: Value
    lazy_storage: LazyStorage
    _tensor: torch.Tensor | None
    """The tensor in its place, an alias of the storage, once that is materialised."""

    @staticmethod
    def __new__(  # noqa: PYI034 - Self is newer than Python 3.10
        cls: type[LazyTensor],
        recorder: Recorder,
        value: Value,
        device: torch.device,
        storage: LazyStorage | None = None,
    ) -> LazyTensor:
        """A lazy tensor.

        Args:
            recorder: is notified of its uses.
            value: what it holds.
            device: where it says it is, and where a materialised tensor in its place is.
            storage: of what it is a view; one of its own by default.
        """
        meta = value.meta
        # To torch's C++ code it is on the meta device, and names another only if asked: setters that do not look for
        # subclasses (``parameter.data = lazy``) then refuse it, where they would make a parameter without storage.
        lazy: LazyTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, unused-ignore]
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=value.dtype,
            device=torch.device("meta"),
            dispatch_device=True,
        )
        # C++ code that asks for the address without calling torch (``to_dlpack``) gets an error, and not address 0.
        torch._C._set_throw_on_mutable_data_ptr(lazy)  # type: ignore[attr-defined, unused-ignore]
        lazy.lazy_recorder, lazy.lazy_value, lazy._tensor = recorder, value, None
        lazy.lazy_storage = recorder.storage(value, device) if storage is None else storage
        return lazy

    def __repr__(self, **_: Any) -> str:  # type: ignore[override, unused-ignore]
        value = self.lazy_value
        return f"LazyTensor({value.stored().name!r}, shape={list(value.meta.shape)}, dtype={value.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A deep copy, of the object itself: with the attributes that it was given."""
        in_place_of(self, lambda recorder, lazy: recorder.materialise(lazy, torch.Tensor.__deepcopy__))
        materialise_in_place(self)
        return copy.deepcopy(self, memo)

    def materialised(self) -> torch.Tensor | None:
        """The tensor in its place, if its storage is materialised."""
        if self._tensor is None and self.lazy_storage.materialised is not None:
            self._tensor = self.lazy_storage.tensor(self.lazy_value)
        return self._tensor

    def materialised_now(self) -> torch.Tensor:
        """The tensor in its place; its storage is materialised."""
        tensor = self.materialised()
        return self.lazy_storage.tensor(self.lazy_value) if tensor is None else tensor

    def viewed(self, meta: torch.Tensor) -> LazyTensor:
        """Another lazy tensor of the same storage."""
        return LazyTensor(
            self.lazy_recorder, self.lazy_value._replace(meta=meta), self.lazy_storage.device, self.lazy_storage
        )

    def copied(self, value: Value | None = None, device: torch.device | None = None) -> LazyTensor:
        """A lazy tensor of a storage of its own."""
        value = self.lazy_value if value is None else value
        return LazyTensor(self.lazy_recorder, value, self.lazy_storage.device if device is None else device)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        named = {} if kwargs is None else dict(kwargs)
        try:
            return cls._called(func, args, named)
        except AttributeError as error:
            if not _is_of_materialised(error):
                raise
        before(func, args, named)
        return func(*args, **named)

    @staticmethod
    def _called(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        found = _Found()
        lazy, materialised = found.lazy, found.materialised
        at = KEEPS.get(func)
        if at is not None and at < len(args) and isinstance(args[at], LazyTensor):
            # C++ code that does not call this function sees the wrapper, of the shape and dtype that it had.
            first = args[at].materialised()
            if first is None or first.is_leaf:
                materialise_in_place(args[at])

        args, named = found.arguments(args), found.arguments(named)
        if lazy:
            # Modes of others may change what operators do: they see the calls, with materialised tensors.
            for handler in HANDLERS.get(func, ()) if func in DESCRIBES or not others_watch() else ():
                result = handler(func, args, named)
                if result is not NotImplemented:
                    return result
            result = call_materialised(func, args, named)
        else:
            before(func, args, named)
            result = func(*args, **named)
        return _object_of(result, [*lazy, *materialised])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override, unused-ignore]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """For what reaches torch's dispatcher without passing ``__torch_function__``: never lazily."""
        del types
        named = {} if kwargs is None else dict(kwargs)
        try:
            if func is torch.ops.prim.device.default:
                return args[0].lazy_storage.device
            result = call_materialised(func, args, named)
        except AttributeError as error:
            if not _is_of_materialised(error):
                raise
            before(func, args, named)
            return func(*args, **named)
        # Under inference mode nobody else puts the argument back that an in-place operator returns.
        return _object_of(result, args)


_OF_LAZY = {*vars(LazyTensor), *LazyTensor.__annotations__} - set(dir(torch.Tensor))
"""Attributes and methods that regular tensors do not have."""


def _is_of_materialised(error: AttributeError) -> bool:
    """Whether a call failed since another thread has made a regular tensor of a lazy one among its arguments."""
    return type(error.obj) is torch.Tensor and error.name in _OF_LAZY


def in_place_of(value: Any, make: Callable[[Recorder, LazyTensor], torch.Tensor]) -> Any:
    """What ``make`` makes in the place of a lazy tensor; what is none, or none any more, as it is."""
    if not isinstance(value, LazyTensor):
        return value
    try:
        return make(value.lazy_recorder, value)
    except AttributeError as error:
        if not _is_of_materialised(error):
            raise
        return value


def _object_of(result: Any, args: Iterable[Any]) -> Any:
    """Functions that return an argument (``add_``, ``contiguous``) return the same Python object."""
    if not isinstance(result, torch.Tensor):
        return result
    return next((value for value in args if getattr(value, "_tensor", None) is result), result)


class _Found:
    """Lazy tensors among the arguments of a call. (Functions that call themselves would keep them, in a cycle.)"""

    __slots__ = ("lazy", "materialised")

    def __init__(self) -> None:
        self.lazy: list[LazyTensor] = []
        self.materialised: list[LazyTensor] = []

    def arguments(self, value: Any) -> Any:
        """Arguments with tensors in the places of lazy ones whose storage is materialised."""
        if isinstance(value, LazyTensor):
            tensor = value.materialised()
            (self.lazy if tensor is None else self.materialised).append(value)
            return value if tensor is None else tensor
        return mapped(self.arguments, value)


def materialise_in_place(lazy: LazyTensor) -> None:
    """Makes the Python object a regular tensor, which is filled with what else is recorded, if no thread has yet."""
    in_place_of(lazy, lambda recorder, _: recorder.alone(lambda: _materialise_in_place(recorder, lazy)))


def _materialise_in_place(recorder: Recorder, lazy: LazyTensor) -> torch.Tensor:
    if type(lazy) is not LazyTensor:
        return lazy
    tensor = recorder.materialise_later(lazy)
    with unwatched(), torch.inference_mode(mode=False):
        grad = tensor.grad if tensor.is_leaf else None
        if grad is None:
            alias = tensor.detach()
        else:
            # The gradient's dtype or shape may have been changed since, with which torch would refuse it.
            alias = torch.empty_like(grad)
            alias.grad = grad
            alias.data = tensor
        if tensor.requires_grad and tensor.is_leaf:
            alias.requires_grad_(True)
        # In this order: to another thread it is a materialised lazy tensor, or a regular one (``_is_of_materialised``).
        torch._C._swap_tensor_impl(lazy, alias)
        lazy.__class__ = torch.Tensor  # type: ignore[assignment]
        # What loading code has set stays.
        for name in LazyTensor.__annotations__:
            vars(lazy).pop(name, None)
    return lazy


def empty_for(storage: LazyStorage) -> torch.Tensor:
    """Memory for what is still to be read."""
    value = storage.value
    # Tensors made under inference mode could not be written to outside of it.
    with torch.inference_mode(mode=False):
        return torch.empty_strided(value.meta.shape, value.meta.stride(), dtype=value.dtype, device=storage.device)


def has_lazy(value: Any) -> bool:
    """Whether arguments of a call hold a lazy tensor."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return isinstance(value, LazyTensor)
    # Asked twice of every call of torch: a generator would take most of the time.
    for item in value:  # noqa: SIM110
        if has_lazy(item):
            return True
    return False


def first_is_lazy(args: tuple[Any, ...]) -> bool:
    """Whether the first argument of a call is a lazy tensor."""
    return bool(args) and isinstance(args[0], LazyTensor)


def is_alias(one: Any, other: torch.Tensor) -> bool:
    """Whether something is a tensor that shares memory with another."""
    return isinstance(one, torch.Tensor) and bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined, unused-ignore]


def call_materialised(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls ``func`` with materialised tensors in the places of lazy ones."""
    args, kwargs = _materialised(args, func), _materialised(kwargs, func)
    before(func, args, kwargs)
    return func(*args, **kwargs)


def _materialised(value: Any, func: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value.lazy_recorder.materialise(value, func)
    return mapped(lambda item: _materialised(item, func), value)


def name_of(func: Any) -> str:
    """What a function of torch is called, for messages."""
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") in {"__get__", "__set__"} and owner is not None:
        return f"{getattr(owner, '__name__', owner)}.{func.__name__}"
    return str(getattr(func, "__name__", func))
