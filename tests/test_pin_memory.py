"""``load(pin_memory=True)``: a state dict in pinned memory, for programs that copy to a GPU by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

import penstock
from penstock.frameworks import torch as framework


@pytest.fixture
def file(tmp_path: Path) -> Path:
    state = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7, dtype=torch.bfloat16),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(3),
        "flag": torch.tensor([True, False, True]),
    }
    safetensors_torch.save_file(state, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_as_torch_does(file: Path) -> None:
    with pytest.raises(penstock.DeviceError):
        penstock.open(file).load(pin_memory=True)


@pytest.mark.parametrize(
    "arguments", [{"slices": {"a": (0,)}}, {"mmap": True}, {"framework": "np"}, {"device": "cuda"}]
)
def test_what_it_does_not_go_with(file: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(penstock.ConfigError, match="pin_memory"):
        penstock.open(file).load(pin_memory=True, **arguments)


class Pageable:
    """What stands for pinned memory on a machine without a GPU: the places of tensors are what is tested there."""

    asked = 0

    @staticmethod
    def pinned(nbytes: int, ordinal: int) -> tuple[torch.Tensor, None]:
        Pageable.asked = nbytes
        return torch.empty(nbytes, dtype=torch.uint8), None


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_tensors_lie_in_one_allocation(file: Path, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framework, "HostArray", Pageable)
    monkeypatch.setattr(framework.Torch, "device", lambda self, device: "cuda:0" if device == "cuda" else "cpu")
    loaded = penstock.open(file).load(pin_memory=True, dtype=dtype)
    check(loaded, penstock.open(file).load(dtype=dtype))
    assert Pageable.asked == 4 * 64
    assert list(penstock.open(file).load(["b"], pin_memory=True)) == ["b"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_they_are_pinned_and_right(file: Path) -> None:
    loaded = penstock.open(file).load(pin_memory=True)
    check(loaded, penstock.open(file).load())
    assert loaded["a"].is_pinned()
    assert torch.equal(loaded["a"].to("cuda", non_blocking=True).cpu(), loaded["a"])


def check(loaded: dict[str, Any], expected: dict[str, Any]) -> None:
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values() if tensor.numel()}) == 1
