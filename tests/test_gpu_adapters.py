"""Adapters of a pool on a GPU: ordered after what is queued, exact, quick. Runs where torch finds a GPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from penstock.pool import ModelPool
from pool_adapters import Net, added, inputs, lora_file, matrices, net, net_file
from pool_books import check_books

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
MIB = 1 << 20


def pool_of(tmp_path: Path, dtype: Any) -> ModelPool:
    pool = ModelPool("cuda:0", host_budget=64 * MIB, device_budget=512 * MIB)
    pool.register("m", {"net": net_file(tmp_path / "net.safetensors", dtype)}, build={"net": Net})
    for seed, name in enumerate("ab", start=1):
        pool.load_adapter("m", lora_file(tmp_path / f"{name}.safetensors", seed))
    return pool


def on_gpu(dtype: Any) -> tuple[Any, ...]:
    return tuple(one.cuda() for one in inputs(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_exact_and_undone_to_the_bit(tmp_path: Path, dtype: Any) -> None:
    with pool_of(tmp_path, dtype) as pool:
        for weights in ({"a": 1.0}, {"a": 0.5, "b": -2.0}, {}, {"b": 1.0}):
            pool.set_adapters("m", weights, merge=True)
            expected = {key: value.cuda() for key, value in net(dtype).state_dict().items()}
            for name, weight in weights.items():
                for layer, pair in matrices("ab".index(name) + 1).items():
                    key = f"{layer}.weight"
                    expected[key] = added(expected[key], *(half.cuda() for half in pair), weight)
            with pool.use("m") as model:
                for key, value in model["net"].state_dict().items():
                    if weights:
                        torch.testing.assert_close(value, expected[key])
                    else:
                        assert torch.equal(value, expected[key]), key
            pool.sleep("m")
            check_books(pool)


def test_changes_within_a_lease_come_after_what_is_queued(tmp_path: Path) -> None:
    with pool_of(tmp_path, torch.float32) as pool, torch.no_grad():
        x = on_gpu(torch.float32)
        pool.set_adapters("m", ["a"], merge=True)
        for merge in (True, False):
            with pool.use("m") as model:
                module = model["net"].eval()
                pool.set_adapters("m", ["a"], merge=merge)
                before = module(*x)[0].clone()
                torch.cuda.synchronize()
                # Work that is not done when the adapters change.
                torch.cuda._sleep(200_000_000)
                queued = module(*x)[0]
                pool.set_adapters("m", ["b"], merge=merge)
                after = module(*x)[0]
                assert torch.equal(queued, before)
                assert not torch.equal(after, before)
            check_books(pool)


def test_a_cuda_graph_sees_merged_adapters(tmp_path: Path) -> None:
    with pool_of(tmp_path, torch.float32) as pool, torch.no_grad():
        x = on_gpu(torch.float32)
        with pool.use("m") as model:
            module = model["net"].eval()
            module(*x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = module(*x)[0]
            for name in "ab":
                pool.set_adapters("m", [name], merge=True)
                graph.replay()
                assert torch.equal(out, module(*x)[0])
            del graph
        check_books(pool)


def test_preloaded_branches_change_in_under_a_millisecond(tmp_path: Path) -> None:
    with pool_of(tmp_path, torch.float32) as pool, torch.no_grad():
        x = on_gpu(torch.float32)
        pool.set_adapters("m", {"a": 1, "b": 0})
        with pool.use("m") as model:
            module = model["net"].eval()
            first, seconds = module(*x)[0], []
            for _ in range(50):
                for weights in ({"a": 0, "b": 1}, {"a": 1, "b": 0}):
                    began = time.perf_counter()
                    pool.set_adapters("m", weights)
                    seconds.append(time.perf_counter() - began)
            assert torch.equal(module(*x)[0], first)
            assert sorted(seconds)[len(seconds) // 2] < 1e-3
        check_books(pool)
