"""diffusers: pipelines, single files and LoRAs from anywhere, straight to a device."""

from __future__ import annotations

from penstock.integrations.diffusers.pipelines import from_pretrained, from_single_file, load_lora_weights

__all__ = ["from_pretrained", "from_single_file", "load_lora_weights"]
