"""A small model with layers of several kinds, and LoRA files for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch


class Net(torch.nn.Module):
    """Layers that a LoRA can be for: linear ones, and convolutions of one and of nine pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 24)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(24, 24, bias=False) for _ in range(3)])
        self.conv = torch.nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.one = torch.nn.Conv2d(6, 4, 1)
        self.norm = torch.nn.LayerNorm(24)

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x), self.one(self.conv(image))


SHAPES = {
    "first": ((4, 16), (24, 4)),
    "blocks.0": ((2, 24), (24, 2)),
    "blocks.2": ((2, 24), (24, 2)),
    "conv": ((3, 3, 3, 3), (6, 3, 1, 1)),
    "one": ((3, 6, 1, 1), (4, 3, 1, 1)),
}
"""Of the matrices for each layer."""


def net(dtype: torch.dtype = torch.float32, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype).eval()


def net_file(path: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    safetensors.torch.save_file(net(dtype, seed).state_dict(), path)
    return path


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, 16, generator=generator).to(dtype), torch.randn(1, 3, 8, 8, generator=generator).to(dtype)


def matrices(seed: int, dtype: torch.dtype = torch.float32, layers: Any = tuple(SHAPES)) -> dict[str, Any]:
    """Down and up by layer."""
    generator = torch.Generator().manual_seed(seed)
    return {
        layer: tuple((torch.randn(shape, generator=generator) * 0.3).to(dtype) for shape in SHAPES[layer])
        for layer in layers
    }


def lora_file(
    path: Path, seed: int = 1, *, prefix: str = "net.", dtype: torch.dtype = torch.float32, layers: Any = tuple(SHAPES)
) -> Path:
    """In diffusers' names, without alpha: the product is not scaled."""
    tensors = {}
    for layer, (down, up) in matrices(seed, dtype, layers).items():
        tensors[f"{prefix}{layer}.lora_A.weight"] = down
        tensors[f"{prefix}{layer}.lora_B.weight"] = up
    safetensors.torch.save_file(tensors, path)
    return path


def peft_directory(path: Path, seed: int = 1, **settings: Any) -> Path:
    """As peft writes it."""
    path.mkdir()
    lora_file(path / "adapter_model.safetensors", seed, prefix="base_model.model.")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(SHAPES), **settings}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def added(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, factor: float) -> torch.Tensor:
    """A weight with a product that was worked out in fp32 added, and rounded once."""
    product = (up.float().flatten(1) @ down.float().flatten(1)).reshape(weight.shape) * factor
    return (weight.to(torch.promote_types(weight.dtype, torch.float32)) + product).to(weight.dtype)
