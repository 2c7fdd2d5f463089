"""The drop-in for the ``safetensors`` package: ``safe_open``, ``load_file``, ``save_file``.

Names, arguments and results are those of safetensors; bytes come the way of Penstock. Loaded tensors own their memory,
unless ``mmap=True`` asks for views. Writing is safetensors' business and delegated to it.

``safe_open`` is one lazy file over a ``TensorSource`` (``penstock.supply``): views of mapped files, or a stream that
reads ahead. ``patch_safetensors`` and the integration for transformers use the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from types import TracebackType
from typing import Any

from penstock._native import LoadOptions, shown
from penstock.arguments import AnyPath, described, is_url, tensor_names
from penstock.checkpoint import Checkpoint, open
from penstock.errors import ConfigError, MissingDependencyError, PenstockError, SafetensorError, SelectionError
from penstock.frameworks.base import framework
from penstock.selection import Selection, is_basic, resolve
from penstock.supply import InOrder, MappedSource, TensorSource
from penstock.tensor_info import TensorInfo


def _check_backend(backend: Any) -> None:
    if backend not in {None, "mmap", "pread"}:
        cause = f"backend={backend!r} is not one of 'mmap' and 'pread'"
        raise ConfigError(f"{cause}. Leave it out: Penstock finds the way to read by itself", cause=cause)


def load_file(
    filename: AnyPath,
    device: Any = "cpu",
    *,
    framework: str = "pt",
    backend: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    trust: Any = None,
) -> dict[str, Any]:
    """Loads all tensors of a safetensors file, as ``safetensors.torch.load_file`` does.

    Args:
        filename: the file, or anything else that ``penstock.open`` takes.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or the number of a GPU.
        framework: ``"pt"`` or ``"np"``.
        backend: ``"mmap"`` or ``"pread"``, as for safetensors, but without effect.
        storage_options, trust: as for ``penstock.open``.

    Raises:
        PenstockError: see ``penstock.open`` and ``Checkpoint.load``.
    """
    _check_backend(backend)
    return open(filename, storage_options=storage_options, trust=trust).load(device=device, framework=framework)


def save_file(
    tensors: dict[str, Any],
    filename: AnyPath,
    metadata: dict[str, str] | None = None,
    *,
    framework: str = "pt",
) -> None:
    """Writes tensors to a safetensors file of this machine, through the ``safetensors`` package.

    Raises:
        ConfigError: for a URL, to which ``penstock.save`` writes; for swapped arguments, and
            another framework than ``"pt"`` and ``"np"``.
        MissingDependencyError: where safetensors is not installed.
    """
    if not isinstance(tensors, Mapping):
        cause = f"save_file takes a dict of tensors, then the filename; given were {described(tensors)} and "
        raise ConfigError(cause=cause + described(filename), remedy="Write save_file(tensors, filename)")
    library = {"pt": "torch", "torch": "torch", "pytorch": "torch", "np": "numpy", "numpy": "numpy"}.get(framework)
    if library is None:
        cause = f"framework={framework!r}: save_file writes tensors of torch ('pt') and arrays of numpy ('np')"
        raise ConfigError(cause=cause, remedy="Convert them first, or use safetensors.flax and others directly")
    if is_url(filename):
        cause = "save_file writes to files of this machine, through the safetensors package"
        remedy = "Use penstock.save, which writes to s3://, gs:// and az:// too"
        raise ConfigError(location=shown(os.fsdecode(filename)), cause=cause, remedy=remedy)
    try:
        save = import_module(f"safetensors.{library}").save_file
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"save_file needs the package {error.name!r}, which is not installed (pip install safetensors)",
            cause=str(error),
            remedy="pip install safetensors",
        ) from error
    save(tensors, os.fspath(filename), metadata)


class Slice:
    """A tensor that is read when it is indexed, and only as far as it is: what ``get_slice`` returns."""

    def __init__(self, file: safe_open, info: TensorInfo) -> None:
        self._file = file
        self._info = info

    def get_shape(self) -> list[int]:
        """The whole tensor's shape."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """The tensor's dtype, as the header spells it: ``"BF16"``."""
        return self._info.dtype

    def __getitem__(self, selection: Selection) -> Any:
        """Reads the selected part: integers, slices with positive steps and an ellipsis. What else torch understands
        (lists, masks, ``None``) is selected from the whole tensor.

        Raises:
            SelectionError: for what lies outside of the tensor, or is not understood.
        """
        return self._file._part(self._info, selection)


class safe_open:  # noqa: N801 - the name people know
    """Opens a safetensors file and reads tensors one by one, as ``safetensors.safe_open`` does.

    A tensor that is asked for alone costs its own bytes. Tensors that are asked for in the order of ``keys`` or of
    ``offset_keys`` are read ahead, at most 256 MiB (or one tensor).

    Args:
        filename: the file, or anything else that ``penstock.open`` takes.
        framework: ``"pt"``, ``"np"``, ``"jax"`` or ``"dlpack"``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or the number of a GPU.
        backend: ``"mmap"`` or ``"pread"``, as for safetensors, but without effect.
        mmap: whether tensors on the CPU are views of a private mapping of a local file, as safetensors' are, which
            costs no copy. By default each tensor owns its memory.
        storage_options, trust: as for ``penstock.open``.
        options: settings, as for ``penstock.open``.

    Raises:
        PenstockError: see ``penstock.open``. FileNotFoundError, ValueError and their like also catch it.
    """

    def __init__(
        self,
        filename: AnyPath,
        framework: str = "pt",
        device: Any = "cpu",
        *,
        backend: Any = None,
        mmap: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        trust: Any = None,
        options: LoadOptions | None = None,
    ) -> None:
        _check_backend(backend)
        library = _framework(framework)
        if not isinstance(device, int) and not str(device).startswith("cuda"):
            library.device(device)
        # Headers can be read where the GPU that tensors are for is not, as with safetensors.
        checkpoint = open(filename, storage_options=storage_options, trust=trust, options=options)
        on_host = str(device) == "cpu" and not any("://" in location for location, _ in checkpoint.files)
        self._checkpoint = checkpoint
        self._source: TensorSource = (
            MappedSource(checkpoint, framework) if mmap and on_host else InOrder(checkpoint, framework, device)
        )
        self._framework = framework
        self._shares = self._closed = False

    @classmethod
    def of_source(cls, checkpoint: Checkpoint, source: TensorSource) -> safe_open:
        """A lazy file of torch tensors that come from ``source``, which the caller closes. For integrations."""
        made = object.__new__(safe_open)
        made._checkpoint, made._source, made._framework = checkpoint, source, "pt"
        made._shares, made._closed = True, False
        return made

    def __enter__(self) -> safe_open:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Tensors that were handed out stay usable, and slices for as long as the file is there."""
        self._closed = True
        if not self._shares:
            self._source.close()

    def keys(self) -> list[str]:
        """Names of the tensors, sorted."""
        return list(self._opened())

    def offset_keys(self) -> list[str]:
        """Names of the tensors, in the order of their bytes."""
        return self._opened().offset_keys()

    def metadata(self) -> dict[str, str] | None:
        """The file's ``__metadata__``, or None."""
        return self._opened().metadata()

    def get_tensor(self, name: str) -> Any:
        """Loads one tensor.

        Raises:
            TensorNotFoundError: where there is none of that name; it suggests the closest.
        """
        return self._source.take(self._opened()[name].name)

    def get_tensors(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Loads several tensors at once, or all."""
        checkpoint = self._opened()
        return self._source.take_all(None if names is None else [checkpoint[name].name for name in tensor_names(names)])

    def get_slice(self, name: str) -> Slice:
        """A tensor of which only the part that is indexed gets read."""
        return Slice(self, self._opened()[name])

    def _opened(self) -> Checkpoint:
        if self._closed:
            raise ConfigError("the file is closed: it was left by `with`")
        return self._checkpoint

    def _part(self, info: TensorInfo, selection: Selection) -> Any:
        if _framework(self._framework).name == "torch" and not is_basic(selection):
            whole = self._source.take(info.name)
            try:
                return whole[selection].contiguous()
            except (IndexError, TypeError, ValueError) as error:
                raise SelectionError(f"tensor {info.name!r}: {error}", tensor=info.name, cause=str(error)) from error
        resolve(info.name, info.shape, selection)
        items = selection if isinstance(selection, tuple) else (selection,)
        if all(item is Ellipsis or item == slice(None) for item in items):
            return self._source.take(info.name)
        return self._source.part(info.name, selection)


_framework = framework

__all__ = ["PenstockError", "SafetensorError", "Slice", "load_file", "safe_open", "save_file"]
