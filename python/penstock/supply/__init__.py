"""Sources of tensors that are asked for one at a time: mapped files, and streams that read ahead of their consumer."""

from __future__ import annotations

from penstock.supply.in_order import InOrder
from penstock.supply.mapped import MappedSource
from penstock.supply.source import TensorSource
from penstock.supply.streamed import Supply

__all__ = ["InOrder", "MappedSource", "Supply", "TensorSource"]
