"""The way to a GPU: bit-exact, safe on any stream, nothing left behind. Runs where torch finds a CUDA device."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

import penstock
from conftest import BITS, Raw, Remains, assert_bits, drop_cache, raw_bytes, write_raw

torch = pytest.importorskip("torch")
from penstock.frameworks.streams import as_here
from penstock.supply.streamed import Supply, one_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("dtype", sorted(set(BITS) - {"F6_E2M3", "F6_E3M2"}))
def test_every_dtype_reaches_the_gpu_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    shapes = {"a": (64, 130), "b": (3, 5, 2), "c": (1, 2_000_000), "empty": (4, 0)}
    tensors = {
        name: Raw(dtype, shape, raw_bytes(dtype, shape, seed)) for seed, (name, shape) in enumerate(shapes.items())
    }
    path = write_raw(tmp_path / "x.safetensors", tensors)
    for readers, block_bytes in itertools.product([1, 8], [4096, 2 << 20]):
        loaded = penstock.open(path, options=penstock.LoadOptions(readers=readers, block_bytes=block_bytes)).load(
            device="cuda"
        )
        assert all(tensor.is_cuda for tensor in loaded.values())
        assert_bits(loaded, tensors)


@pytest.mark.parametrize("readers", [1, 64])
def test_tensors_are_made_before_the_load_or_while_it_goes_and_hold_the_same(tmp_path: Path, readers: int) -> None:
    """64 readers leave no core to whoever makes tensors; 1 does."""
    tensors = {
        f"t{index}": Raw("BF16", (16 << 20,), raw_bytes("BF16", (16 << 20,), index))
        for index in range(20)  # more bytes than are made ahead
    }
    path = write_raw(tmp_path / "x.safetensors", tensors)
    torch.cuda.empty_cache()
    loaded = penstock.open(path, options=penstock.LoadOptions(readers=readers)).load(device="cuda")
    assert_bits(loaded, tensors)


@pytest.mark.parametrize("elements", [1, 100, 8192])
def test_a_block_of_thousands_of_tensors_reaches_each_of_them(tmp_path: Path, elements: int) -> None:
    tensors = {
        f"t{index}": Raw("BF16", (elements,), raw_bytes("BF16", (elements,), index))
        for index in range(20_000 if elements < 8192 else 2_000)
    }
    path = write_raw(tmp_path / "many.safetensors", tensors)
    assert_bits(penstock.open(path).load(device="cuda"), tensors)


@pytest.mark.parametrize("cache", ["auto", "use", "bypass"])
@pytest.mark.parametrize("state", ["cold", "warm"])
def test_the_state_of_the_cache_makes_no_difference(mixed, cache: str, state: str) -> None:
    path, tensors = mixed
    if state == "cold":
        drop_cache(path)
    assert_bits(penstock.open(path, options=penstock.LoadOptions(cache=cache)).load(device="cuda:0"), tensors)


def test_streamed_tensors_are_kept_whatever_comes_after_them(mixed) -> None:
    path, tensors = mixed
    config = penstock.LoadOptions(window_bytes=100_000, block_bytes=65_536)
    kept = dict(penstock.open(path, options=config).stream(device="cuda"))
    assert_bits(kept, tensors)


def test_slices_conversion_and_load_into_work_on_the_gpu(mixed) -> None:
    path, tensors = mixed
    ckpt = penstock.open(path)
    whole = ckpt.load(device="cuda")
    part = ckpt.load(["large"], slices={"large": (slice(3, 700, 2), slice(10, 1200))}, device="cuda")["large"]
    assert torch.equal(part.view(torch.int32), whole["large"][3:700:2, 10:1200].contiguous().view(torch.int32))
    assert ckpt.load(["layer.0.BF16"], dtype=torch.float32, device="cuda")["layer.0.BF16"].dtype == torch.float32
    destinations = {
        name: torch.zeros_like(tensor, device="cpu" if "F64" in name else "cuda") for name, tensor in whole.items()
    }
    ckpt.load_into(destinations)
    assert_bits(destinations, tensors)


def test_memory_that_queued_work_still_uses_is_not_overwritten(tmp_path: Path) -> None:
    """torch's allocator hands out memory that kernels queued earlier on the stream may still be reading."""
    count = 16 << 20
    tensors = {"w": Raw("F32", (count,), raw_bytes("F32", (count,)))}
    ckpt = penstock.open(write_raw(tmp_path / "x.safetensors", tensors))
    ckpt.load(device="cuda")  # the first load pays for the arena and would be too slow to race
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            old = torch.full((count,), 7.0, device="cuda")
            result = torch.empty_like(old)
            torch.cuda.synchronize()
            torch.cuda._sleep(200_000_000)  # about 0.1 s: the copy below is still to come when `old` is given back
            result.copy_(old)
            address = old.data_ptr()
            del old
            loaded = ckpt.load(device="cuda")["w"]
            assert loaded.data_ptr() == address, "the allocator did not reuse the memory: the test proves nothing"
            assert bool((result == 7.0).all())
            assert_bits({"w": loaded}, tensors)


