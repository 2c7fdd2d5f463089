"""Saving: tensors to safetensors files, on this machine or in an object store.

* ``layout``: which tensor goes where: shards, headers, the index. Pure.
* ``tensors``: what there is to save: modules, mappings, dtypes, ties, memory that can be written as it is.
* ``writing``: ``penstock.save``. ``converting``: ``penstock.convert``, of files that torch pickled.

The core writes (``crates/penstock/src/save``); nothing here opens a file to write to it.
"""

from penstock.saving.converting import convert
from penstock.saving.writing import Saved, SavedFile, save

__all__ = ["Saved", "SavedFile", "convert", "save"]
