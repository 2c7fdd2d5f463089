"""A pool on a GPU: what the CPU cannot show."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

import penstock
from pool_books import check_books

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WIDTH = 1024
NBYTES = 4 * WIDTH**2


def layer(value: float) -> torch.nn.Module:
    made = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    with torch.no_grad():
        made.weight.fill_(value)
    return made


def test_outside_of_a_lease_a_gpu_input_meets_torchs_own_error() -> None:
    with penstock.ModelPool("cuda", host_budget="1GiB", device_budget="1GiB") as pool:
        module = layer(1)
        pool.adopt("a", module)
        x = torch.ones(WIDTH, device="cuda")
        with pool.use("a") as lease:
            assert lease.wait()(x)[0] == WIDTH
        with pytest.raises(RuntimeError, match="same device"):
            module(x)
        assert module.weight.is_pinned()
        check_books(pool)


def test_memory_is_given_to_no_one_before_all_streams_are_done_with_it() -> None:
    with penstock.ModelPool("cuda", host_budget="1GiB", device_budget=NBYTES) as pool:
        for name, value in (("a", 1.0), ("b", 2.0)):
            pool.adopt(name, layer(value))
        x = torch.ones(64, WIDTH, device="cuda")
        streams = [torch.cuda.Stream() for _ in range(2)]
        for _ in range(5):
            answers = []
            with pool.use("a") as lease:
                module = lease["model"]
                for stream in streams:
                    stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(20_000_000)
                        answers.append(module(x))
                    lease.record_stream(stream)
            with pool.use("b") as lease:
                assert (lease["model"](x) == 2 * WIDTH).all()
            torch.cuda.synchronize()
            assert all((answer == WIDTH).all() for answer in answers)
        check_books(pool)


def test_workspace_is_what_torch_allocated_beside_the_weights() -> None:
    with penstock.ModelPool("cuda", host_budget="1GiB", device_budget="1GiB") as pool:
        pool.adopt("a", layer(1))
        for _ in range(2):
            with pool.use("a", workspace="auto", key=1) as lease:
                lease.wait()
                torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        learned = pool._workspaces.expected("a", 1)
        assert 64 << 20 <= learned < 80 << 20


def test_the_debug_mode_finds_what_is_written_after_a_lease() -> None:
    with penstock.ModelPool("cuda", host_budget="1GiB", device_budget="1GiB", debug=True) as pool:
        for name, value in (("a", 1.0), ("b", 2.0)):
            pool.adopt(name, layer(value))
        with pool.use("a") as lease:
            kept = lease["model"].weight.detach()
        pool.sleep("a")
        assert kept.isnan().all()
        pool.use("b").close()
        assert pool.stats().late_writes == 0
        kept[3, 4] = 5
        pool.use("b").close()
        assert pool.stats().late_writes == 1
        with pool.use("a") as lease:
            assert (lease["model"].weight == 1).all()
        check_books(pool)


def test_others_go_on_while_a_component_waits_for_its_work_to_be_unmapped() -> None:
    with penstock.ModelPool("cuda", host_budget="1GiB", device_budget=2 * NBYTES) as pool:
        for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
            pool.adopt(name, layer(value))
        pool.switch("b")
        side = torch.cuda.Stream()
        with pool.use("a") as lease:
            lease.wait()
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000_000)
            lease.record_stream(side)
        began = time.monotonic()
        future = pool.prefetch("c")
        pool.stats()
        for name in ("a", "b"):
            if pool.explain(name).components[0].on_device:
                pool.use(name).close()
        assert time.monotonic() - began < 0.3
        future.result(30)
        with pool.use("c") as lease:
            assert (lease["model"].weight == 3).all()
        check_books(pool)
