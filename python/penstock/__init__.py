"""Penstock brings model weights from where they are stored to where they are computed on.

::

    import penstock

    ckpt = penstock.open("llama-3-8b/")                 # a file, a directory, a list, a glob, a shard index
    weights = ckpt.load(device="cuda:0")                # dict of torch tensors
    for name, tensor in ckpt.stream(device="cuda:0"):   # ready order, bounded memory
        ...

Importing this package imports no framework, starts no thread and changes no environment: what a call needs is
imported by the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock import namesake, variables

namesake.refuse()
variables.warn()

try:
    from penstock._native import LoadOptions, LoadStats, __version__
except ModuleNotFoundError as error:
    from penstock import extension

    raise extension.missing(error) from None
from penstock.errors import (  # noqa: E402
    AdapterError,
    ConfigError,
    DestinationError,
    DeviceError,
    FormatError,
    InsufficientMemoryError,
    IntegrityError,
    LoadCancelledError,
    LocationAccessError,
    LocationChangedError,
    LocationExistsError,
    LocationNotFoundError,
    MissingDependencyError,
    PeerError,
    PenstockError,
    PoolError,
    SafetensorError,
    SelectionError,
    SignatureError,
    StorageError,
    TensorNotFoundError,
)

if TYPE_CHECKING:
    from penstock._native import flush_disk_cache, release_staging
    from penstock.checkpoint import Checkpoint, open
    from penstock.integrations.safetensors.patching import patch_safetensors
    from penstock.manifests import HashedFile, Manifest, manifest
    from penstock.model import load_model
    from penstock.pool import ModelPool, default_pool
    from penstock.pulling import Pulled, PulledFile, pull
    from penstock.safetensors import load_file, safe_open, save_file
    from penstock.saving import Saved, SavedFile, convert, save
    from penstock.state import IncompatibleKeys
    from penstock.tensor_info import TensorInfo
    from penstock.trust import Policy, SignedDirectory, Verified, sign, verify

__all__ = [
    "AdapterError",
    "Checkpoint",
    "ConfigError",
    "DestinationError",
    "DeviceError",
    "FormatError",
    "HashedFile",
    "IncompatibleKeys",
    "InsufficientMemoryError",
    "IntegrityError",
    "LoadCancelledError",
    "LoadOptions",
    "LoadStats",
    "LocationAccessError",
    "LocationChangedError",
    "LocationExistsError",
    "LocationNotFoundError",
    "Manifest",
    "MissingDependencyError",
    "ModelPool",
    "PeerError",
    "PenstockError",
    "Policy",
    "PoolError",
    "Pulled",
    "PulledFile",
    "SafetensorError",
    "Saved",
    "SavedFile",
    "SelectionError",
    "SignatureError",
    "SignedDirectory",
    "StorageError",
    "TensorInfo",
    "TensorNotFoundError",
    "Verified",
    "__version__",
    "convert",
    "default_pool",
    "flush_disk_cache",
    "load_file",
    "load_model",
    "manifest",
    "open",
    "patch_safetensors",
    "pull",
    "release_staging",
    "safe_open",
    "save",
    "save_file",
    "sign",
    "verify",
]

_NAMES_OF = {
    "penstock._native": ("flush_disk_cache", "release_staging"),
    "penstock.checkpoint": ("Checkpoint", "open"),
    "penstock.integrations.safetensors.patching": ("patch_safetensors",),
    "penstock.manifests": ("HashedFile", "Manifest", "manifest"),
    "penstock.model": ("load_model",),
    "penstock.pool": ("ModelPool", "default_pool"),
    "penstock.pulling": ("Pulled", "PulledFile", "pull"),
    "penstock.safetensors": ("load_file", "safe_open", "save_file"),
    "penstock.saving": ("Saved", "SavedFile", "convert", "save"),
    "penstock.state": ("IncompatibleKeys",),
    "penstock.tensor_info": ("TensorInfo",),
    "penstock.trust": ("Policy", "SignedDirectory", "Verified", "sign", "verify"),
}
_HOME = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        import sys

        # With these, Python says what else was meant.
        raise AttributeError(f"module 'penstock' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
