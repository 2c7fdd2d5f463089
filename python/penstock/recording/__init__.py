"""Lazy tensors that record what a model's loading code does with them, and the plan that is made of it.

``Recorder`` is what engines use: it hands out lazy tensors of a checkpoint and reads, as one load, what was copied of
them and nothing else. Given ``Sharing``, the ranks of a model read together what several of them want. ``Relay`` has
them read whole tensors together, for code that is not recorded. It knows torch and no engine.
"""

from __future__ import annotations

from penstock.recording.lazy import LazyTensor, NotRecordableError
from penstock.recording.peers import Peers
from penstock.recording.recorder import Recorder
from penstock.recording.relay import Relay, Source
from penstock.recording.sharing import Sharing
from penstock.recording.statistics import Statistics
from penstock.recording.verifying import VerificationError, copy_state, differing, verify_equal

__all__ = [
    "LazyTensor",
    "NotRecordableError",
    "Peers",
    "Recorder",
    "Relay",
    "Sharing",
    "Source",
    "Statistics",
    "VerificationError",
    "copy_state",
    "differing",
    "verify_equal",
]
