"""Tiny random models for the tests of engines, and what it means that two models are the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Some virtual machines announce instructions (AMX) that they do not let processes use; oneDNN believes them.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

QUIET = [
    pytest_filter
    for category in ("DeprecationWarning", "FutureWarning", "UserWarning", "PendingDeprecationWarning")
    for pytest_filter in [f"ignore::{category}"]
]
"""For ``pytest.mark.filterwarnings``: the libraries' own warnings are not what is tested."""


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same_model(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Same class, mode, names, dtypes, bits, ties, buffers (those in no checkpoint too), and what may be trained."""
    assert type(ours) is type(theirs)
    assert ours.training == theirs.training
    for kind in ("named_parameters", "named_buffers"):
        mine, other = (dict(getattr(model, kind)(remove_duplicate=False)) for model in (ours, theirs))
        assert list(mine) == list(other)
        for name, tensor in mine.items():
            assert (tensor.dtype, tensor.shape, tensor.device) == (
                other[name].dtype,
                other[name].shape,
                other[name].device,
            ), name
            assert bits(tensor) == bits(other[name]), name
            assert tensor.requires_grad == other[name].requires_grad, name
            assert type(tensor) is type(other[name]), name
        assert _ties(mine) == _ties(other)


def _ties(tensors: dict[str, torch.Tensor]) -> set[frozenset[str]]:
    groups: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), set()).add(name)
    return {frozenset(group) for group in groups.values() if len(group) > 1}


def addresses(model: torch.nn.Module) -> set[int]:
    return {p.data_ptr() for p in model.parameters() if p.numel()}


Make = Callable[[], Any]


def randomise(model: torch.nn.Module) -> torch.nn.Module:
    """Gives every parameter and buffer a value that no initialisation would give it."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 0.05)
    return model.eval()


def saved(model: Any, path: Path, **options: Any) -> Path:
    model.save_pretrained(path, **options)
    return path