def test_a_consumer_on_a_stream_of_its_own_sees_the_bytes(mixed) -> None:
    path, tensors = mixed
    with torch.cuda.stream(torch.cuda.Stream()):
        copies = {name: tensor.clone() for name, tensor in penstock.open(path).stream(device="cuda")}
    torch.cuda.synchronize()
    assert_bits(copies, tensors)


def test_nothing_but_the_arena_remains_and_it_is_reused_and_given_back(mixed) -> None:
    path, tensors = mixed
    ckpt = penstock.open(path)
    ckpt.load(device="cuda")
    before, staging = Remains.now(), penstock._native.staging_usage()
    used = torch.cuda.memory_allocated()
    for _ in range(5):
        stream = ckpt.stream(device="cuda")
        next(stream)
        stream.close()
    del stream
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        for _ in ckpt.stream(device="cuda"):
            1 / 0  # noqa: B018
    gc.collect()
    assert_bits(ckpt.load(device="cuda"), tensors)
    assert Remains.now() == before
    assert torch.cuda.memory_allocated() == used
    assert penstock._native.staging_usage()[0] >= staging[0] > 0
    assert penstock.release_staging() > 0
    assert penstock._native.staging_usage() == (0, 0, 0)
    assert_bits(ckpt.load(device="cuda"), tensors)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_touch_its_parent_s_staging_memory(mixed) -> None:
    path, tensors = mixed
    ckpt = penstock.open(path)
    ckpt.load(device="cuda")
    stream = ckpt.stream(device="cuda")
    first = dict([next(stream)])
    before = penstock._native.staging_usage()
    child = os.fork()
    if child == 0:
        clean = penstock._native.staging_usage() == (0, 0, 0) and penstock.release_staging() == 0
        os._exit(0 if clean else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert penstock._native.staging_usage()[0] >= before[0] > 0
    assert_bits(first | dict(stream), tensors)
    assert_bits(ckpt.load(device="cuda"), tensors)


def test_a_paused_stream_does_not_starve_another_load(mixed) -> None:
    path, tensors = mixed
    config = penstock.LoadOptions(staging_bytes=1 << 20, block_bytes=65_536, window_bytes=100_000)
    ckpt = penstock.open(path, options=config)
    paused = ckpt.stream(device="cuda")
    first = dict([next(paused)])
    assert_bits(ckpt.load(device="cuda"), tensors)
    assert_bits(first | dict(paused), tensors)


def test_a_file_that_ends_early_gives_the_gpu_memory_back(tmp_path: Path) -> None:
    tensors = {str(i): Raw("U8", (4 << 20,), raw_bytes("U8", (4 << 20,), i)) for i in range(8)}
    path = write_raw(tmp_path / "x.safetensors", tensors)
    ckpt = penstock.open(path)
    ckpt.load(device="cuda")
    used, before = torch.cuda.memory_allocated(), Remains.now()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(penstock.LocationChangedError):
        ckpt.load(device="cuda")
    gc.collect()
    assert (torch.cuda.memory_allocated(), Remains.now()) == (used, before)


def test_a_gpu_that_runs_out_of_memory_half_way_gives_back_all_that_the_load_had(tmp_path: Path) -> None:
    mib = 1 << 20
    tensors = {f"w{i}": Raw("U8", (16 * mib,), raw_bytes("U8", (16 * mib,), i)) for i in range(32)}
    ckpt = penstock.open(write_raw(tmp_path / "x.safetensors", tensors))
    ckpt.load(device="cuda")  # what the first load brings with it: the context, streams, staging memory
    gc.collect()
    torch.cuda.empty_cache()
    used, before = torch.cuda.memory_allocated(), Remains.now()
    # Room for half of it, whatever torch keeps of other tests.
    ballast = [torch.empty(torch.cuda.mem_get_info()[0] // mib * mib - 512 * mib, dtype=torch.uint8, device="cuda")]
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            ballast.append(torch.empty(16 * mib, dtype=torch.uint8, device="cuda"))
    del ballast[-16:]
    held = torch.cuda.memory_allocated()
    for load in (lambda: ckpt.load(device="cuda"), lambda: dict(ckpt.stream(device="cuda"))):
        with pytest.raises(torch.OutOfMemoryError) as raised:
            load()
        del raised
        gc.collect()
        assert torch.cuda.memory_allocated() == held
        assert Remains.now() == before
    some = [f"w{i}" for i in range(4)]
    assert_bits(ckpt.load(some, device="cuda"), {name: tensors[name] for name in some})
    del ballast
    torch.cuda.empty_cache()
    assert_bits(ckpt.load(device="cuda"), tensors)
    gc.collect()
    assert (torch.cuda.memory_allocated(), Remains.now()) == (used, before)


def test_pinning_under_a_limit_of_locked_memory_is_done_or_noted(mixed) -> None:
    """Whether the driver heeds RLIMIT_MEMLOCK depends on it and on privileges; the bytes are right anyway."""
    path, tensors = mixed
    penstock.release_staging()
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, hard))
    try:
        ckpt = penstock.open(path)
        assert_bits(ckpt.load(device="cuda"), tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    assert ckpt.stats is not None
    assert ckpt.stats.pinned != any("not pinned" in note for note in ckpt.stats.notes)
    assert_bits(ckpt.load(device="cuda"), tensors)
    assert ckpt.stats.pinned, "the next load tries again"


def test_a_gpu_that_is_not_there_is_named(mixed) -> None:
    path, _ = mixed
    with pytest.raises(penstock.DeviceError, match="cuda:99"):
        penstock.open(path).load(device="cuda:99")


def test_models_are_built_on_the_gpu_without_initialisation(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 256), torch.nn.LayerNorm(256))
    penstock.save_file(dict(model.state_dict()), tmp_path / "m.safetensors")
    made = penstock.load_model(
        lambda: torch.nn.Sequential(torch.nn.Linear(512, 256), torch.nn.LayerNorm(256)),
        tmp_path / "m.safetensors",
        "cuda",
    )
    assert all(
        torch.equal(a.cpu(), b) for a, b in zip(made.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert made(torch.ones(1, 512, device="cuda")).shape == (1, 256)


RECORDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": lambda w: -torch.exp(w.float()),
    "log": lambda w: w.float().abs().log(),
    "/": lambda w: w.float() / 3,
    "of bfloat16": lambda w: w / 3,
    "divide": lambda w: w.float().divide(3),
    "true_divide": lambda w: torch.true_divide(w.float(), 3),
    "by itself": lambda w: torch.div(w.float(), 1 + w.float().abs()),
    "sqrt": lambda w: w.float().abs().sqrt(),
    "reciprocal": lambda w: w.float().reciprocal(),
    "norm": lambda w: 1 + w,
}
EAGER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "div_": lambda w: w.float().div_(3),
    "softplus": lambda w: torch.nn.functional.softplus(w.float()),
    "pow": lambda w: w.float().abs() ** 0.3,
    "rsqrt": lambda w: w.float().abs().rsqrt(),
    "mean": lambda w: w.float() - w.float().mean(),
}


def decays_of(tmp_path: Path) -> tuple[torch.Tensor, penstock.Checkpoint]:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    decays = torch.randn(100_000, dtype=torch.bfloat16)
    save_file({"a": decays}, tmp_path / "x.safetensors")
    return decays, penstock.open(tmp_path / "x.safetensors")


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_what_is_worked_out_of_a_weight_has_the_bytes_of_where_the_weight_says_it_is(
    tmp_path: Path, device: str
) -> None:
    from penstock.recording import Recorder

    decays, checkpoint = decays_of(tmp_path)
    for functions, is_recorded in ((RECORDED, True), (EAGER, False)):
        places = {name: torch.zeros(100_000, device="cuda") for name in functions}
        with Recorder(device) as recorder:
            for _, weight in recorder.weights(checkpoint):
                for name, function in functions.items():
                    places[name].copy_(function(weight))
        assert (recorder.statistics.eager == {}) is is_recorded
        for name, place in places.items():
            assert torch.equal(place, functions[name](decays.to(device)).float().cuda()), name


@pytest.mark.parametrize("why_eager", [None, "record is False"])
def test_an_engines_model_has_the_bytes_that_its_own_loader_gives(tmp_path: Path, why_eager: str | None) -> None:
    from penstock.integrations.shared.filling import Pairs, Weights, fill, verify
    from penstock.recording import Recorder

    decays, checkpoint = decays_of(tmp_path)
    functions = RECORDED | EAGER

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number in range(len(functions)):
                self.register_buffer(f"b{number}", torch.zeros(100_000, device="cuda"))

        def load_weights(self, pairs: Pairs) -> None:
            for _, weight in pairs:
                for place, function in zip(self.buffers(), functions.values(), strict=True):
                    place.copy_(function(weight))

    def recorder(sharing: object) -> Recorder:
        assert sharing is None
        return Recorder("cpu", keep="eager", shared_on="cuda:0")

    stock, model, reference = Model(), Model(), Model()
    stock.load_weights(iter([("a", decays)]))
    offered = [Weights(checkpoint, ["a"], "")]
    fill(model.load_weights, offered, recorder, why_eager=why_eager)
    log = logging.getLogger(__name__)
    verify(reference.load_weights, offered, recorder, model=model, reference=reference, logger=log)
    for name, one, other in zip(functions, model.buffers(), stock.buffers(), strict=True):
        assert torch.equal(one, other), name


def test_helper_threads_work_on_the_streams_of_who_asked() -> None:
    streams = [torch.cuda.Stream(device) for device in range(torch.cuda.device_count())]
    current = torch.cuda.current_device()
    with ExitStack() as entered:
        for stream in reversed(streams):
            entered.enter_context(torch.cuda.stream(stream))
        work = as_here(
            lambda: ([torch.cuda.current_stream(stream.device) for stream in streams], torch.cuda.current_device())
        )
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == (streams, 0)
    assert torch.cuda.current_device() == current


def test_what_an_engines_helper_brings_belongs_to_the_stream_of_who_asked(tmp_path: Path) -> None:
    """Memory that is freed goes back to the pool of its stream: that of another could give it away early."""
    path = write_raw(tmp_path / "x.safetensors", {"a": Raw("F32", (1 << 20,), raw_bytes("F32", (1 << 20,)))})
    checkpoint = penstock.open(path)
    torch.cuda.empty_cache()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        supply = Supply(checkpoint, one_group(checkpoint), "cuda")
        supply.begin()
        tensor = supply.take("a")
        supply.close()
    segments = torch.cuda.memory_snapshot()
    owners = {block["address"]: segment["stream"] for segment in segments for block in segment["blocks"]}
    assert owners[tensor.data_ptr()] == stream.cuda_stream
