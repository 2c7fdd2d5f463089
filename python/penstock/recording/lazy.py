"""Lazy tensors: tensors of a checkpoint that are read when it is known what for.

A ``LazyTensor`` is a ``torch.Tensor`` with shape, dtype and device, and without memory. What torch makes views of
(``narrow``, indexing, ``chunk``, ``view``, ``t`` …) gives another lazy tensor: the views are torch's own, made of a
tensor on the meta device, so sizes, strides and offsets are right by construction. Conversions of dtype and copies
(``to``, ``float``, ``contiguous``) are noted. ``copy_`` and assignment into existing memory go to the recorder, which
reads all such places together later. Everything else is told to the recorder too, and is done by torch with a real
tensor.

Nothing may see a lazy tensor's value change: a function that writes to one cannot be imitated, and raises
``NotRecordableError``, upon which the whole load is begun again with ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import torch

from penstock.recording.geometry import Reading, View, reading

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoint
    from penstock.recording.recorder import Recorder


class NotRecordableError(RuntimeError):
    """A model's code did with a lazy tensor what only an ordinary tensor can do."""


class Stored(NamedTuple):
    """A tensor of a checkpoint."""

    checkpoint: Checkpoint
    name: str
    shape: tuple[int, ...]


class Packed(NamedTuple):
    """The contiguous copy of a lazy tensor whose elements were not in order."""

    of: LazyTensor


class Source(NamedTuple):
    """What to read for a lazy tensor, and how to make it of what was read."""

    stored: Stored
    ranges: list[tuple[int, int]]
    make: Callable[[torch.Tensor], torch.Tensor]
    """From the box, packed, to the lazy tensor's value."""
    is_plain: bool
    """Whether the value is the box as it is, byte by byte."""


