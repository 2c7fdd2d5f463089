"""Masters that are made behind the request: whatever comes meanwhile, they have the right bytes, and nobody hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

import penstock
from penstock.pool import ModelPool
from penstock.pool.component import Component, Stored
from penstock.pool.device_slab import PagedSlab
from penstock.pool.masters import Masters
from penstock.pool.memory import Memory
from penstock.pool.movement import Movement
from pool_books import check_books
from pool_models import NBYTES, WIDTH, layer, pool_of, use, write_files


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return write_files(tmp_path)


class Held:
    """Copies from the device that do not begin before ``go`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.asked, copying = threading.Event(), threading.Event(), Memory.to_host

        def to_host(memory: Memory, host: torch.Tensor, device: torch.Tensor) -> None:
            self.asked.set()
            assert self.go.wait(20)
            copying(memory, host, device)

        monkeypatch.setattr(Memory, "to_host", to_host)


def test_a_model_can_be_used_before_it_has_a_master(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(files) as pool:
        held = Held(monkeypatch)
        use(pool, 0)
        assert held.asked.wait(10)
        assert not pool.explain("m0").components[0].on_host
        use(pool, 0)
        held.go.set()
        check_books(pool)
        assert pool.explain("m0").components[0].on_host
        assert (pool.stats().fetched, pool.stats().copied) == (1, 0)


def test_a_model_whose_master_is_being_made_goes_after_that_and_is_not_read_again(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool_of(files, models=1) as pool:
        held = Held(monkeypatch)
        use(pool, 0)
        assert held.asked.wait(10)
        future = pool.prefetch("m1")
        assert pool.explain("m0").components[0].on_device
        held.go.set()
        future.result(20)
        use(pool, 1)
        use(pool, 0)
        check_books(pool)
        assert pool.stats().fetched == 2


@pytest.mark.parametrize("how", ["in_lease", "after_it"])
def test_what_is_written_while_a_master_is_made_is_not_in_what_others_get(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with pool_of(files) as pool:
        pool.register("twin", {"net": files[0]}, build={"net": layer})
        held = Held(monkeypatch)
        with pool.use("m0") as lease, torch.no_grad():
            module = lease["net"]
            assert held.asked.wait(10)
            module.weight.fill_(7)
            if how == "in_lease":
                held.go.set()
                pool._requests.settle_masters()
        held.go.set()
        check_books(pool)
        for _ in range(2):
            with pool.use("twin") as lease:
                assert torch.equal(lease["net"].weight[1], torch.arange(WIDTH) + 0.0)
            with pool.use("m0") as lease:
                assert bool((lease["net"].weight == 7).all())
            for name in ("m0", "twin"):
                pool.sleep(name)
        check_books(pool)


def write(pool: ModelPool, name: str, value: float) -> None:
    with pool.use(name) as lease, torch.no_grad():
        lease["net"].weight.fill_(value)


def is_full_of(pool: ModelPool, name: str, value: float) -> bool:
    """Whether a model has this value everywhere, there and when it has come again."""
    found = []
    for _ in range(2):
        with pool.use(name) as lease:
            found.append(bool((lease["net"].weight == value).all()))
        pool.sleep(name)
    return all(found)


class Disk:
    """One that fails while it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails, reading = False, Stored.read

        def read(stored: Stored, views: Any, watch: Any) -> None:
            if self.fails:
                raise penstock.errors.StorageError(cause="the disk")
            reading(stored, views, watch)

        monkeypatch.setattr(Stored, "read", read)


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_write_between_the_copy_of_a_master_and_its_use_is_in_it(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    filling, wrote = Masters._filled, []

    def filled(masters: Masters, component: Component) -> Any:
        slab = filling(masters, component)
        write(pool, "m0", 7)
        wrote.append(True)
        return slab

    with pool_of(files) as pool:
        monkeypatch.setattr(Masters, "_filled", filled)
        pool.switch("m0")
        check_books(pool)
        assert wrote
        assert is_full_of(pool, "m0", 7)


def test_a_write_while_a_master_is_read_from_storage_is_in_it(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool_of(files, host=0.5) as pool:
        pool.switch("m0")
        check_books(pool)
        assert not pool.explain("m0").components[0].on_host
        whole = Component.read

        def read_and_write(component: Component, views: Any, watch: Any = None) -> None:
            whole(component, views, watch)
            write(pool, "m0", 7)

        pool.resize(host=8 * NBYTES)
        with monkeypatch.context() as patch:
            patch.setattr(Component, "read", read_and_write)
            pool.prefetch("m0", to="host").result(10)
        check_books(pool)
        assert is_full_of(pool, "m0", 7)


@pytest.mark.parametrize("lease", ["ends before", "has it then"])
@pytest.mark.parametrize("copied", ["before", "after"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_write_to_a_master_while_it_is_copied_is_on_the_device_too_and_nowhere_else(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, shared: bool, copied: str, lease: str
) -> None:
    copying, go, asked = Memory.to_device, threading.Event(), threading.Event()

    def to_device(memory: Memory, *arguments: Any) -> None:
        if copied == "before":
            copying(memory, *arguments)
        asked.set()
        assert go.wait(20)
        if copied == "after":
            copying(memory, *arguments)

    with pool_of(files) as pool:
        if shared:
            pool.register("twin", {"net": files[0]}, build={"net": layer})
        pool.prefetch("m0", to="host").result(10)
        monkeypatch.setattr(Memory, "to_device", to_device)
        with pool.use("m0") as mine:
            assert asked.wait(10)
            with torch.no_grad():
                pool._models["m0"].bounds["net"].module.weight.fill_(7)
            if lease == "has it then":
                go.set()
                assert bool((mine["net"].weight == 7).all())
        go.set()
        check_books(pool)
        if shared:
            for _ in range(2):
                with pool.use("twin") as other:
                    assert torch.equal(other["net"].weight[1], torch.arange(WIDTH) + 0.0)
                pool.sleep("twin")
        assert is_full_of(pool, "m0", 7)


def test_a_lease_beside_one_whose_writes_could_not_be_undone_is_told_so_or_has_its_bytes(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    with pool_of(files, host=0.5) as pool:
        pool.register("twin", {"net": files[0]}, build={"net": layer})
        with pool.use("twin") as other:
            other.wait()
            disk.fails = True
            write(pool, "m0", 7)
            outcome: list[Any] = []

            def ask() -> None:
                try:
                    outcome.append(other["net"])
                except penstock.PenstockError as error:
                    outcome.append(error)

            in_thread(ask).join(10)
            assert outcome, "it waits for ever"
            assert isinstance(outcome[0], penstock.PenstockError)
        disk.fails = False
        check_books(pool)
        for _ in range(2):
            with pool.use("twin") as other:
                assert torch.equal(other["net"].weight[1], torch.arange(WIDTH) + 0.0)
            pool.sleep("twin")
        check_books(pool)


def test_what_lost_its_bytes_while_its_master_is_made_comes_again(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool_of(files) as pool:
        pool.register("twin", {"net": files[0]}, build={"net": layer})
        held, disk = Held(monkeypatch), Disk(monkeypatch)
        with pool.use("m0") as lease, torch.no_grad():
            assert held.asked.wait(10)
            lease["net"].weight.fill_(7)
            disk.fails = True
        disk.fails = False
        thread = in_thread(lambda: use(pool, 0))
        time.sleep(0.05)
        held.go.set()
        thread.join(10)
        assert not thread.is_alive()
        check_books(pool)
        for name in ("m0", "twin"):
            with pool.use(name) as lease:
                assert torch.equal(lease["net"].weight[1], torch.arange(WIDTH) + 0.0)
        check_books(pool)


def test_closing_ends_who_waits_for_masters_that_will_not_be_made(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping, full = PagedSlab.map, threading.Event()

    def refusing(slab: PagedSlab) -> torch.Tensor:
        if full.is_set():
            asked.set()
            raise penstock.InsufficientMemoryError(cause="no more")
        return mapping(slab)

    asked = threading.Event()
    pool = pool_of(files, models=4)
    held = Held(monkeypatch)
    monkeypatch.setattr(PagedSlab, "map", refusing)
    for number in (0, 1):
        use(pool, number)
    assert held.asked.wait(10)
    full.set()
    pool.prefetch("m2")
    assert asked.wait(10)
    thread = in_thread(pool.close)
    time.sleep(0.05)
    held.go.set()
    thread.join(10)
    assert not thread.is_alive()


def test_adopting_waits_for_masters_that_are_made_and_may_go(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool_of(files, host=1) as pool:
        held = Held(monkeypatch)
        use(pool, 0)
        assert held.asked.wait(10)
        errors: list[BaseException] = []

        def adopt() -> None:
            try:
                pool.adopt("mine", layer())
            except penstock.PenstockError as error:
                errors.append(error)

        thread = in_thread(adopt)
        time.sleep(0.05)
        held.go.set()
        thread.join(10)
        assert not thread.is_alive()
        assert not errors
        check_books(pool)


def test_what_a_direct_read_left_is_given_to_the_driver(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(files) as pool:
        arrived: list[bool] = []
        monkeypatch.setattr(Memory, "kept", lambda memory: 1)
        monkeypatch.setattr(
            Memory, "trim", lambda memory, keep=0: arrived.append(pool._models["m0"].components[0].on_device)
        )
        pool.prefetch("m0").result(10)
        check_books(pool)
        assert True in arrived


class Order:
    """Notes when components are read to the device, and copied from it; reads do not end before ``go`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, waits_for: str) -> None:
        self.go, self.reading, self.events = threading.Event(), threading.Event(), []
        reading, slabs = Component.read, Memory.host_slab

        def read(component: Component, views: Any, watch: Any = None) -> None:
            if component.name == waits_for:
                self.reading.set()
                assert self.go.wait(20)
            reading(component, views, watch)
            self.events.append(f"{component.name} read")

        def host_slab(memory: Memory, nbytes: int) -> torch.Tensor:
            self.events.append("memory for a master")
            return slabs(memory, nbytes)

        monkeypatch.setattr(Component, "read", read)
        monkeypatch.setattr(Memory, "host_slab", host_slab)


