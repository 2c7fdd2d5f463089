"""Lazy tensors: tensors of a checkpoint that are read when it is known what for.

A ``LazyTensor`` is a ``torch.Tensor`` with shape, dtype and device, and without memory. What torch makes views of
(``narrow``, indexing, ``chunk``, ``view``, ``t`` …) gives another lazy tensor: the views are torch's own, made of a
tensor on the meta device, so sizes, strides and offsets are right by construction. Conversions of dtype (``to``,
``float``) and what is worked out of one weight alone (``contiguous``, ``exp``, ``cat`` of its parts …) are noted.
``copy_`` and assignment into existing memory go to the recorder, which reads all such places together later. Everything
else is told to the recorder too, and is done by torch with a real tensor.

Nothing may see a lazy tensor's value change: a function that writes to one cannot be imitated, and raises
``NotRecordableError``, upon which the whole load is begun again with ordinary tensors. One of which there is no view is
its holder's own, and becomes a real tensor when it is written to.

What is done with which function of torch is in ``calls``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from penstock.recording.geometry import View
from penstock.recording.sources import Computed, Source, Stored, mapped, of_computed, source_of

if TYPE_CHECKING:
    from penstock.recording.recorder import Recorder


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

HANDLERS: dict[Any, list[Handler]] = {}
"""By functions of torch, what does them, or returns NotImplemented: then the next, at last torch with real tensors."""


class NotRecordableError(RuntimeError):
    """A model's code did with a lazy tensor what only an ordinary tensor can do."""


class LazyTensor(torch.Tensor):
    """See the module. Made by a ``Recorder``."""

    _recorder: Recorder
    _root: Stored | Computed
    _meta: torch.Tensor
    _casts: tuple[torch.dtype, ...]
    _real: torch.Tensor | None
    _is_own: bool
    """Whether there are no views of it, and it is none: to write to it changes nothing else."""

    @staticmethod
    def __new__(  # noqa: PYI034 - Self is newer than Python 3.10
        cls: type[LazyTensor],
        recorder: Recorder,
        root: Stored | Computed,
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
        lazy._is_own = False
        return lazy

    def __repr__(self, **_: Any) -> str:  # type: ignore[override, unused-ignore]
        shape, dtype = list(self._meta.shape), self._casts[-1] if self._casts else self._meta.dtype
        return f"LazyTensor({self.stored().name!r}, shape={shape}, dtype={dtype})"

    def stored(self) -> Stored:
        """The tensor of the checkpoint that it comes from."""
        root = self._root
        return root if isinstance(root, Stored) else root.of[0].stored()

    def view_of_root(self) -> View:
        """Its place in ``root``'s elements."""
        meta = self._meta
        return View(tuple(meta.shape), meta.stride(), int(meta.storage_offset()))

    def source(self) -> Source:
        """What to read for it."""
        return source_of(self._root, self.view_of_root(), self._meta.dtype, self._casts)

    def of_computed(self, value: torch.Tensor) -> torch.Tensor:
        """Its value, of the value of a root that is computed."""
        return of_computed(value, self.view_of_root(), self._meta.dtype, self._casts)

    def derived(
        self,
        meta: torch.Tensor | None = None,
        *,
        root: Stored | Computed | None = None,
        casts: tuple[torch.dtype, ...] | None = None,
        device: torch.device | None = None,
    ) -> LazyTensor:
        """Another lazy tensor that differs in what is given."""
        self._is_own = self._is_own and root is not None
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
        for handler in HANDLERS.get(func, ()):
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
    made: list[tuple[torch.Tensor, int, bool]] = []
    recorders = set()

    def real(value: Any) -> Any:
        if isinstance(value, LazyTensor):
            recorders.add(value._recorder)
            tensor = value._recorder.materialise(value, func)
            made.append((tensor, tensor._version, value._is_own))
            return tensor
        return mapped(real, value)

    args, kwargs = real(args), real(kwargs)
    for recorder in recorders:
        recorder.settle((args, kwargs))
    result = func(*args, **kwargs)
    if any(tensor._version != version and not is_own for tensor, version, is_own in made):
        raise NotRecordableError(f"{name_of(func)} writes to a weight of the checkpoint")
    return result


def name_of(func: Any) -> str:
    """What a function of torch is called, for messages."""
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") in {"__get__", "__set__"} and owner is not None:
        return f"{getattr(owner, '__name__', owner)}.{func.__name__}"
    return str(getattr(func, "__name__", func))
