"""Lazy tensors that record what a model's loading code does with them, and the plan that is made of it.

``Recorder`` is what engines use: it hands out lazy tensors of a checkpoint and reads, as one load, what was copied of
them and nothing else. It knows torch and no engine. Ranks that read together are in ``penstock.distributed``.
"""

from __future__ import annotations

from penstock.recording.lazy import LazyTensor, NotRecordableError
from penstock.recording.recorder import Recorder
from penstock.recording.statistics import Statistics
from penstock.recording.verifying import VerificationError, copy_state, differing, verify_equal

__all__ = [
    "LazyTensor",
    "NotRecordableError",
    "Recorder",
    "Statistics",
    "VerificationError",
    "copy_state",
    "differing",
    "verify_equal",
]
