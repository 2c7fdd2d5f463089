"""Small models of one matrix, whose pages can be counted, and pools of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from penstock.pool import ModelPool

WIDTH = 256
NBYTES = 4 * WIDTH**2
"""Of a model: 64 pages."""


def layer() -> torch.nn.Module:
    return torch.nn.Linear(WIDTH, WIDTH, bias=False)


def write_files(root: Path) -> list[Path]:
    """One for each of four models."""
    for number in range(4):
        value = torch.full((WIDTH, WIDTH), float(number)) + torch.arange(WIDTH)
        safetensors.torch.save_file({"weight": value}, root / f"{number}.safetensors")
    return sorted(root.iterdir())


def pool_of(files: list[Path], models: float = 2, host: float = 8, **settings: Any) -> ModelPool:
    """With room for so many models."""
    pool = ModelPool("cpu", host_budget=int(host * NBYTES), device_budget=int(models * NBYTES), **settings)
    for number, file in enumerate(files):
        pool.register(f"m{number}", {"net": file}, build={"net": layer})
    return pool


def use(pool: ModelPool, number: int) -> None:
    """Leases a model, and checks two of its rows."""
    with pool.use(f"m{number}") as lease:
        for row in (1, -1):
            assert torch.equal(lease["net"].weight[row], torch.arange(WIDTH) + float(number))
