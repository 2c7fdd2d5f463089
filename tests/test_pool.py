"""A pool of models: masters, residency under a budget, leases, switching. On the CPU: copies are host memory too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

import penstock
from penstock.errors import PoolError
from penstock.pool import ModelPool

WIDTH = 256
NBYTES = 4 * (WIDTH * WIDTH + WIDTH)  # of a linear layer; a multiple of 256


class Scaled(torch.nn.Module):
    """A layer with a buffer that no checkpoint holds."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.register_buffer("scale", torch.full((64,), 3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale[0]


SCALED = NBYTES + 256


def saved(path: Path, seed: int, module: type[torch.nn.Module] = Scaled) -> Path:
    torch.manual_seed(seed)
    made = module()
    safetensors_torch.save_file(made.state_dict(), path)
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [saved(tmp_path / f"{seed}.safetensors", seed) for seed in range(4)]


def pool_of(files: list[Path], **budgets: int) -> ModelPool:
    pool = ModelPool("cpu", **{"host_budget": 1 << 30, "device_budget": 1 << 30} | budgets)
    for number, file in enumerate(files):
        pool.register(f"m{number}", {"net": file}, build={"net": Scaled})
    return pool


@pytest.fixture
def pool(files: list[Path]) -> Iterator[ModelPool]:
    with pool_of(files) as made:
        yield made


