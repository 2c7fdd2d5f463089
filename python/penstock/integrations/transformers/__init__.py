"""transformers: ``from_pretrained`` from anywhere, straight to a device."""

from __future__ import annotations

from penstock.integrations.transformers.models import from_pretrained

__all__ = ["from_pretrained"]
