"""Sources of tensors that are asked for one at a time: mapped files, and streams that read ahead of their consumer."""

from __future__ import annotations

from penstock.supply.in_order import InOrder
from penstock.supply.mapped import Mapped
from penstock.supply.source import Source
from penstock.supply.streamed import Supply

__all__ = ["InOrder", "Mapped", "Source", "Supply"]
