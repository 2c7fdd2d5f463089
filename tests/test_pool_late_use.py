"""The debug mode of a pool: use of a model's memory after its lease is found. ``test_pool_gpu`` has a GPU's."""

from __future__ import annotations

import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from penstock.pool import ModelPool
from penstock.pool.device_slab import PagedSlab
from penstock.pool.memory import Memory
from pool_books import check_books

WIDTH = 256
NBYTES = 4 * WIDTH**2
PAGE = 4096


def layer(value: float) -> torch.nn.Module:
    made = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    with torch.no_grad():
        made.weight.fill_(value)
    return made


def pool_of(**settings: Any) -> ModelPool:
    pool = ModelPool("cpu", host_budget=8 * NBYTES, device_budget=2 * NBYTES, **settings)
    for name, value in (("a", 1), ("b", 2)):
        pool.adopt(name, layer(value))
    return pool


def alias(pool: ModelPool, name: str) -> torch.Tensor:
    """What a program keeps beyond a lease."""
    with pool.use(name) as lease:
        return lease["model"].weight.detach()


def test_what_is_read_late_is_nan_and_a_return_has_every_byte(caplog: pytest.LogCaptureFixture) -> None:
    with pool_of(debug=True) as pool:
        kept = alias(pool, "a")
        assert (kept == 1).all()
        pool.sleep("a")
        assert kept.isnan().all()
        for name, value in (("a", 1), ("b", 2), ("a", 1)):
            with pool.use(name) as lease:
                assert (lease["model"].weight == value).all()
            pool.sleep(name)
        check_books(pool)
        assert pool.stats().late_writes == 0
    assert not caplog.records


@pytest.mark.parametrize("found", ["by the next lease", "at its end", "when it comes back"])
def test_what_is_written_late_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture, found: str) -> None:
    with pool_of(debug=True) as pool:
        kept = alias(pool, "a")
        pool.sleep("a")
        if found == "by the next lease":
            kept[3, 4] = 5
            pool.use("b").close()
        elif found == "at its end":
            with pool.use("b"):
                kept[3, 4] = 5
        else:
            kept[3, 4] = 5
            pool.switch("a")
            pool.use("b").close()
        pool.use("b").close()
        assert pool.stats().late_writes == 1
        with pool.use("a") as lease:
            assert (lease["model"].weight == 1).all()
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "after its lease" in errors[0].getMessage()
    assert found == "when it comes back" or "model (" in errors[0].getMessage()


def test_without_the_mode_nothing_is_looked_at() -> None:
    with pool_of() as pool:
        kept = alias(pool, "a")
        pool.sleep("a")
        assert not kept.any(), "its pages were given back"
        kept[3, 4] = 5
        pool.use("b").close()
        assert pool.stats().late_writes == 0


def test_the_part_that_stays_is_not_scratch() -> None:
    memory = Memory("cpu", debug=True)
    slab = memory.slab(4 * PAGE)
    assert isinstance(slab, PagedSlab)
    slab.map().fill_(7)
    slab.evict([], 2 * PAGE)
    assert (slab.tensor[: 2 * PAGE] == 7).all()
    assert (slab.tensor[2 * PAGE :] == 255).all()
    assert not memory.was_written_late()
    slab.tensor[0] = 1
    assert not memory.was_written_late(), "that is the component's"
    slab.tensor[-1] = 1
    assert memory.was_written_late()
    assert not memory.was_written_late(), "since the last call"
