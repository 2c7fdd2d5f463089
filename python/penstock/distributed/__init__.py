"""Ranks that read together what several of them want, so that the storage is read once.

``Sharing`` is given to a ``Recorder``: what the ranks recorded is read as one plan. They talk over a
``torch.distributed`` group that the engine has made.
"""

from __future__ import annotations

from penstock.distributed.peers import Peers
from penstock.distributed.sharing import Sharing

__all__ = ["Peers", "Sharing"]
