"""Memory of the device that components leave: at once in the books, and later, without the lock, for real."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

import penstock
from penstock.pool import ModelPool
from penstock.pool.component import Stored
from penstock.pool.device_slab import PagedSlab
from penstock.pool.memory import Memory
from pool_books import check_books
from pool_models import NBYTES, pool_of, use, write_files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_files(tmp_path_factory.mktemp("pool"))


class SlowDevice:
    """One whose work on what leaves is not done before ``done`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pool: ModelPool) -> None:
        self.done, self.asked, self.locked = threading.Event(), threading.Event(), []
        evicting = PagedSlab.evict

        def evict(slab: PagedSlab, points: Iterable[Any], keep: int = 0) -> int:
            self.locked.append(pool._movement.changed._lock._is_owned())
            self.asked.set()
            assert self.done.wait(20)
            return evicting(slab, points, keep)

        monkeypatch.setattr(PagedSlab, "evict", evict)


def test_nobody_else_waits_for_work_on_what_leaves(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(files, models=2) as pool:
        use(pool, 0)
        use(pool, 1)
        device = SlowDevice(monkeypatch, pool)
        future = pool.prefetch("m2")
        assert device.asked.wait(10)
        began = time.monotonic()
        there = next(n for n in range(2) if pool.explain(f"m{n}").components[0].on_device)
        use(pool, there)
        check = pool.stats()
        assert time.monotonic() - began < 5
        assert check.device_bytes == 2 * NBYTES, "the books have it already"
        assert not future.done()
        device.done.set()
        future.result(10)
        use(pool, 2)
        assert device.locked
        assert not any(device.locked)
        check_books(pool)


@pytest.mark.parametrize("how", ["sleep", "unload", "resize"])
def test_what_frees_memory_returns_when_it_is_free(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    calls = {
        "sleep": lambda: pool.sleep("m0"),
        "unload": lambda: pool.unload("m0"),
        "resize": lambda: pool.resize(device=NBYTES // 2),
    }
    with pool_of(files) as pool:
        use(pool, 0)
        slab = pool._models["m0"].components[0].slab
        assert slab is not None
        device = SlowDevice(monkeypatch, pool)
        thread = threading.Thread(target=calls[how], daemon=True)
        thread.start()
        assert device.asked.wait(10)
        pool.stats()
        assert thread.is_alive()
        device.done.set()
        thread.join(10)
        assert not thread.is_alive()
        assert slab.device_bytes <= NBYTES // 2
        assert not any(device.locked)
        check_books(pool)


def test_what_is_wanted_again_before_it_was_unmapped_is_there(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model was to have its room, and could not come."""

    def failing(memory: Memory, nbytes: int) -> Any:
        raise OSError("no addresses")

    with pool_of(files, models=1) as pool:
        use(pool, 0)
        check_books(pool)
        with monkeypatch.context() as patch:
            patch.setattr(Memory, "slab", failing)
            with pytest.raises(OSError, match="no addresses"):
                pool.switch("m1")
        check_books(pool)
        assert pool.stats().device_bytes == 0
        before = pool.stats()
        use(pool, 0)
        pool.prefetch("m0").result(10)
        check_books(pool)
        after = pool.stats()
        assert (after.copied_bytes, after.device_bytes) == (before.copied_bytes, NBYTES)
        use(pool, 1)
        check_books(pool)


def test_a_prefetch_of_what_was_not_unmapped_is_in_the_books(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(stored: Stored, views: Any, watch: Any) -> None:
        raise OSError("the disk")

    with pool_of(files, models=1) as pool:
        use(pool, 0)
        with monkeypatch.context() as patch:
            patch.setattr(Stored, "read", failing)
            with pytest.raises(OSError, match="the disk"):
                pool.switch("m1")
        pool.prefetch("m0").result(10)
        assert pool.stats().device_bytes == NBYTES
        check_books(pool)


def test_what_was_changed_meanwhile_is_copied_again(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(stored: Stored, views: Any, watch: Any) -> None:
        raise OSError("the disk")

    with pool_of(files, models=1) as pool:
        use(pool, 0)
        with monkeypatch.context() as patch:
            patch.setattr(Stored, "read", failing)
            with pytest.raises(OSError, match="the disk"):
                pool.switch("m1")
        with torch.no_grad():
            pool._models["m0"].bounds["net"].module.weight.fill_(9)
        with pool.use("m0") as lease:
            assert (lease["net"].weight == 9).all()
        check_books(pool)


def test_one_that_comes_back_while_it_is_unmapped_waits_for_that(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool_of(files, models=2) as pool:
        use(pool, 0)
        device = SlowDevice(monkeypatch, pool)
        sleeping = threading.Thread(target=pool.sleep, args=["m0"], daemon=True)
        sleeping.start()
        assert device.asked.wait(10)
        using = threading.Thread(target=use, args=[pool, 0], daemon=True)
        using.start()
        time.sleep(0.05)
        assert using.is_alive()
        device.done.set()
        for thread in (sleeping, using):
            thread.join(10)
            assert not thread.is_alive()
        assert pool.explain("m0").components[0].on_device
        use(pool, 0)
        check_books(pool)


def test_a_device_that_refuses_is_the_error_of_who_needs_the_room(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(slab: PagedSlab, points: Iterable[Any], keep: int = 0) -> int:
        raise penstock.errors.DeviceError(cause="no")

    with pool_of(files, models=1) as pool:
        use(pool, 0)
        with monkeypatch.context() as patch:
            patch.setattr(PagedSlab, "evict", refusing)
            for _ in range(2):
                with pytest.raises(penstock.errors.DeviceError, match="no"):
                    pool.switch("m1")
            check_books(pool)
            with pytest.raises(penstock.errors.DeviceError, match="no"):
                pool.sleep("m0")
            check_books(pool)
        use(pool, 1)
        check_books(pool)
        assert pool._movement.vacating.nbytes == 0


def test_memory_of_the_device_stays_within_the_budget(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the books alone: whenever a component gets memory, others have given it up."""
    slabs: list[PagedSlab] = []
    most = [0]
    mapping = PagedSlab.map

    def noted(slab: PagedSlab) -> torch.Tensor:
        made = mapping(slab)
        slabs.append(slab)
        most[0] = max(most[0], sum(one.device_bytes for one in set(slabs)))
        return made

    monkeypatch.setattr(PagedSlab, "map", noted)
    with pool_of(files, models=2.5) as pool:
        threads = [
            threading.Thread(target=lambda me=me: [use(pool, (me * turn) % 4) for turn in range(40)])
            for me in (1, 2, 3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        check_books(pool)
    assert NBYTES < most[0] <= 2.5 * NBYTES + 4096


def test_workspace_is_free_when_the_lease_is_given(files: list[Path]) -> None:
    with pool_of(files, models=2) as pool:
        use(pool, 0)
        use(pool, 1)
        slabs = [pool._models[f"m{number}"].components[0].slab for number in range(2)]
        with pool.use("m1", workspace=NBYTES):
            assert sum(slab.device_bytes for slab in slabs if slab is not None) == NBYTES
        check_books(pool)


def test_a_copy_with_room_does_not_wait_for_what_is_unloaded(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool_of(files, models=4) as pool:
        use(pool, 0)
        device = SlowDevice(monkeypatch, pool)
        thread = threading.Thread(target=pool.unload, args=["m0"], daemon=True)
        thread.start()
        assert device.asked.wait(10)
        pool.prefetch("m1").result(10)
        assert thread.is_alive()
        device.done.set()
        thread.join(10)
        assert not thread.is_alive()
        check_books(pool)
        assert pool._movement.vacating.nbytes == 0
