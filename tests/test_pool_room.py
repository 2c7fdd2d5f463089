"""Room in a pool: parts of components, whose turn it is, faults half way, endings."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

import penstock
from penstock.errors import PoolError
from penstock.pool import ModelPool, Stages
from penstock.pool.device_slab import PagedSlab
from penstock.pool.memory import Memory
from penstock.pool.workspace import Workspaces
from pool_books import check_books
from pool_models import NBYTES, layer, pool_of, use, write_files

PAGE = 4096


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_files(tmp_path_factory.mktemp("pool"))


def until(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Thread(threading.Thread):
    """One whose exception is its result."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        super().__init__(daemon=True)
        self._work, self._arguments = work, arguments
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._work(*self._arguments)
        except BaseException as error:  # noqa: BLE001 - for the test
            self.error = error

    def ended(self) -> BaseException | None:
        self.join(20)
        assert not self.is_alive()
        return self.error


# Parts


def test_only_as_much_leaves_as_is_needed_and_a_return_copies_only_that(files: list[Path]) -> None:
    with pool_of(files, models=2.5) as pool:
        for number in (0, 1, 2):
            use(pool, number)
            check_books(pool)
        part = pool.explain("m0").components[0].device_bytes + pool.explain("m1").components[0].device_bytes
        assert part == 1.5 * NBYTES
        before = pool.stats().copied_bytes
        with pool.use("m0") as lease:
            lease.wait()
            use(pool, 0)
        use(pool, 1)
        check_books(pool)
        # What was missing of both, and what left meanwhile.
        assert 0 < pool.stats().copied_bytes - before <= NBYTES


def test_workspace_takes_the_end_of_another_model(files: list[Path]) -> None:
    with pool_of(files, models=2) as pool:
        use(pool, 0)
        use(pool, 1)
        with pool.use("m1", workspace=3 * PAGE + 1) as lease:
            lease.wait()
            assert pool.explain("m0").components[0].device_bytes == NBYTES - 4 * PAGE
            check_books(pool)
        before = pool.stats().copied_bytes
        use(pool, 0)
        assert pool.stats().copied_bytes - before == 4 * PAGE


def test_a_part_without_a_master_is_completed_from_storage(files: list[Path]) -> None:
    with pool_of(files, models=1.5, host=0) as pool:
        for number in (0, 1, 0, 1):
            use(pool, number)
            check_books(pool)
        assert pool.stats().host_bytes == 0


def test_a_slab_keeps_its_address_and_the_content_that_stays() -> None:
    slab = PagedSlab(Memory("cpu"), 10 * PAGE + 5)
    slab.map()
    assert slab.tensor is not None
    address = slab.tensor.data_ptr()
    slab.tensor.fill_(7)
    slab.evict([None], 3 * PAGE)
    assert slab.device_bytes == 3 * PAGE
    slab.map()
    assert slab.tensor.data_ptr() == address
    assert (slab.tensor[: 3 * PAGE] == 7).all()
    assert not slab.tensor[3 * PAGE :].any(), "its pages were given back"


# Turns


def test_a_model_that_is_there_does_not_keep_another_from_its_turn(files: list[Path]) -> None:
    """Two threads whose leases of one model overlap always, and one that needs the room."""
    with pool_of(files, models=1) as pool:
        over = threading.Event()

        def overlap() -> None:
            lease = pool.use("m0")
            while not over.is_set():
                following = pool.use("m0") if pool.stats().waiting == 0 else None
                lease.close()
                lease = following or pool.use("m0")
            lease.close()

        threads = [Thread(overlap) for _ in range(2)]
        for _ in range(3):
            use(pool, 1)
        over.set()
        assert [thread.ended() for thread in threads] == [None, None]
        check_books(pool)


def test_what_needs_no_room_overtakes_but_not_for_ever(files: list[Path]) -> None:
    from penstock.pool.turns import OVERTAKING

    with pool_of(files, models=1) as pool:
        lease = pool.use("m0")
        waiting = Thread(use, pool, 1)
        until(lambda: pool.stats().waiting == 1)
        order: list[str] = []

        def again() -> None:
            for number in range(OVERTAKING + 2):
                with pool.use("m0"):
                    order.append(f"m0 {number}")

        other = Thread(again)
        until(lambda: len(order) == OVERTAKING and pool.stats().waiting == 2)
        lease.close()
        assert waiting.ended() is None
        assert other.ended() is None
        assert len(order) == OVERTAKING + 2
        check_books(pool)