class LazyTensor(torch.Tensor):
    """See the module. Made by a ``Recorder``."""

    _recorder: Recorder
    _root: Stored | Packed
    _meta: torch.Tensor
    _casts: tuple[torch.dtype, ...]
    _real: torch.Tensor | None

    @staticmethod
    def __new__(  # noqa: PYI034 - Self is newer than Python 3.10
        cls: type[LazyTensor],
        recorder: Recorder,
        root: Stored | Packed,
        meta: torch.Tensor,
        casts: tuple[torch.dtype, ...],
        device: torch.device,
    ) -> LazyTensor:
        """A lazy tensor.

        Args:
            recorder: whom to tell.
            root: what it is a view of.
            meta: the view, on the meta device: its storage stands for all of ``root``.
            casts: dtypes it is converted to, one after the other.
            device: where it says it is, and where a real tensor in its place is made.
        """
        lazy: LazyTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, unused-ignore]
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=casts[-1] if casts else meta.dtype,
            device=device,
        )
        lazy._recorder, lazy._root, lazy._meta, lazy._casts, lazy._real = recorder, root, meta, casts, None
        return lazy

    def __repr__(self, **_: Any) -> str:  # type: ignore[override, unused-ignore]
        shape, dtype = list(self._meta.shape), self._casts[-1] if self._casts else self._meta.dtype
        return f"LazyTensor({self.stored().name!r}, shape={shape}, dtype={dtype})"

    def stored(self) -> Stored:
        """The tensor of the checkpoint that it comes from."""
        root = self._root
        return root if isinstance(root, Stored) else root.of.stored()

    def view_of_root(self) -> View:
        """Its place in ``root``'s elements."""
        meta = self._meta
        return View(tuple(meta.shape), meta.stride(), int(meta.storage_offset()))

    def source(self) -> Source:
        """What to read for it."""
        root, view, bits, casts = self._root, self.view_of_root(), self._meta.dtype, self._casts
        if isinstance(root, Stored):
            box: Reading = reading(root.shape, view)

            def cut(packed: torch.Tensor) -> torch.Tensor:
                return _strided(packed.view(bits), box.view)

            plain = box.view.is_packed() and _count(box.ranges) == view.numel()
            make, stored, ranges = cut, root, box.ranges
        else:
            inner = root.of.source()

            def cut_copy(packed: torch.Tensor) -> torch.Tensor:
                return _strided(inner.make(packed).contiguous().view(bits), view)

            make, stored, ranges, plain = cut_copy, inner.stored, inner.ranges, False
        if not casts:
            return Source(stored, ranges, make, plain)

        def convert(packed: torch.Tensor) -> torch.Tensor:
            made = make(packed)
            for dtype in casts:
                made = made.to(dtype)
            return made

        return Source(stored, ranges, convert, is_plain=False)

    def derived(
        self,
        meta: torch.Tensor | None = None,
        *,
        root: Stored | Packed | None = None,
        casts: tuple[torch.dtype, ...] | None = None,
        device: torch.device | None = None,
    ) -> LazyTensor:
        """Another lazy tensor that differs in what is given."""
        return LazyTensor(
            self._recorder,
            self._root if root is None else root,
            self._meta if meta is None else meta,
            self._casts if casts is None else casts,
            device_of(self) if device is None else device,
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        named = {} if kwargs is None else dict(kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(func, args, named)
            if result is not NotImplemented:
                return result
        return really(func, args, named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override, unused-ignore]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """For what reaches torch's dispatcher without passing ``__torch_function__``: never lazily."""
        del types
        return really(func, args, {} if kwargs is None else dict(kwargs))


def device_of(tensor: torch.Tensor) -> torch.device:
    """Where a tensor says it is, without asking its subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.device


def really(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Does ``func`` with real tensors in the places of lazy ones.

    Raises:
        NotRecordableError: if it wrote to one of them.
    """
    made: list[tuple[torch.Tensor, int]] = []
    recorders = set()

    def real(value: Any) -> Any:
        if isinstance(value, LazyTensor):
            recorders.add(value._recorder)
            tensor = value._recorder.materialise(value, func)
            made.append((tensor, tensor._version))
            return tensor
        if isinstance(value, (list, tuple)):
            items = [real(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {key: real(item) for key, item in value.items()}
        return value

    args, kwargs = real(args), real(kwargs)
    for recorder in recorders:
        recorder.settle((args, kwargs))
    result = func(*args, **kwargs)
    if any(tensor._version != version for tensor, version in made):
        raise NotRecordableError(f"{name_of(func)} writes to a weight of the checkpoint")
    return result


def name_of(func: Any) -> str:
    """What a function of torch is called, for messages."""
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") in {"__get__", "__set__"} and owner is not None:
        return f"{getattr(owner, '__name__', owner)}.{func.__name__}"
    return str(getattr(func, "__name__", func))


def _strided(packed: torch.Tensor, view: View) -> torch.Tensor:
    return packed.as_strided(view.sizes, view.strides, int(packed.storage_offset()) + view.offset)


def _count(ranges: list[tuple[int, int]]) -> int:
    count = 1
    for first, end in ranges:
        count *= end - first
    return count


def _first_is_lazy(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], LazyTensor)


def _has_lazy(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_lazy(item) for item in value)
    return isinstance(value, LazyTensor)


# Handlers return NotImplemented for what they do not know: it is then done with real tensors.


def _described(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Shape, dtype and the like: the wrapper knows."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views are torch's own, of the meta tensor."""
    if not _first_is_lazy(args) or _has_lazy(args[1:]) or any(map(_has_lazy, kwargs.values())):
        return NotImplemented
    lazy: LazyTensor = args[0]
    if lazy._real is not None:
        return func(lazy._real, *args[1:], **kwargs)
    if func is torch.Tensor.__getitem__ and not _is_basic(args[1]):
        return NotImplemented
    reinterprets = func is torch.Tensor.view and any(isinstance(a, torch.dtype) for a in (*args[1:], *kwargs.values()))
    if reinterprets and lazy._casts:
        return NotImplemented
    views = func(lazy._meta, *args[1:], **kwargs)
    made = []
    for view in views if isinstance(views, (list, tuple)) else [views]:
        same = isinstance(view, torch.Tensor) and torch._C._is_alias_of(view, lazy._meta)  # type: ignore[attr-defined, unused-ignore]
        if not same or view.element_size() != lazy._meta.element_size():
            return NotImplemented
        made.append(lazy.derived(view))
    return type(views)(made) if isinstance(views, (list, tuple)) else made[0]


def _is_basic(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(
        item is None
        or item is Ellipsis
        or isinstance(item, slice)
        or (isinstance(item, SupportsIndex) and not isinstance(item, (bool, torch.Tensor)))
        for item in items
    )


def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What gives the same values in the same memory."""
    del func, kwargs
    lazy = args[0]
    return NotImplemented if not _first_is_lazy(args) else lazy.derived() if lazy._real is None else lazy._real.detach()


def _packed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``contiguous``, ``clone``: a copy in row-major order."""
    if not _first_is_lazy(args) or len(args) > 1 or kwargs:
        return NotImplemented
    lazy: LazyTensor = args[0]
    if lazy._real is not None:
        return func(lazy._real)
    if lazy._meta.is_contiguous():
        return lazy.derived()
    if func is not torch.Tensor.contiguous:
        # A clone keeps what order the elements have, which may be none that a view describes.
        return NotImplemented
    dtype = lazy._casts[-1] if lazy._casts else lazy._meta.dtype
    return lazy.derived(torch.empty(lazy._meta.shape, dtype=dtype, device="meta"), root=Packed(lazy), casts=())


def _converted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: PLR0911 - each case is one
    """``to``, ``float``, ``cpu`` and the like: another dtype, another place."""
    if not _first_is_lazy(args) or _has_lazy(args[1:]):
        return NotImplemented
    lazy: LazyTensor = args[0]
    if lazy._real is not None:
        return func(lazy._real, *args[1:], **kwargs)
    device: torch.device | None = None
    if func in _CASTS:
        if len(args) > 1 or kwargs:
            return NotImplemented
        dtype: torch.dtype | None = _CASTS[func]
    elif func is torch.Tensor.cpu:
        device, dtype = torch.device("cpu"), None
    else:
        kept = {key: value for key, value in kwargs.items() if key not in {"copy", "non_blocking"}}
        try:
            device, dtype, _, memory_format = torch._C._nn._parse_to(*args[1:], **kept)  # type: ignore[attr-defined, unused-ignore]
        except (TypeError, RuntimeError):
            return NotImplemented
        if memory_format is not None:
            return NotImplemented
    if device is not None and device.type == "meta":
        return NotImplemented
    if device is not None and device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    now = lazy._casts[-1] if lazy._casts else lazy._meta.dtype
    casts = lazy._casts if dtype is None or dtype == now else (*lazy._casts, dtype)
    return lazy.derived(casts=casts, device=device)


def _copied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``copy_`` of a lazy tensor into memory that exists."""
    del kwargs
    if len(args) < 2 or isinstance(args[0], LazyTensor) or not isinstance(args[1], LazyTensor):  # noqa: PLR2004
        return NotImplemented
    del func
    return args[0] if args[1]._recorder.record(args[0], args[1]) else NotImplemented


def _assigned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``memory[index] = lazy``."""
    del func, kwargs
    memory, index, lazy = args
    if isinstance(memory, LazyTensor) or not isinstance(lazy, LazyTensor) or not _is_basic(index):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        place = memory.detach()[index]
    # Assignment lets go of leading dimensions of size one, which copying does not.
    shape = lazy._meta.shape
    while len(shape) > place.dim() and shape[0] == 1:
        lazy = lazy[0]
        shape = shape[1:]
    return None if lazy._recorder.record(place, lazy) else NotImplemented


_T: Any = torch.Tensor
_CASTS: dict[Any, torch.dtype] = {
    _T.float: torch.float32,
    _T.double: torch.float64,
    _T.half: torch.float16,
    _T.bfloat16: torch.bfloat16,
    _T.int: torch.int32,
    _T.long: torch.int64,
}
_DESCRIBES = [
    *(
        getattr(_T, name).__get__
        for name in (
            "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta", "is_leaf",
            "grad", "grad_fn", "is_sparse", "is_quantized", "itemsize", "nbytes", "is_nested", "is_mkldnn", "is_xpu",
        )
    ),
    _T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.element_size, _T.stride, _T.storage_offset,
    _T.is_contiguous, _T.is_floating_point, _T.is_complex, _T.is_signed, _T.get_device, _T.__len__,
    torch.is_floating_point, torch.is_complex, torch.numel,
]  # fmt: skip
_VIEWS = [
    _T.narrow, _T.__getitem__, _T.chunk, _T.split, _T.split_with_sizes, _T.tensor_split, _T.unbind, _T.select,
    _T.view, _T.reshape, _T.t, _T.transpose, _T.swapaxes, _T.swapdims, _T.permute, _T.movedim, _T.moveaxis,
    _T.unsqueeze, _T.squeeze, _T.flatten, _T.unflatten, _T.expand, _T.expand_as, _T.view_as, _T.reshape_as,
    _T.T.__get__, _T.mT.__get__,
    torch.narrow, torch.chunk, torch.split, torch.tensor_split, torch.unbind, torch.select, torch.reshape, torch.t,
    torch.transpose, torch.permute, torch.movedim, torch.unsqueeze, torch.squeeze, torch.flatten, torch.unflatten,
]  # fmt: skip
_HANDLERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(_DESCRIBES, _described),
    **dict.fromkeys(_VIEWS, _viewed),
    **dict.fromkeys([_T.detach, _T.data.__get__, torch.detach], _same),
    **dict.fromkeys([_T.contiguous, _T.clone, torch.clone], _packed),
    **dict.fromkeys([*_CASTS, _T.to, _T.cpu], _converted),
    _T.copy_: _copied,
    _T.__setitem__: _assigned,
}

HARMLESS = frozenset([*_DESCRIBES, *_VIEWS, _T.detach, _T.data.__get__, torch.detach])
"""Functions that read no element of a tensor."""