def answer(module: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return module(torch.linspace(-1, 1, WIDTH)[None])


def expected(file: Path) -> torch.Tensor:
    return answer(penstock.load_model(Scaled, file))


def test_a_leased_model_computes_what_a_loaded_one_does(pool: ModelPool, files: list[Path]) -> None:
    for number in (0, 1, 0):
        with pool.use(f"m{number}") as model:
            assert torch.equal(answer(model["net"]), expected(files[number]))
    assert pool.stats().fetched == 2
    assert pool.stats().copied == 0, "they were read straight to the device, and stay there"


def test_what_is_on_the_device_already_is_not_moved(pool: ModelPool) -> None:
    pool.switch("m0")
    pool.switch("m1")
    before = pool.stats().copied_bytes
    for name in ("m0", "m1", "m0"):
        with pool.use(name) as model:
            model["net"]
    assert pool.stats().copied_bytes == before == 0
    assert pool.stats().fetched_bytes == 2 * SCALED


def test_with_room_for_one_the_other_is_evicted_and_comes_back_from_its_master(files: list[Path]) -> None:
    with pool_of(files, device_budget=SCALED) as pool:
        for number in (0, 1, 0, 1):
            with pool.use(f"m{number}") as model:
                assert torch.equal(answer(model["net"]), expected(files[number]))
                assert pool.stats().device_bytes == SCALED
        assert pool.stats().fetched == 2, "eviction copies nothing back, and a return reads nothing"
        assert pool.stats().evicted_from_device == 3
        assert "made room for m1" in str(pool.explain("m0"))


def test_outside_of_a_lease_a_module_has_its_master(pool: ModelPool, files: list[Path]) -> None:
    with pool.use("m0") as model:
        net = model["net"]
        weight = net.linear.weight
    pool.sleep("m0")
    assert net.linear.weight is weight, "parameters are rebound, not replaced"
    assert torch.equal(answer(net), expected(files[0]))


def test_a_sleep_of_level_two_leaves_no_memory_and_a_use_brings_everything_back(
    pool: ModelPool, files: list[Path]
) -> None:
    with pool.use("m0") as model:
        net = model["net"]
    pool.sleep("m0", level=2)
    assert pool.stats().host_bytes == pool.stats().device_bytes == 0
    assert net.linear.weight.is_meta
    with pool.use("m0") as model:
        assert torch.equal(answer(model["net"]), expected(files[0]))


def test_masters_that_have_no_room_are_fetched_again(files: list[Path]) -> None:
    with pool_of(files, host_budget=SCALED) as pool:
        for number in (0, 1, 0):
            with pool.use(f"m{number}") as model:
                assert torch.equal(answer(model["net"]), expected(files[number]))
            pool.sleep(f"m{number}")
        assert pool.stats().fetched == 3
        assert pool.stats().host_bytes == SCALED


def test_a_model_without_room_for_its_master_goes_straight_to_the_device(files: list[Path]) -> None:
    with pool_of(files, host_budget=SCALED - 1) as pool, pool.use("m0") as model:
        assert torch.equal(answer(model["net"]), expected(files[0]))
        assert pool.stats().host_bytes == 0


def test_components_of_the_same_file_are_one(files: list[Path]) -> None:
    with ModelPool("cpu", host_budget=1 << 30, device_budget=1 << 30) as pool:
        for name in ("a", "b"):
            pool.register(name, {"text": files[0], "net": files[1]}, build={"text": Scaled, "net": Scaled})
        with pool.use("a") as a, pool.use("b") as b:
            assert a["text"] is not b["text"]
            assert a["text"].linear.weight.data_ptr() == b["text"].linear.weight.data_ptr()
        assert pool.stats().device_bytes == 2 * SCALED
        pool.unload("a")
        with pool.use("b") as b:
            assert torch.equal(answer(b["text"]), expected(files[0]))


def test_a_model_that_writes_to_its_weights_keeps_what_it_wrote(files: list[Path]) -> None:
    with pool_of(files[:2], device_budget=SCALED) as pool:
        with pool.use("m0") as model, torch.no_grad():
            model["net"].linear.weight.mul_(2)
            model["net"].scale.add_(1)
            changed = answer(model["net"]).clone()
        pool.switch("m1")
        with pool.use("m0") as model:
            assert torch.equal(answer(model["net"]), changed)
        pool.sleep("m0", level=2)
        with pool.use("m0") as model:
            assert torch.equal(answer(model["net"]), changed)


def test_a_model_that_writes_to_shared_weights_gets_its_own(files: list[Path]) -> None:
    with ModelPool("cpu", host_budget=1 << 30, device_budget=1 << 30) as pool:
        for name in ("a", "b"):
            pool.register(name, {"net": files[0]}, build={"net": Scaled})
        with pool.use("a") as a, torch.no_grad():
            a["net"].linear.bias.zero_()
            changed = answer(a["net"]).clone()
        with pool.use("a") as a, pool.use("b") as b:
            assert torch.equal(answer(a["net"]), changed)
            assert torch.equal(answer(b["net"]), expected(files[0]))


def test_adopting_moves_a_model_that_is_built(files: list[Path]) -> None:
    model = penstock.load_model(Scaled, files[0])
    with pool_of(files[1:2], device_budget=SCALED) as pool:
        pool.adopt("mine", model)
        for _ in range(2):
            pool.switch("m0")
            with pool.use("mine") as lease:
                assert lease.wait() is model
                assert torch.equal(answer(model), expected(files[0]))
        with pytest.raises(penstock.ConfigError, match="adopted"):
            pool.sleep("mine", level=2)


def test_tied_and_strided_tensors_stay_so() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(8, 4)
            self.head = torch.nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight
            self.conv = torch.nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
            self.rnn = torch.nn.LSTM(3, 3)

    model = Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    strides = model.conv.weight.stride()
    with ModelPool("cpu", host_budget=1 << 20, device_budget=1 << 20) as pool:
        pool.adopt("tied", model)
        with pool.use("tied") as lease:
            lease.wait()
            assert model.head.weight is model.embed.weight
            assert model.conv.weight.stride() == strides
            assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_component_is_ready_before_those_behind_it(files: list[Path]) -> None:
    with ModelPool("cpu", host_budget=1 << 30, device_budget=1 << 30) as pool:
        pool.register("two", {"first": files[0], "second": files[1]}, build={"first": Scaled, "second": Scaled})
        with pool.use("two") as model:
            assert list(model) == ["first", "second"]
            assert torch.equal(answer(model["first"]), expected(files[0]))


# Room


def test_a_use_waits_for_a_lease_of_another_thread_to_end(files: list[Path]) -> None:
    with pool_of(files, device_budget=SCALED) as pool:
        entered = threading.Event()

        def other() -> None:
            with pool.use("m1") as model:
                model["net"]
                entered.set()

        thread = threading.Thread(target=other)
        with pool.use("m0") as model:
            model["net"]
            thread.start()
            while not pool.stats().waiting:
                threading.Event().wait(0.001)
            assert not entered.is_set()
        thread.join(10)
        assert entered.is_set()


def test_a_use_within_a_use_has_to_fit_beside_it(files: list[Path]) -> None:
    with pool_of(files, device_budget=2 * SCALED) as pool, pool.use("m0"):
        with pool.use("m1") as inner:
            inner["net"]
            with pytest.raises(PoolError, match="m0, m1"):
                pool.use("m2")
        with pool.use("m2") as inner:
            inner["net"]


def test_threads_that_could_only_wait_for_each_other_get_an_error(files: list[Path]) -> None:
    with pool_of(files, device_budget=2 * SCALED) as pool:
        ready, errors = threading.Barrier(2), []

        def work(first: str, second: str) -> None:
            with pool.use(first):
                ready.wait()
                try:
                    with pool.use(second) as model:
                        model["net"]
                except PoolError as error:
                    errors.append(error)

        threads = [threading.Thread(target=work, args=pair) for pair in (("m0", "m2"), ("m1", "m3"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        assert len(errors) == 1


def test_workspace_is_kept_free(files: list[Path]) -> None:
    with pool_of(files, device_budget=2 * SCALED) as pool:
        pool.switch("m0")
        pool.switch("m1")
        with pool.use("m0", workspace=SCALED):
            assert pool.stats().device_bytes == SCALED
        with pytest.raises(penstock.InsufficientMemoryError, match="workspace"):
            pool.use("m0", workspace=SCALED + 1)


def test_of_models_used_in_turns_not_always_the_next_one_is_evicted(files: list[Path]) -> None:
    with pool_of(files[:3], device_budget=2 * SCALED) as pool:
        for _ in range(10):
            for name in ("m0", "m1", "m2"):
                with pool.use(name) as model:
                    model["net"]
        # The least recently used one would be wanted next, always: 30 copies.
        assert pool.stats().copied <= 20


def test_pinned_models_stay(files: list[Path]) -> None:
    with pool_of(files, device_budget=2 * SCALED) as pool:
        pool.pin("m0")
        for name in ("m1", "m2", "m3"):
            pool.switch(name)
        assert pool.explain("m0").components[0].on_device
        pool.unpin("m0")
        pool.switch("m1")
        pool.switch("m2")
        assert not pool.explain("m0").components[0].on_device


def test_a_lower_budget_evicts(pool: ModelPool) -> None:
    for name in ("m0", "m1", "m2"):
        pool.switch(name)
    pool.resize(device=2 * SCALED, host=SCALED)
    assert pool.stats().device_bytes == 2 * SCALED
    assert pool.stats().host_bytes == SCALED


# Faults


def test_a_model_that_can_never_fit_is_refused(files: list[Path]) -> None:
    with pool_of(files, device_budget=SCALED - 1) as pool:
        with pytest.raises(penstock.InsufficientMemoryError, match="budget"):
            pool.use("m0")
        assert pool.stats().device_bytes == 0


def test_storage_that_fails_is_the_error_of_who_waits_and_the_next_use_tries_again(
    files: list[Path], tmp_path: Path
) -> None:
    with pool_of(files) as pool:
        content = files[0].read_bytes()
        files[0].unlink()
        with pool.use("m0") as model, pytest.raises(penstock.PenstockError):
            model["net"]
        assert pool.stats().device_bytes == pool.stats().host_bytes == 0
        with pool.use("m1") as model:
            model["net"]
        files[0].write_bytes(content)


@pytest.mark.parametrize("wrong", ["raises", "no module", "other shapes", "other names"])
def test_a_function_that_builds_something_else_adds_nothing(files: list[Path], wrong: str) -> None:
    def build() -> torch.nn.Module:
        if wrong == "raises":
            raise ValueError("no")
        if wrong == "no module":
            return None  # type: ignore[return-value]
        return Scaled(WIDTH * 2) if wrong == "other shapes" else torch.nn.Linear(WIDTH, WIDTH)

    with ModelPool("cpu", host_budget=1 << 30, device_budget=1 << 30) as pool:
        with pytest.raises((ValueError, KeyError)):
            pool.register("odd", {"net": files[0]}, build={"net": build})
        assert "odd" not in pool


def test_a_leased_model_is_neither_unloaded_nor_put_to_sleep(pool: ModelPool) -> None:
    with pool.use("m0"):
        for refused in (pool.unload, pool.sleep):
            with pytest.raises(penstock.ConfigError, match="in use"):
                refused("m0")
    pool.unload("m0")
    assert "m0" not in pool


def test_a_prefetch_that_waits_can_be_cancelled(files: list[Path]) -> None:
    with pool_of(files, device_budget=SCALED) as pool:
        with pool.use("m0") as model:
            model["net"]
            future = pool.prefetch("m1")
            assert future.cancel()
        with pool.use("m0"):
            assert pool.stats().device_bytes == SCALED
        assert pool.stats().fetched == 1
        pool.prefetch("m1", to="host").result(10)
        assert pool.stats().fetched == 2


def test_closing_ends_what_waits(files: list[Path]) -> None:
    pool = pool_of(files, device_budget=SCALED)
    errors = []

    def other() -> None:
        try:
            pool.use("m1")
        except penstock.LoadCancelledError as error:
            errors.append(error)

    lease = pool.use("m0")
    thread = threading.Thread(target=other)
    thread.start()
    while not pool.stats().waiting:
        threading.Event().wait(0.001)
    pool.close()
    thread.join(10)
    assert len(errors) == 1
    lease.close()
    pool.close()
