"""Recorders that wait for each other: who uses memory that any of them still has to fill makes that be read first.

It knows recorders by what they have to fill, and nothing of what they read. After a fork it has each begin anew.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from penstock.recording import watching
from penstock.recording.lazy import LazyTensor, unwatched
from penstock.recording.places import storage_address

if TYPE_CHECKING:
    from penstock.recording.recorder import Recorder

ACTIVE: set[Recorder] = set()
"""The recorders that are entered, of all threads."""


def others_than(recorder: Recorder) -> list[Recorder]:
    """The other recorders that are entered."""
    return [other for other in list(ACTIVE) if other is not recorder]


def flush_overlapping(value: Any, recorders: Sequence[Recorder]) -> None:
    """Has recorders flush if a tensor in ``value`` shares memory with what they still have to fill."""
    recorders = [recorder for recorder in recorders if recorder.has_to_fill()]
    if not recorders:
        return
    if isinstance(value, torch.Tensor):
        if not isinstance(value, LazyTensor):
            with unwatched():
                memory = storage_address(value)
                for recorder in recorders:
                    if recorder.is_to_fill(memory) or is_hidden(value, memory):
                        recorder.flush_for(value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            flush_overlapping(item, recorders)
    elif isinstance(value, Mapping):
        for item in value.values():
            flush_overlapping(item, recorders)


def is_hidden(tensor: torch.Tensor, memory: int) -> bool:
    """Whether torch does not say where a tensor's elements are."""
    return memory == 0 and tensor.numel() > 0 and not tensor.is_meta


def _in_child() -> None:
    watching.after_fork()
    for recorder in list(ACTIVE):
        recorder.after_fork()


os.register_at_fork(after_in_child=_in_child)
