"""Loads to one GPU from a thread whose current device is another: what torch takes for current stays what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import penstock
from conftest import Raw, assert_bits, raw_bytes, write_raw

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

OTHER = "cuda:1"


@pytest.fixture(autouse=True)
def first_gpu() -> Iterator[None]:
    """Every test begins on the first GPU and ends there."""
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0
    assert torch.empty(1, device="cuda").device.index == 0


def begin_and_drop(ckpt: penstock.Checkpoint) -> None:
    stream = ckpt.stream(device=OTHER)
    next(stream)
    stream.close()


def cancel(ckpt: penstock.Checkpoint) -> None:
    load, *_ = ckpt._start(None, None, None, OTHER, "pt", None, penstock.LoadOptions())
    load.cancel()
    with pytest.raises(penstock.LoadCancelledError):
        load.collect()


def prefetch(ckpt: penstock.Checkpoint) -> None:
    with ckpt.prefetch():
        pass


CALLS: dict[str, Callable[[penstock.Checkpoint], Any]] = {
    "load": lambda ckpt: ckpt.load(device=OTHER),
    "stream": lambda ckpt: dict(ckpt.stream(device=OTHER)),
    "a stream that is closed": begin_and_drop,
    "load_into": lambda ckpt: ckpt.load_into(
        {name: torch.empty(info.shape, dtype=torch.uint8, device=OTHER) for name, info in ckpt.items()}
    ),
    "prefetch": prefetch,
    "a load that is cancelled": cancel,
    "release_staging": lambda ckpt: (ckpt.load(device=OTHER), penstock.release_staging()),
}


def make(directory: Path) -> tuple[Path, dict[str, Raw]]:
    tensors = {f"t{i}": Raw("U8", (3_000_001,), raw_bytes("U8", (3_000_001,), i)) for i in range(16)}
    return write_raw(directory / "model.safetensors", tensors), tensors


@pytest.mark.parametrize("call", CALLS)
def test_a_call_leaves_the_current_device_of_its_thread_alone(tmp_path: Path, call: str) -> None:
    path, _ = make(tmp_path)
    # From a thread that CUDA has seen, and from one that it has not.
    CALLS[call](penstock.open(path))
    assert torch.cuda.current_device() == 0

    def elsewhere() -> tuple[int, int]:
        CALLS[call](penstock.open(path))
        return torch.cuda.current_device(), torch.empty(1, device="cuda").device.index

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(elsewhere).result() == (0, 0)


def test_a_load_that_fails_leaves_the_current_device_alone(tmp_path: Path) -> None:
    path, _ = make(tmp_path)
    ckpt = penstock.open(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(penstock.LocationChangedError):
        ckpt.load(device=OTHER)
    assert torch.cuda.current_device() == 0
    with pytest.raises(penstock.DeviceError):
        penstock.open(make(tmp_path)[0]).load(device="cuda:99")


def test_a_model_is_built_on_another_gpu_than_the_current_one(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 256), torch.nn.LayerNorm(256))
    penstock.save_file(dict(model.state_dict()), tmp_path / "m.safetensors")
    made = penstock.load_model(
        lambda: torch.nn.Sequential(torch.nn.Linear(512, 256), torch.nn.LayerNorm(256)),
        tmp_path / "m.safetensors",
        device=OTHER,
    )
    assert torch.cuda.current_device() == 0
    for name, parameter in made.state_dict().items():
        assert parameter.device == torch.device(OTHER)
        assert torch.equal(parameter.cpu(), model.state_dict()[name])


def test_bytes_reach_the_gpu_they_are_meant_for_from_threads_on_any(tmp_path: Path) -> None:
    path, tensors = make(tmp_path)

    def load(current: int, target: int) -> tuple[int, dict[str, Any]]:
        torch.cuda.set_device(current)
        loaded = penstock.open(path).load(device=f"cuda:{target}")
        return torch.cuda.current_device(), loaded

    ways = [(current, target) for current in (0, 1) for target in (0, 1)] * 2
    with ThreadPoolExecutor(len(ways)) as pool:
        for (current, target), done in zip(ways, [pool.submit(load, *way) for way in ways], strict=True):
            after, loaded = done.result()
            assert after == current
            assert {tensor.device for tensor in loaded.values()} == {torch.device("cuda", target)}
            assert_bits(loaded, tensors)


def test_memory_that_queued_work_on_the_other_gpu_still_uses_is_not_overwritten(tmp_path: Path) -> None:
    """The fence is recorded on the consumer's stream of the target, not of the current device."""
    count = 16 << 20
    tensors = {"w": Raw("U8", (count,), raw_bytes("U8", (count,)))}
    ckpt = penstock.open(write_raw(tmp_path / "x.safetensors", tensors))
    ckpt.load(device=OTHER)  # the first load pays for the arena and would be too slow to race
    destination = torch.full((count,), 7, dtype=torch.uint8, device=OTHER)
    result = torch.empty_like(destination)
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        torch.cuda._sleep(200_000_000)
        result.copy_(destination)
    ckpt.load_into({"w": destination})
    assert bool((result == 7).all())
    assert_bits({"w": destination}, tensors)