@pytest.mark.parametrize("models", [1, 2, 3.3])
def test_no_thread_starves(files: list[Path], models: float) -> None:
    with pool_of(files, models=models) as pool:
        done = [0] * 6
        over = threading.Event()

        def work(me: int) -> None:
            while not over.is_set():
                use(pool, me % 4)
                done[me] += 1

        threads = [Thread(work, me) for me in range(6)]
        until(lambda: min(done) >= 5, 60)
        over.set()
        assert [thread.ended() for thread in threads] == [None] * 6
        check_books(pool)


def test_a_switch_that_could_only_wait_for_its_own_thread_is_refused(files: list[Path]) -> None:
    with pool_of(files, models=1) as pool, pool.use("m0"):
        with pytest.raises(PoolError, match="m0"):
            pool.switch("m1")
        with pytest.raises(PoolError, match="m0"):
            pool.pin("m1")
        check_books(pool)


def test_a_lease_belongs_to_the_thread_that_enters_it(files: list[Path]) -> None:
    """As an event loop does, which asks for it in a thread of a pool."""
    with pool_of(files, models=1) as pool:
        made: list[Any] = []
        asked, go_on = threading.Event(), threading.Event()

        def ask() -> None:
            made.append(pool.use("m0"))
            asked.set()
            go_on.wait(20)
            use(pool, 1)

        thread = Thread(ask)
        asked.wait(20)
        with made[0]:
            go_on.set()
            until(lambda: pool.stats().waiting == 1)
        assert thread.ended() is None


def test_beside_a_pinned_model_what_has_no_room_is_refused(files: list[Path]) -> None:
    with pool_of(files, models=1.5) as pool:
        pool.pin("m0")
        with pytest.raises(penstock.InsufficientMemoryError, match="pinned"):
            pool.use("m1")
        with pytest.raises(penstock.ConfigError, match="in use"):
            pool.unload("m0")
        check_books(pool)
        pool.unpin("m0")
        with pytest.raises(penstock.ConfigError, match="not pinned"):
            pool.unpin("m0")
        use(pool, 1)


def test_unloading_ends_what_waits_for_the_model(files: list[Path]) -> None:
    with pool_of(files, models=1) as pool:
        with pool.use("m0"):
            future = pool.prefetch("m1")
            waiting = Thread(use, pool, 1)
            until(lambda: pool.stats().waiting == 2)
            pool.unload("m1")
            assert isinstance(waiting.ended(), penstock.ConfigError)
            until(future.cancelled)
        check_books(pool)


