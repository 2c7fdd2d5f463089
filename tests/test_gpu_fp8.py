"""Float8 weights on a GPU: the same bits as on the CPU, half the bytes over the link, and FP8 multiplication."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

import penstock
from penstock.errors import DeviceError
from penstock.fp8 import Fp8, convert, layers, numbers
from pool_books import check_books

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
BOTH = pytest.mark.parametrize("scales", ["row", "tensor"])
needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="the GPU has no FP8"
)
WIDTH = 1024


def net(depth: int = 2, width: int = WIDTH) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {name: tensor.bfloat16() for name, tensor in net().state_dict().items()}
    tensors["0.weight"][3, 3] = float("inf")
    tensors["1.weight"][5] = 0
    safetensors_torch.save_file(tensors, tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_rounds_to_the_same_bits_as_the_cpu(scales: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # All bits that there are, and some that are usual.
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).view(64, -1)
    for weight in (every, torch.randn(3000, 700).to(dtype), torch.randn(1, 1).to(dtype)):
        found = []
        for device in ("cpu", "cuda"):
            stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=device)
            scale = torch.empty(numbers.shape_of_scale(weight.shape[0], scales), device=device)
            error = numbers.quantise(weight.to(device), stored, scale)
            found.append((stored.cpu(), scale.cpu(), error))
        (ours, of_ours, error), (theirs, of_theirs, other) = found
        nan = ours.isnan()
        assert torch.equal(nan, theirs.isnan())
        assert torch.equal(ours.view(torch.uint8)[~nan], theirs.view(torch.uint8)[~nan])
        assert torch.equal(of_ours, of_theirs)
        assert error == (other.largest, pytest.approx(other.relative, rel=1e-6), other.not_finite)


@pytest.mark.parametrize("to", ["host", "device"])
def test_a_pool_has_the_same_weights_wherever_it_converts_them(file: Path, to: str) -> None:
    with penstock.ModelPool("cpu", host_budget="1GiB", device_budget="1GiB") as pool:
        pool.register("a", {"net": file}, build={"net": net}, quantize="fp8")
        with pool.use("a") as lease:
            expected = {name: tensor.clone() for name, tensor in lease["net"].state_dict().items()}
    with penstock.ModelPool("cuda", host_budget="1GiB", device_budget="1GiB") as pool:
        pool.register("a", {"net": file}, build={"net": net}, quantize="fp8")
        pool.prefetch("a", to=to).result()
        with pool.use("a") as lease:
            state = lease["net"].state_dict()
            for name, tensor in expected.items():
                assert state[name].is_cuda
                assert torch.equal(state[name].cpu().view(torch.uint8), tensor.view(torch.uint8)), name
            assert lease["net"][0].computes == layers.computes_fp8(torch.device("cuda"))
        pool.sleep("a")
        assert pool.stats().host_bytes < 0.52 * file.stat().st_size
        check_books(pool)


@needs_fp8
@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 77, 4096])
def test_multiplying_in_fp8_is_near_multiplying_by_the_dequantised_weight(
    scales: str, dtype: torch.dtype, tokens: int
) -> None:
    torch.manual_seed(0)
    layer, x = net(1).to("cuda", dtype)[0], torch.randn(tokens, WIDTH, device="cuda", dtype=dtype)
    convert(layer, Fp8(scales))
    with torch.inference_mode():
        expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
        off = (layer(x) - expected).float().norm() / expected.float().norm()
    if dtype is torch.float16 and scales == "row":
        assert off == 0, "these are stored so only"
    else:
        assert 0 < off < 0.05


@needs_fp8
@BOTH
def test_a_cuda_graph_of_a_layer_computes_the_same(scales: str) -> None:
    layer, x = net(1).to("cuda", torch.bfloat16)[0], torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16)
    convert(layer, Fp8(scales))
    with torch.inference_mode():
        expected = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layer(x)
        graph.replay()
        assert torch.equal(found, expected)


def test_a_gpu_without_fp8_stores_it_and_refuses_to_compute_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with penstock.ModelPool("cuda", host_budget="1GiB", device_budget="1GiB") as pool:
        with pytest.raises(DeviceError, match="does not multiply in FP8"):
            pool.register("a", {"net": file}, build={"net": net}, quantize=Fp8(compute="fp8"))
        pool.register("a", {"net": file}, build={"net": net}, quantize="fp8")
        with pool.use("a") as lease:
            assert not lease["net"][0].computes
        check_books(pool)


@pytest.mark.slow
def test_what_half_the_bytes_save(tmp_path: Path) -> None:
    """Prints the seconds of a switch, and of layers, beside bfloat16."""
    depth, width, tokens = 24, 8192, 4096
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in net(depth, width).state_dict().items()}
    safetensors_torch.save_file(tensors, tmp_path / "net.safetensors")
    del tensors
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    settings = {"bfloat16": None, "fp8": "fp8", "fp8-tensor": Fp8("tensor"), "stored only": Fp8(compute="weights")}
    nbytes, seconds = {}, {}
    with penstock.ModelPool("cuda", host_budget="16GiB", device_budget="16GiB") as pool, torch.inference_mode():
        for name, quantize in settings.items():
            pool.register(
                name, {"net": tmp_path / "net.safetensors"}, build={"net": lambda: net(depth, width)}, quantize=quantize
            )
            pool.prefetch(name, to="host").result()
            nbytes[name] = pool.explain(name).components[0].nbytes
            took = []
            for _ in range(3):
                pool.sleep(name)
                began = time.perf_counter()
                pool.switch(name)
                took.append(time.perf_counter() - began)
            with pool.use(name) as lease:
                layers_of = lease["net"]
                layers_of(x)
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(5):
                    layers_of(x)
                torch.cuda.synchronize()
            seconds[name] = min(took)
            layers_took = (time.perf_counter() - began) / 5
            sys.stdout.write(f"{name}: {nbytes[name] / 1e9:.2f} GB, switch {min(took):.4f} s, {layers_took:.4f} s\n")
            pool.sleep(name, level=2)
    assert nbytes["fp8"] < 0.51 * nbytes["bfloat16"]
    assert seconds["fp8"] < 0.55 * seconds["bfloat16"]
