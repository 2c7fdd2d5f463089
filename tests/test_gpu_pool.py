"""Places of components on a GPU: addresses that stay, memory that comes and goes. Runs where torch finds a GPU."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import penstock
from penstock.errors import DeviceError, InsufficientMemoryError
from penstock.pool import ModelPool
from penstock.pool.device_slab import PlainSlab, StableSlab
from penstock.pool.layout import layout_of
from penstock.pool.memory import Memory

MIB = 1 << 20
CHUNK = 256 * MIB
GRANULE = 2 * MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory("cuda:0")
    assert made.virtual is not None, "the GPU has no virtual memory management: nothing here is tested"
    yield made
    torch.cuda.synchronize()


def usage(memory: Memory) -> tuple[int, int, int]:
    """Bytes reserved, mapped, kept."""
    assert memory.virtual is not None
    return memory.virtual.usage()


def master_of(memory: Memory, nbytes: int, seed: int) -> torch.Tensor:
    """Random bytes in pinned memory."""
    master = memory.host_slab(nbytes)
    generator = torch.Generator("cuda").manual_seed(seed)
    made = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda", generator=generator)
    for start in range(0, nbytes, 1 << 30):  # what is registered as one
        master[start : start + (1 << 30)].copy_(made[start : start + (1 << 30)])
    return master


class Resident:
    """A module whose tensors are views of its place on the device while it is there, else of its master."""

    def __init__(self, memory: Memory, module: torch.nn.Module) -> None:
        self.module = module.requires_grad_(False)
        self.memory = memory
        named = [*module.named_parameters(), *module.named_buffers()]
        self.tensors = [tensor for _, tensor in named]
        self.layout = layout_of(named)
        self.master = memory.host_slab(self.layout.nbytes)
        for tensor, view in zip(self.tensors, self.layout.views(self.master), strict=True):
            view.copy_(tensor)
        self.slab = memory.slab(self.layout.nbytes)
        self.bind(self.master)

    def bind(self, slab: torch.Tensor) -> None:
        for tensor, view in zip(self.tensors, self.layout.views(slab), strict=True):
            tensor.data = view

    def come(self) -> None:
        self.slab.fill(self.master)
        self.bind(self.slab.tensor)

    def go(self) -> None:
        self.bind(self.master)
        self.slab.evict([self.memory.now()])


def network(seed: int, width: int = 1024, depth: int = 4) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(depth)]
    return torch.nn.Sequential(*layers, torch.nn.LayerNorm(width)).to(torch.float16)


def test_addresses_stay_over_an_eviction_another_component_and_a_return(memory: Memory) -> None:
    one, other = memory.slab(3 * CHUNK + 5), memory.slab(3 * CHUNK + 5)
    assert isinstance(one, StableSlab)
    masters = [master_of(memory, 3 * CHUNK + 5, seed) for seed in range(2)]
    addresses = []
    for _ in range(3):
        for slab, master in zip((one, other), masters, strict=True):
            assert slab.fill(master) == master.numel()
            addresses.append(slab.tensor.data_ptr())
            assert torch.equal(slab.tensor, master.cuda())
            assert slab.evict([memory.now()]) == 3 * CHUNK + GRANULE
    assert addresses == addresses[:2] * 3
    assert addresses[0] != addresses[1]
    # The same physical memory served both.
    assert usage(memory)[1:] == (0, 3 * CHUNK + GRANULE)


def test_a_graph_replays_to_the_bit_after_another_model_was_there(memory: Memory) -> None:
    one, other = Resident(memory, network(1)), Resident(memory, network(2))
    x = torch.randn(8, 1024, dtype=torch.float16, device="cuda")
    one.come()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            one.module(x)
    torch.cuda.current_stream().wait_stream(side)
    graph, copied = torch.cuda.CUDAGraph(), torch.empty(1024, dtype=torch.float16, device="cuda")
    with torch.cuda.graph(graph), torch.no_grad():
        answer = one.module(x)
        copied.copy_(one.module[0][0].bias)  # by a copy, not a kernel
    graph.replay()
    expected = answer.clone(), copied.clone()
    for _ in range(3):
        one.go()
        other.come()
        with torch.no_grad():
            assert not torch.equal(other.module(x), expected[0])
        other.go()
        one.come()
        answer.zero_()
        copied.zero_()
        graph.replay()
        assert torch.equal(answer, expected[0])
        assert torch.equal(copied, expected[1])
        with torch.no_grad():
            assert torch.equal(one.module(x), expected[0]), "without the graph"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what its compiler imports
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # and of a graph of its own
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="no C compiler")
def test_a_compiled_module_survives_without_being_compiled_again(memory: Memory, mode: str) -> None:
    pytest.importorskip("triton")
    import torch._dynamo

    torch._dynamo.reset()
    one, other = Resident(memory, network(1, depth=2)), Resident(memory, network(2, depth=2))
    x = torch.randn(8, 1024, dtype=torch.float16, device="cuda")
    one.come()
    compiled = torch.compile(one.module, mode=mode)
    with torch.no_grad():
        for _ in range(4):  # warm-up, recording, replay
            torch.compiler.cudagraph_mark_step_begin()
            expected = compiled(x).clone()
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            one.go()
            other.come()
            other.go()
            one.come()
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(x), expected)
    torch._dynamo.reset()


def test_torch_can_have_what_was_evicted_and_trimmed(memory: Memory) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    slab = memory.slab(free // 2)
    slab.map()
    wanted = free // 4 * 3
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(wanted, dtype=torch.uint8, device="cuda")
    slab.evict([])
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(wanted, dtype=torch.uint8, device="cuda")
    kept = memory.kept()
    assert kept >= free // 2
    assert memory.trim() == kept
    torch.empty(wanted, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free - 256 * MIB


def test_what_can_be_had_counts_what_is_kept(memory: Memory) -> None:
    before = memory.available()
    slab = memory.slab(2 * CHUNK)
    slab.map()
    slab.evict([])
    assert memory.kept() == 2 * CHUNK
    assert abs(memory.available() - before) <= 32 * MIB


@pytest.mark.parametrize("nbytes", [100 * 10**6, 246_144_152, 1_388_319_744, 9_524_625_408])
def test_a_component_takes_hardly_more_than_its_bytes_of_the_device(memory: Memory, nbytes: int) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < nbytes * 1.1:
        pytest.skip("the GPU is too small")
    slab = memory.slab(nbytes)
    slab.map()
    assert nbytes <= slab.device_bytes < nbytes + GRANULE
    assert free - torch.cuda.mem_get_info()[0] <= 1.02 * nbytes + 4 * MIB


def test_out_of_memory_half_way_leaves_everything_as_it_was(memory: Memory) -> None:
    torch.cuda.empty_cache()
    part, master = memory.slab(40 * CHUNK), master_of(memory, 4 * CHUNK, 1)
    small = memory.slab(4 * CHUNK)
    small.fill(master)
    torch.cuda.empty_cache()
    ballast = torch.empty(torch.cuda.mem_get_info()[0] - 20 * CHUNK, dtype=torch.uint8, device="cuda")
    before, free = usage(memory), torch.cuda.mem_get_info()[0]
    for _ in range(2):
        with pytest.raises(InsufficientMemoryError, match=f"{40 * CHUNK // MIB} MiB more are wanted") as raised:
            part.map()
        assert int(raised.value.details["wanted"]) == 40 * CHUNK
        assert 0 < int(raised.value.details["free"]) < 21 * CHUNK
        assert usage(memory) == before
        assert part.device_bytes == 0
        assert abs(torch.cuda.mem_get_info()[0] - free) <= 32 * MIB
    assert torch.equal(small.tensor, master.cuda())
    del ballast, raised
    part.map()  # torch keeps the ballast's memory unused; it is given back for this
    assert part.device_bytes == 40 * CHUNK


def test_a_return_after_a_partial_eviction_copies_only_what_is_missing(memory: Memory) -> None:
    nbytes = 5 * CHUNK + 3 * MIB
    slab, first, second = memory.slab(nbytes), master_of(memory, nbytes, 1), master_of(memory, nbytes, 2)
    slab.fill(first)
    assert slab.evict([memory.now()], keep=2 * CHUNK + 1) == 2 * CHUNK + 4 * MIB
    assert (slab.filled, slab.device_bytes) == (3 * CHUNK, 3 * CHUNK)
    assert slab.fill(second) == nbytes - 3 * CHUNK
    assert torch.equal(slab.tensor[: 3 * CHUNK], first[: 3 * CHUNK].cuda())
    assert torch.equal(slab.tensor[3 * CHUNK :], second[3 * CHUNK :].cuda())
    assert slab.evict([memory.now()], keep=nbytes) == 0
    assert slab.fill(second) == 0


def test_a_large_master_arrives_whole_from_any_byte(memory: Memory) -> None:
    nbytes = (2 << 30) + 3 * CHUNK + 12_345
    slab, master = memory.slab(nbytes), master_of(memory, nbytes, 1)
    slab.fill(master)
    for keep in ((1 << 30) - CHUNK, (1 << 30) + CHUNK, 2 << 30):
        slab.evict([memory.now()], keep=keep)
        assert slab.fill(master) == nbytes - keep
        assert torch.equal(slab.tensor.cpu(), master)
    around = slice((1 << 30) - 5, (1 << 30) + 5)
    assert torch.equal(master[around].cuda().cpu(), master[around]), "it is pinned as one"


def test_work_on_a_side_stream_sees_its_bytes_although_the_memory_goes_to_another(memory: Memory) -> None:
    nbytes = 4 * CHUNK
    one, other = memory.slab(nbytes), memory.slab(nbytes)
    masters = [master_of(memory, nbytes, seed) for seed in range(2)]
    references = [master.cuda() for master in masters]
    side, seen = torch.cuda.Stream(), torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    one.fill(masters[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)  # about 0.2 s: the copy is still to come when the component goes
        seen.copy_(one.tensor)
    points = [memory.now(), memory.now(side)]
    assert not points[1].query(), "the work had ended: the test proves nothing"
    one.evict(points)
    other.fill(masters[1])
    assert usage(memory)[1:] == (nbytes, 0), "the other got the same memory"
    torch.cuda.synchronize()
    assert torch.equal(seen, references[0])
    assert torch.equal(other.tensor, references[1])


def test_in_the_debug_mode_a_late_graph_reads_nan_and_a_late_write_is_found() -> None:
    memory = Memory("cuda:0", debug=True)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        nbytes = CHUNK + 3 * MIB
        slab, master = memory.slab(nbytes), memory.host_slab(nbytes).zero_()
        slab.fill(master)
        values = slab.tensor[: CHUNK + 2 * MIB].view(dtype)
        seen = torch.empty_like(values)
        seen.copy_(values + 1)
        values[5:6].fill_(0)  # both have run once before they are captured
        torch.cuda.synchronize()
        reading, writing = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(reading):
            seen.copy_(values + 1)
        with torch.cuda.graph(writing):
            values[5:6].fill_(3)
        reading.replay()
        assert bool((seen == 1).all())
        slab.evict([memory.now()], keep=CHUNK)
        reading.replay()
        elements = CHUNK // dtype.itemsize
        assert bool((seen[:elements] == 1).all())
        assert bool(seen[elements:].isnan().all())
        slab.evict([memory.now()])
        reading.replay()
        assert bool(seen.isnan().all())
        assert not memory.was_written_late()
        writing.replay()
        assert memory.was_written_late()
        assert not memory.was_written_late(), "it is said once"
        reading.replay()
        assert bool(seen.isnan().all())
        slab.fill(master)
        reading.replay()
        assert bool((seen == 1).all())
        writing.replay()
        assert not memory.was_written_late(), "it has its own memory again"
        del values, reading, writing


def test_a_graph_is_captured_while_components_come_and_go_in_another_thread(memory: Memory) -> None:
    nbytes = 3 * CHUNK
    masters = [master_of(memory, nbytes, seed) for seed in range(2)]
    one, other = memory.slab(nbytes), memory.slab(nbytes)
    one.fill(masters[0])
    other.fill(masters[1])
    other.evict([])
    x, failures = torch.ones(1024, device="cuda"), []
    (x * 2).sum()
    torch.cuda.synchronize()

    def move() -> None:
        try:
            one.evict([])
            memory.trim()
            other.fill(masters[1])
            other.evict([memory.now(), memory.now(torch.cuda.Stream())])
            one.fill(masters[0])
        except BaseException as error:  # noqa: BLE001 - it is looked at below
            failures.append(error)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        y = x * 2
        thread = threading.Thread(target=move)
        thread.start()
        thread.join()
        z = y + 1
    assert not failures, failures
    graph.replay()
    assert bool((z == 3).all())
    assert torch.equal(one.tensor, masters[0].cuda())


def test_two_hundred_random_switches_keep_every_byte(memory: Memory) -> None:
    rng = random.Random(5)
    sizes = [1 * MIB, 17 * MIB + 3, CHUNK, CHUNK + 1, 200 * MIB, 331 * MIB + 77]
    masters = [master_of(memory, nbytes, seed) for seed, nbytes in enumerate(sizes)]
    references = [master.cuda() for master in masters]
    slabs = [memory.slab(nbytes) for nbytes in sizes]
    addresses = [slab.tensor.data_ptr() for slab in slabs]
    streams = [torch.cuda.Stream() for _ in range(3)]
    last: list[Any] = [None] * len(slabs)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(200):
        number = rng.randrange(len(slabs))
        slab = slabs[number]
        if slab.filled == slab.nbytes:
            slab.evict([last[number]], keep=rng.choice([0, 0, rng.randrange(slab.nbytes)]))
        else:
            missing = slab.nbytes - slab.filled
            assert slab.fill(masters[number]) == missing
            stream = rng.choice(streams)
            with torch.cuda.stream(stream):
                wrong += (slab.tensor != references[number]).sum()
            streams[0].wait_stream(stream)
            for other in streams:
                other.wait_stream(streams[0])  # for `wrong`, which all of them write
            last[number] = memory.now(stream)
        if rng.random() < 0.1:
            memory.trim(rng.choice([0, CHUNK]))
        if rng.random() < 0.2:
            torch.full((rng.randrange(1, 100 * MIB),), 7, dtype=torch.uint8, device="cuda")
        assert usage(memory)[1] == sum(slab.device_bytes for slab in slabs)
    torch.cuda.synchronize()
    assert int(wrong) == 0
    assert [slab.tensor.data_ptr() for slab in slabs] == addresses
    for slab in slabs:
        slab.close()
    assert usage(memory)[1] == 0


def test_threads_that_move_components_at_once_keep_the_books(memory: Memory) -> None:
    nbytes, failures = CHUNK + 5 * MIB, []
    masters = [master_of(memory, nbytes, seed) for seed in range(4)]
    slabs = [memory.slab(nbytes) for _ in masters]

    def move(number: int) -> None:
        try:
            for turn in range(20):
                slabs[number].fill(masters[number])
                if not torch.equal(slabs[number].tensor[-1000:], masters[number][-1000:].cuda()):
                    failures.append(number)
                slabs[number].evict([memory.now()], keep=(turn % 2) * CHUNK)
                memory.trim(CHUNK)
        except BaseException as error:  # noqa: BLE001 - it is looked at below
            failures.append(error)

    threads = [threading.Thread(target=move, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert usage(memory)[1] == sum(slab.device_bytes for slab in slabs)


def test_addresses_are_free_when_the_last_tensor_is_gone(memory: Memory) -> None:
    slab = memory.slab(CHUNK)
    part = slab.map()[5:10]
    slab.close()
    del slab
    assert usage(memory) == (CHUNK, 0, CHUNK)
    del part
    assert usage(memory) == (0, 0, CHUNK)
    slab = memory.slab(CHUNK)
    part = slab.map()[5:10]
    torch.cuda._sleep(100_000_000)
    part.fill_(3)  # queued, not done
    del slab, part  # waits for the device
    torch.cuda.synchronize()
    assert usage(memory) == (0, 0, CHUNK)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_the_device_alone(memory: Memory) -> None:
    slab, master = memory.slab(CHUNK), master_of(memory, CHUNK, 1)
    slab.fill(master)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            slab.map()
        except DeviceError as error:
            status = 0 if "forked child" in str(error) and usage(memory) == (0, 0, 0) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(slab.tensor, master.cuda())


def test_a_program_may_end_with_components_on_the_device() -> None:
    code = (
        "import torch; from penstock.pool.memory import Memory\n"
        "memory = Memory('cuda:0'); slab = memory.slab(100 << 20); tensor = slab.map(); torch.cuda.current_stream()\n"
        "tensor.fill_(3); graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph): y = tensor[:5] + 1\n"
        "graph.replay()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "rror" not in done.stderr, done.stderr


def test_without_virtual_memory_management_a_plain_place_has_the_same_bytes(memory: Memory) -> None:
    memory.virtual = None
    slab, master = memory.slab(CHUNK + 5), master_of(memory, CHUNK + 5, 1)
    assert isinstance(slab, PlainSlab)
    for _ in range(2):
        assert slab.fill(master) == CHUNK + 5
        assert torch.equal(slab.tensor, master.cuda())
        assert slab.evict([memory.now()]) == CHUNK + 5
        assert (slab.filled, slab.tensor) == (0, None)


def test_a_pool_switches_between_two_models_on_a_gpu(tmp_path: Path) -> None:
    expected, x = {}, torch.randn(8, 1024, dtype=torch.float16)
    for seed, name in enumerate("ab"):
        module = network(seed)
        penstock.save_file(dict(module.state_dict()), tmp_path / f"{name}.safetensors")
        with torch.no_grad():
            expected[name] = module.cuda()(x.cuda())
    nbytes = (tmp_path / "a.safetensors").stat().st_size
    with ModelPool("cuda:0", host_budget=8 * nbytes, device_budget=nbytes + nbytes // 2) as pool:
        for name in expected:
            pool.register(name, {"net": tmp_path / f"{name}.safetensors"}, build={"net": lambda: network(9)})
        for name in "abab":
            with pool.use(name) as model, torch.no_grad():
                assert torch.equal(model["net"](x.cuda()), expected[name])
        assert pool.stats().fetched == 2
        assert pool.stats().evicted_from_device == 3
