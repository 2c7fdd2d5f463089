"""safetensors: Penstock under the functions that libraries call already."""

from __future__ import annotations

from penstock.integrations.safetensors.patching import patch_safetensors

__all__ = ["patch_safetensors"]
