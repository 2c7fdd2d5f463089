"""diffusers: pipelines and models from anywhere, straight to a device."""

from __future__ import annotations

from penstock.integrations.diffusers.pipelines import from_pretrained

__all__ = ["from_pretrained"]