def test_a_budget_that_shrinks_ends_what_waits_for_more(files: list[Path]) -> None:
    with pool_of(files, models=1) as pool, pool.use("m0"):
        waiting, future = Thread(use, pool, 1), pool.prefetch("m1")
        until(lambda: pool.stats().waiting == 2)
        pool.resize(device=NBYTES // 2)
        assert isinstance(waiting.ended(), penstock.InsufficientMemoryError)
        assert isinstance(future.exception(20), penstock.InsufficientMemoryError)


def test_a_prefetch_of_several_masters_does_not_evict_its_own(files: list[Path]) -> None:
    with pool_of(files, models=8, host=2) as pool:
        pool.register("two", {"a": files[0], "b": files[1]}, build={"a": layer, "b": layer})
        for name in ("m2", "m3", "m2", "m3"):
            pool.prefetch(name, to="host").result(20)
        pool.prefetch("two", to="host").result(20)
        assert [one.on_host for one in pool.explain("two").components] == [True, True]


# Faults


def test_out_of_memory_half_way_others_leave_and_it_goes_on(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has less than the budget says: someone else has allocated there."""
    with pool_of(files, models=3) as pool:
        use(pool, 0)
        use(pool, 1)
        mapping = PagedSlab.map

        def refusing(slab: PagedSlab) -> torch.Tensor:
            if pool.stats().evicted_from_device < 2:
                raise penstock.InsufficientMemoryError(cause="no more")
            return mapping(slab)

        monkeypatch.setattr(PagedSlab, "map", refusing)
        use(pool, 2)
        assert "had no memory" in str(pool.explain("m0"))
        check_books(pool)


def test_out_of_memory_with_nothing_left_to_evict_is_an_error_and_the_next_use_tries_again(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool_of(files) as pool:

        def refusing(slab: PagedSlab) -> torch.Tensor:
            raise penstock.InsufficientMemoryError(cause="no more")

        with monkeypatch.context() as patch, pool.use("m0") as lease:
            patch.setattr(PagedSlab, "map", refusing)
            with pytest.raises(penstock.InsufficientMemoryError, match="no more"):
                lease.wait()
            check_books(pool)
        check_books(pool)
        assert pool.stats().device_bytes == 0
        use(pool, 0)


def test_host_memory_that_cannot_be_had_is_an_error(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(memory: Memory, nbytes: int) -> torch.Tensor:
        raise penstock.InsufficientMemoryError(cause="no more")

    with pool_of(files) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(Memory, "host_slab", refusing)
            use(pool, 0)
            check_books(pool)
            assert "has no master: no more" in str(pool.explain("m0"))
            assert not pool.explain("m0").components[0].on_host
            with pytest.raises(penstock.InsufficientMemoryError, match="no more"):
                pool.prefetch("m0", to="host").result(20)
            check_books(pool)
            module = layer()
            with pytest.raises(penstock.InsufficientMemoryError, match="no more"):
                pool.adopt("mine", module)
            check_books(pool)
        pool.adopt("mine", module)
        use(pool, 0)


def test_adopting_that_fails_half_way_leaves_the_modules_whole(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pipeline:
        components: ClassVar[dict[str, Any]] = {name: layer() for name in ("a", "b")}

    slabs = Memory.host_slab
    asked: list[int] = []

    def refusing(memory: Memory, nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        if len(asked) > 1:
            raise penstock.InsufficientMemoryError(cause="no more")
        return slabs(memory, nbytes)

    values = {name: module.weight.clone() for name, module in Pipeline.components.items()}
    with pool_of(files) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(Memory, "host_slab", refusing)
            with pytest.raises(penstock.InsufficientMemoryError):
                pool.adopt("half", Pipeline)
        check_books(pool)
        assert pool.stats().host_bytes == 0
        assert all(torch.equal(module.weight, values[name]) for name, module in Pipeline.components.items())
        pool.adopt("half", Pipeline)


@pytest.mark.parametrize("size", ["lots", -1, True, 1.5, None])
def test_what_is_no_size_is_refused(files: list[Path], size: Any) -> None:
    with pytest.raises(penstock.ConfigError, match="size"):
        ModelPool("cpu", host_budget=size)
    with pool_of(files) as pool:
        with pytest.raises(penstock.ConfigError, match="size"):
            pool.use("m0", workspace=size)
        if size is not None:
            with pytest.raises(penstock.ConfigError, match="size"):
                pool.resize(device=size)
        check_books(pool)


def test_names_and_levels_that_are_not_there(files: list[Path]) -> None:
    with pool_of(files) as pool:
        for call in (pool.use, pool.switch, pool.prefetch, pool.sleep, pool.unload, pool.pin, pool.explain):
            with pytest.raises(penstock.ConfigError, match="no model 'm9'"):
                call("m9")
        with pytest.raises(penstock.ConfigError, match="level"):
            pool.sleep("m0", level=3)  # type: ignore[arg-type]
        with pytest.raises(penstock.ConfigError, match="to="):
            pool.prefetch("m0", to="disk")  # type: ignore[arg-type]
        with pytest.raises(penstock.ConfigError, match="not in build"):
            pool.register("odd", {"a": files[0]}, build={})
        with pool.use("m0") as lease, pytest.raises(KeyError):
            lease["no such component"]
        with pytest.raises(penstock.ConfigError, match="has ended"):
            lease["net"]
        assert not [name for name in pool if name == "odd"]


def test_budgets_by_default_are_what_the_process_may_have() -> None:
    from penstock._native import spare_memory

    with ModelPool("cpu", reserve=0) as pool:
        assert 0 < pool.stats().host_budget <= (spare_memory() or 0)
        assert 0 < pool.stats().device_budget <= (spare_memory() or 0)


def test_adopting_takes_one_tensor_of_memory_above_the_model() -> None:
    program = """
import torch
from pathlib import Path
from penstock.pool import ModelPool
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith(field))
layers = [torch.nn.Linear(2048, 2048) for _ in range(16)]
module = torch.nn.Sequential(*layers)
with torch.no_grad():
    for parameter in module.parameters():
        parameter.fill_(1)
pool = ModelPool("cpu", host_budget="1GiB", device_budget="1GiB")
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
pool.adopt("m", module)
print(status("VmHWM") - before)
"""
    # MiB, of a model of 256 in tensors of 16.
    assert int(run(program)) <= 64


# Endings


def test_a_pool_that_nobody_has_any_more_ends_its_threads_and_modules_keep_their_memory(files: list[Path]) -> None:
    pool = pool_of(files)
    module = layer()
    value = module.weight.clone()
    pool.adopt("mine", module)
    use(pool, 0)
    before = [thread for thread in threading.enumerate() if thread.name.startswith("penstock-pool")]
    assert before
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    for thread in before:
        thread.join(10)
        assert not thread.is_alive()
    assert torch.equal(module.weight, value)


def test_closing_ends_futures_and_loads(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(files, models=1)
    lease = pool.use("m0")
    futures = [pool.prefetch("m1"), pool.prefetch("m2", to="host")]
    pool.close()
    assert all(future.done() for future in futures)
    with pytest.raises(penstock.LoadCancelledError):
        lease.wait()
    lease.close()
    with pytest.raises((penstock.LoadCancelledError, penstock.ConfigError)):
        pool.use("m0")


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


BEGIN = """
import os, sys, torch
from penstock.pool import ModelPool, default_pool
layer = lambda: torch.nn.Linear(256, 256, bias=False)
pool = ModelPool("cpu", host_budget="64MiB", device_budget="64MiB")
for number, file in enumerate(sys.argv[1:]):
    pool.register(f"m{number}", {"net": file}, build={"net": layer})
"""


def test_the_interpreter_ends_with_a_pool_alive_and_loads_under_way(files: list[Path]) -> None:
    program = BEGIN + "lease = pool.use('m0'); [pool.prefetch(name) for name in pool]; print('end')"
    assert run(program, *map(str, files)) == "end\n"


def test_a_forked_child_is_told_to_make_a_pool_of_its_own(files: list[Path]) -> None:
    program = (
        BEGIN
        + """
import penstock, threading
lease = pool.use("m0")
lease.wait()
mine = default_pool("cpu")
held, ended = threading.Event(), threading.Event()
def hold():
    with pool._movement.changed:
        held.set()
        ended.wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    said = 0
    for call in (pool.stats, lambda: pool.use("m0"), lambda: lease["net"], lambda: pool.resize(host=1)):
        try:
            call()
        except penstock.ConfigError:
            said += 1
    lease.close()
    pool.close()
    assert default_pool("cpu") is not mine
    os._exit(said)
ended.set()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    assert run(program, *map(str, files)) == "4\n"


# Figures


def test_stages_add_up_to_the_time_of_a_lease(files: list[Path]) -> None:
    told: list[tuple[str, Stages]] = []
    with pool_of(files, observe=lambda name, stages: told.append((name, stages))) as pool:
        began = time.monotonic()
        with pool.use("m0") as lease:
            lease.wait()
            time.sleep(0.05)
        took = time.monotonic() - began
        assert lease.stages.read > 0
        assert lease.stages.download == 0
        assert lease.stages.compute >= 0.05
        assert 0.8 * took <= lease.stages.total <= took
        assert told == [("m0", lease.stages)]
        use(pool, 0)
        assert told[1][1].read == told[1][1].switch == 0
        assert pool.stats().ended == 2
        assert pool.stats().stages.total == pytest.approx(sum(stages.total for _, stages in told))


def test_an_observer_that_raises_breaks_nothing(files: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    def observe(name: str, stages: Stages) -> None:
        raise ValueError(name)

    with pool_of(files, observe=observe) as pool:
        use(pool, 0)
        check_books(pool)
    assert "observes" in caplog.text


def test_workspace_is_learned_by_key() -> None:
    spaces = Workspaces()
    assert spaces.expected("a", 1) == 0
    for nbytes in (100, 300, 200):
        spaces.learn("a", 1, nbytes)
    spaces.learn("a", 2, 50)
    assert (spaces.expected("a", 1), spaces.expected("a", 2), spaces.expected("a", 3)) == (300, 50, 300)
    for _ in range(4):
        spaces.learn("a", 1, 10)
    assert spaces.expected("a", 1) == 10
    spaces.forget("a")
    assert spaces.expected("a", 1) == spaces.expected("b", 1) == 0


def test_a_use_keeps_the_workspace_free_that_was_learned(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(files, models=2) as pool:
        monkeypatch.setattr(Memory, "peak", lambda memory: NBYTES)
        with pool.use("m0", workspace="auto", key=(1024, 1024)):
            assert pool._requests.granted[0].workspace == 0
        use(pool, 1)
        with pool.use("m0", workspace="auto", key=(1024, 1024)) as lease:
            lease.wait()
            assert pool.stats().device_bytes == NBYTES


def test_streams_are_noted_and_mean_nothing_on_the_cpu(files: list[Path]) -> None:
    with pool_of(files) as pool, pool.use("m0") as lease:
        lease.record_stream(object())


# The process's own


@pytest.fixture
def default() -> Iterator[Any]:
    from penstock.pool import default as module

    module._pools.clear()
    yield penstock.default_pool
    for pool in list(module._pools.values()):
        pool.close()
    module._pools.clear()


def test_a_process_has_one_pool_for_a_device(default: Any) -> None:
    made: list[ModelPool] = []
    threads = [Thread(lambda: made.append(default("cpu"))) for _ in range(8)]
    assert [thread.ended() for thread in threads] == [None] * 8
    assert len(set(map(id, made))) == 1
    with pytest.raises(penstock.ConfigError, match="already"):
        default("cpu", host_budget=1)
    made[0].close()
    assert default("cpu", host_budget=1000).stats().host_budget == 1000
    assert os.getpid() == made[0]._process
