"""peft: adapters from anywhere, straight to their model's device."""

from __future__ import annotations

from penstock.integrations.peft.adapters import from_pretrained, load_adapter

__all__ = ["from_pretrained", "load_adapter"]