def two(pool: ModelPool, files: list[Path]) -> None:
    """Registers a model of two components, of which the first one is read first."""
    pool.register("two", {"a": files[0], "b": files[1]}, build={"a": layer, "b": layer})


def test_masters_are_made_when_nothing_is_read_to_the_device(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Order(monkeypatch, "b")
    with pool_of([]) as pool:
        two(pool, files)
        with pool.use("two") as lease:
            lease["a"]
            assert order.reading.wait(10)
            time.sleep(0.1)
            order.go.set()
            lease["b"]
        check_books(pool)
        assert order.events == ["a read", "b read", "memory for a master", "memory for a master"]
        assert all(one.on_host for one in pool.explain("two").components)


@pytest.mark.parametrize("how", ["use", "adopt", "sleep"])
def test_masters_are_made_at_once_when_someone_waits_for_them(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Though something is read to the device."""
    order = Order(monkeypatch, "b")
    calls = {
        "use": lambda: pool.use("m2").close(),
        "adopt": lambda: pool.adopt("mine", layer()),
        "sleep": lambda: pool.sleep("m0"),
    }
    with pool_of([], models=2, host=1) as pool:
        two(pool, files)
        for number in (0, 2):
            pool.register(f"m{number}", {"net": files[number]}, build={"net": layer})
        pool.use("two").close()
        assert order.reading.wait(10)
        assert not pool.explain("m0").components[0].on_host
        thread = in_thread(calls[how])
        thread.join(10)
        assert not thread.is_alive()
        assert not order.go.is_set()
        order.go.set()
        check_books(pool)


def test_a_write_outside_of_leases_while_another_model_brings_the_weights_stays_with_who_wrote(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    copying = Memory.to_device

    def to_device(memory: Memory, *arguments: Any) -> None:
        with torch.no_grad():
            pool._models["m0"].bounds["net"].module.weight.fill_(7)
        monkeypatch.setattr(Memory, "to_device", copying)
        copying(memory, *arguments)

    with pool_of(files) as pool:
        pool.register("twin", {"net": files[0]}, build={"net": layer})
        pool.prefetch("m0", to="host").result(10)
        monkeypatch.setattr(Memory, "to_device", to_device)
        pool.switch("twin")
        check_books(pool)
        assert is_full_of(pool, "m0", 7)
        for _ in range(2):
            with pool.use("twin") as other:
                assert torch.equal(other["net"].weight[1], torch.arange(WIDTH) + 0.0)
            pool.sleep("twin")


def test_a_run_that_ends_before_its_lease_is_given_does_not_keep_others_from_being_measured(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.pool import pool as of_pool

    class Failing:
        def __init__(self, *arguments: Any) -> None:
            raise KeyboardInterrupt

    with pool_of(files) as pool:
        monkeypatch.setattr(Memory, "peak", lambda memory: NBYTES)
        with monkeypatch.context() as patch:
            patch.setattr(of_pool, "Lease", Failing)
            with pytest.raises(KeyboardInterrupt):
                pool.use("m0", workspace="auto")
        pool.use("m0", workspace="auto").close()
        assert pool._workspaces.expected("m0", None) == NBYTES


def test_nobody_has_a_model_before_its_arrival_is_in_the_books(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    landed, go, reading = threading.Event(), threading.Event(), Movement._read_to_device

    def read_to_device(movement: Movement, component: Any) -> None:
        reading(movement, component)
        landed.set()
        assert go.wait(10)

    monkeypatch.setattr(Movement, "_read_to_device", read_to_device)
    with pool_of(files) as pool:
        pool.prefetch("m0")
        assert landed.wait(10)
        user = threading.Thread(target=use, args=[pool, 0])
        user.start()
        user.join(0.2)
        assert user.is_alive(), "what is added to the bytes may be missing yet"
        go.set()
        user.join(10)
        assert not user.is_alive()
        check_books(pool)
