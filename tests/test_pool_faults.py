"""Faults in a pool, wherever they come: the books stay exact, every byte stays right, and nobody waits for ever."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

import penstock
from penstock.pool import ModelPool
from penstock.pool import twins as of_twins
from penstock.pool.component import Component, Stored
from penstock.pool.memory import Memory
from pool_books import check_books

WIDTH = 64
NBYTES = 4 * WIDTH**2


def layer(value: float = 0) -> torch.nn.Module:
    made = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    with torch.no_grad():
        made.weight.fill_(value)
    return made


class Scaled(torch.nn.Module):
    """A layer with a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = layer(3)
        self.register_buffer("scale", torch.full((64,), 3.0), persistent=False)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for number, file in enumerate(made):
        safetensors_torch.save_file({"weight": torch.full((WIDTH, WIDTH), float(number))}, file)
    return made


def pool_of(files: list[Path], **budgets: int) -> ModelPool:
    pool = ModelPool("cpu", **{"host_budget": 1 << 24, "device_budget": 1 << 24} | budgets)
    for number, file in enumerate(files):
        pool.register(f"m{number}", {"net": file}, build={"net": layer})
    return pool


def first(pool: ModelPool, name: str) -> float:
    """The value of a model's weights on the device, which are all the same."""
    with pool.use(name) as lease:
        weight = next(iter(lease.values())).weight
        assert (weight == weight[0, 0]).all()
        return float(weight[0, 0].item())


def within(work: Any, seconds: float = 10) -> Any:
    """What this returns or raises, in another thread."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - it is the result
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, "it waits for ever"
    return outcome[0]


# Bytes


def test_buffers_outlive_the_adopted_twin_that_they_were_taken_from(tmp_path: Path) -> None:
    safetensors_torch.save_file(Scaled().state_dict(), tmp_path / "scaled.safetensors")
    with ModelPool("cpu", host_budget=1 << 24, device_budget=1 << 24) as pool:
        pool.adopt("adopted", Scaled())
        pool.register("stored", {"net": tmp_path / "scaled.safetensors"}, build={"net": Scaled})
        pool.switch("stored")
        pool.sleep("stored")
        with pool.use("adopted"), pool.use("stored") as lease:
            lease.wait()
        assert pool.explain("stored").components[0].used_by == ("adopted", "stored")
        pool.unload("adopted")
        for _ in range(3):
            pool.sleep("stored", level=2)
            dirty = torch.full((1 << 20,), 7.0)  # what the allocator gives next is not zero
            del dirty
            with pool.use("stored") as lease:
                assert (lease["net"].scale == 3).all()
        check_books(pool)


def test_a_change_of_a_change_has_both(files: list[Path]) -> None:
    class Two(torch.nn.Module):
        def __init__(self, one: float, other: float) -> None:
            super().__init__()
            self.one, self.other = layer(one), layer(other)

    with ModelPool("cpu", host_budget=1 << 24, device_budget=1 << 24) as pool:
        for name in "ab":
            pool.adopt(name, Two(1, 2))
        with pool.use("a") as lease, torch.no_grad():
            lease["model"].one.weight.fill_(5)
        pool.switch("a")
        check_books(pool)  # it has its master then
        pool.adopt("c", Two(5, 2))
        assert pool.explain("a").components[0].used_by == ("a", "c")
        with pool.use("a") as lease, torch.no_grad():
            lease["model"].other.weight.fill_(6)
        check_books(pool)
        for name, values in {"a": (5, 6), "b": (1, 2), "c": (5, 2)}.items():
            with pool.use(name) as lease:
                model = lease["model"]
                assert (model.one.weight[0, 0].item(), model.other.weight[0, 0].item()) == values, name
        for name in "abc":
            pool.unload(name)
            check_books(pool)


def test_a_change_stays_when_what_it_is_a_change_of_is_changed(files: list[Path]) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = layer(1), layer(2)

    with ModelPool("cpu", host_budget=1 << 24, device_budget=1 << 24) as pool:
        for name in "ab":
            pool.adopt(name, Two())
        for name, part, value in (("a", "one", 5), ("b", "other", 6)):
            with pool.use(name) as lease, torch.no_grad():
                getattr(lease["model"], part).weight.fill_(value)
            check_books(pool)
        for name, values in {"a": (5, 2), "b": (1, 6)}.items():
            pool.sleep(name, level=2)
            with pool.use(name) as lease:
                model = lease["model"]
                assert (model.one.weight[0, 0].item(), model.other.weight[0, 0].item()) == values, name
        for name in "ab":
            pool.unload(name)
            check_books(pool)
        assert pool.stats().host_bytes == 0


def test_modules_whose_adoption_failed_share_no_memory_with_the_pool(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pipeline:
        components: ClassVar[dict[str, Any]] = {"equal": layer(1), "other": layer(9)}

    def refusing(memory: Memory, nbytes: int) -> Any:
        raise penstock.InsufficientMemoryError(cause="no more")

    with pool_of(files) as pool:
        pool.prefetch("m1", to="host").result(10)
        with monkeypatch.context() as patch:
            patch.setattr(Memory, "growing_host_slab", refusing)
            with pytest.raises(penstock.InsufficientMemoryError):
                pool.adopt("half", Pipeline)
        check_books(pool)
        with torch.no_grad():
            Pipeline.components["equal"].weight.fill_(8)
        assert first(pool, "m1") == 1


def test_what_was_equal_and_was_changed_before_it_is_joined_is_not_joined(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pipeline:
        components: ClassVar[dict[str, Any]] = {"equal": layer(1), "other": layer(9)}

    with pool_of(files) as pool:
        pool.prefetch("m1", to="host").result(10)
        comparing = of_twins.Twins.find_of

        def changed_after(twins: Any, bound: Any) -> Any:
            found = comparing(twins, bound)
            if found is not None:
                with pool.use("m1") as lease, torch.no_grad():
                    lease["net"].weight.fill_(4)
            return found

        monkeypatch.setattr(of_twins.Twins, "find_of", changed_after)
        pool.adopt("mine", Pipeline)
        with pool.use("mine") as lease:
            assert lease["equal"].weight[0, 0].item() == 1
        assert first(pool, "m1") == 4
        check_books(pool)


# Errors


def test_shared_weights_that_cannot_be_restored_are_the_error_of_who_asks_and_of_no_one_else(
    files: list[Path],
) -> None:
    with pool_of(files) as pool:
        pool.register("same", {"net": files[0]}, build={"net": layer})
        pool.prefetch("m0", to="host").result(10)
        module = pool._models["m0"].bounds["net"].module
        content = files[0].read_bytes()
        files[0].unlink()
        with torch.no_grad():
            module.weight.fill_(7)
        assert isinstance(within(lambda: pool.use("same")), penstock.PenstockError)
        check_books(pool)
        assert within(lambda: first(pool, "m1")) == 1, "others go on"
        files[0].write_bytes(content)
        check_books(pool)


def test_a_request_that_meets_a_fault_does_not_keep_others_from_theirs(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.pool import turns as of_turns

    with pool_of(files) as pool:
        pool.switch("m0")
        check_books(pool)  # it has its master then
        module = pool._models["m0"].bounds["net"].module
        with torch.no_grad():
            module.weight.fill_(7)

        def refusing(movement: Any, bound: Any) -> bool:
            raise MemoryError("no more")

        with monkeypatch.context() as patch:
            patch.setattr(of_turns, "keep_changes", refusing)
            assert isinstance(within(lambda: pool.use("m0")), MemoryError)
            assert isinstance(within(lambda: pool.prefetch("m0").result(5)), MemoryError)
            assert within(lambda: first(pool, "m1")) == 1
        assert first(pool, "m0") == 7
        within(lambda: pool.sleep("m0"))
        check_books(pool)


def test_a_failed_load_keeps_no_memory(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[bool] = []

    def failing(stored: Stored, views: Any, watch: Any) -> None:
        view = next(iter(views.values()))
        weakref.finalize(view, released.append, True)
        raise OSError("the disk")

    with pool_of(files) as pool:
        monkeypatch.setattr(Stored, "read", failing)
        with pool.use("m0") as lease, pytest.raises(OSError, match="the disk"):
            lease.wait()
        gc.collect()
        assert released, "the error that is kept has the frames that had the slab"


def test_a_thread_that_cannot_start_is_an_error_and_changes_nothing(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    with pool_of(files) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refusing)
            for call in (pool.use, pool.switch, pool.pin, pool.prefetch):
                with pytest.raises(penstock.PenstockError, match="thread"):
                    call("m0")
        check_books(pool)
        assert first(pool, "m0") == 0


def test_a_lease_that_another_thread_closes_ends_the_wait_for_its_components(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, reading = threading.Event(), threading.Event()
    read = Stored.read

    def slow(stored: Stored, views: Any, watch: Any) -> None:
        reading.set()
        go_on.wait(20)
        read(stored, views, watch)

    with pool_of(files) as pool:
        monkeypatch.setattr(Stored, "read", slow)
        lease = pool.use("m0")
        outcome: list[Any] = []
        thread = threading.Thread(target=lambda: outcome.append(within(lambda: lease["net"], 8)), daemon=True)
        thread.start()
        assert reading.wait(10)
        time.sleep(0.05)
        lease.close()
        go_on.set()
        thread.join(10)
        assert outcome
        assert isinstance(outcome[0], penstock.ConfigError)
        check_books(pool)


def test_a_prefetch_keeps_its_pool_until_it_is_done(files: list[Path]) -> None:
    future = pool_of(files).prefetch("m0")
    gc.collect()
    assert future.result(10) is None
    waiting = []
    pool = pool_of(files, device_budget=NBYTES)
    lease = pool.use("m0")
    waiting.append(pool.prefetch("m1"))
    del pool
    gc.collect()
    lease.close()
    assert waiting[0].result(10) is None


def test_a_model_may_be_called_like_a_pin(files: list[Path]) -> None:
    with pool_of(files) as pool:
        pool.register("m0 (pinned)", {"net": files[1]}, build={"net": layer})
        with pool.use("m0 (pinned)"):
            with pytest.raises(penstock.ConfigError, match="not pinned"):
                pool.unpin("m0")
            pool.unload("m0")
        check_books(pool)


def test_a_registration_that_fails_at_its_end_adds_nothing(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Component] = []
    with pool_of(files) as pool:

        def failing(one: Component, other: Component) -> bool:
            asked.append(one)
            if len(asked) > 4:
                raise OSError("no stat")
            return False

        before = pool.stats()
        with monkeypatch.context() as patch:
            patch.setattr(Component, "is_equal", failing)
            with pytest.raises(OSError, match="no stat"):
                pool.register("two", {"a": files[0], "b": files[1]}, build={"a": layer, "b": layer})
        check_books(pool)
        assert "two" not in pool
        assert pool.stats() == before


# Endings


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_pool_that_a_forked_child_collects_takes_no_lock(files: list[Path]) -> None:
    program = """
import gc, os, signal, sys, threading, torch
from penstock.pool import ModelPool
pool = ModelPool("cpu", host_budget="64MiB", device_budget="64MiB")
pool.register("m", {"net": sys.argv[1]}, build={"net": lambda: torch.nn.Linear(64, 64, bias=False)})
pool.switch("m")
held, ended = threading.Event(), threading.Event()
def hold(lock):
    with lock:
        held.set()
        ended.wait()
threading.Thread(target=hold, args=[pool._movement._copier._changed], daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(10)
    del pool
    gc.collect()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
ended.set()
"""
    assert run(program, str(files[0])) == "0\n"


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_who_waits_for_room_is_interrupted_at_once(files: list[Path], number: str) -> None:
    program = """
import os, signal, sys, threading, time, torch
from penstock.pool import ModelPool
from pool_books import check_books
pool = ModelPool("cpu", host_budget="64MiB", device_budget=64 * 64 * 4)
for name, file in zip("ab", sys.argv[2:]):
    pool.register(name, {"net": file}, build={"net": lambda: torch.nn.Linear(64, 64, bias=False)})
number = getattr(signal, sys.argv[1])
signal.signal(number, signal.default_int_handler)
held = threading.Event()
def hold():
    with pool.use("b") as lease:
        lease["net"]
        held.set()
        while not pool.stats().waiting:
            time.sleep(0.01)
        os.kill(os.getpid(), number)
        while pool.stats().waiting:
            time.sleep(0.01)
thread = threading.Thread(target=hold, daemon=True)
thread.start()
held.wait()
try:
    pool.use("a")
except KeyboardInterrupt:
    print("interrupted")
thread.join(20)
assert signal.getsignal(number) is signal.default_int_handler
check_books(pool)
pool.use("a").close()
"""
    assert run(program, number, *map(str, files)) == "interrupted\n"


def test_a_child_that_another_thread_forks_meanwhile_takes_signals(files: list[Path]) -> None:
    program = """
import os, signal, sys, threading, time
from penstock.pool.lock import Lock
lock, codes = Lock(), []
def fork():
    child = os.fork()
    if child == 0:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            os._exit(7)
        os._exit(1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
with lock:
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join(20)
print(codes)
"""
    assert run(program) == "[7]\n"


def test_an_interrupted_comparison_holds_nothing(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipeline:
        components: ClassVar[dict[str, Any]] = {"one": layer(1), "two": layer(2)}

    comparing = of_twins.same_bits
    calls: list[int] = []

    def interrupted(one: Any, other: Any) -> bool:
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return comparing(one, other)

    with pool_of(files) as pool:
        for name in ("m0", "m1", "m2"):
            pool.prefetch(name, to="host").result(10)
        with monkeypatch.context() as patch:
            patch.setattr(of_twins, "same_bits", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.adopt("mine", Pipeline)
        check_books(pool)
        within(lambda: pool.unload("m1"))
        pool.adopt("mine", Pipeline)
        check_books(pool)


INTERRUPTED = """
import os, signal, sys, threading, torch, safetensors.torch
from pathlib import Path
import penstock
from penstock.pool import ModelPool
from pool_books import check_books

WIDTH = 64
what, step, files = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
where = str(Path(penstock.pool.__file__).parent)


def layer(value=0.0):
    made = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    with torch.no_grad():
        made.weight.fill_(value)
    return made


def use(pool, name):
    with pool.use(name) as lease:
        assert lease["net"].weight[0, 0].item() == float(name[-1])


def write(pool, name):
    with pool.use(name) as lease, torch.no_grad():
        lease["net"].weight.fill_(float(name[-1]))


operations = {
    "use": lambda pool: pool.use("m0").close(),
    "lease": lambda pool: use(pool, "m1"),
    "write": lambda pool: write(pool, "m1"),
    "switch": lambda pool: pool.switch("m1"),
    "pin": lambda pool: pool.pin("m1"),
    "sleep": lambda pool: pool.sleep("m0", level=2),
    "unload": lambda pool: pool.unload("m0"),
    "register": lambda pool: pool.register("new", {"net": files[2]}, build={"net": layer}),
    "adopt": lambda pool: pool.adopt("adopted", torch.nn.Sequential(layer(7), layer(8))),
    "resize": lambda pool: pool.resize(device=WIDTH * WIDTH * 4, host=1 << 20),
    "prefetch": lambda pool: pool.prefetch("m1").result(20),
    "close": lambda pool: pool.close(),
    "merge": lambda pool: pool.set_adapters("m0", ["a"], merge=True),
    "branch": lambda pool: pool.set_adapters("m0", ["a"]),
    "branches": lambda pool: use(pool, "m0"),
    "unload_adapter": lambda pool: pool.unload_adapter("m0", "a"),
}
# Of which the first row and column are nothing.
half = torch.arange(WIDTH).float()
lora = str(Path(files[0]).with_name("lora.safetensors"))
safetensors.torch.save_file({"net.lora_A.weight": half[None], "net.lora_B.weight": half[:, None].clone()}, lora)
# A call that has its result, and one that has not begun, cannot know.
outside = {("use", "return"), ("pin", "return")}
outside |= {(name, event) for name in ("__exit__", "close") for event in ("call", "line")}
outside |= {("__enter__", event) for event in ("call", "line", "return")}


class Interrupt:
    def __init__(self, number):
        self.number, self.seen, self.at = number, 0, None

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(where):
            return None
        self.seen += 1
        if self.seen == self.number:
            self.at = frame.f_code.co_name, event
            signal.raise_signal(signal.SIGINT)
        return self


def check(pool):
    if what == "close":
        pool.close()
        assert not [one for one in threading.enumerate() if one.name.startswith("penstock-pool")]
        return
    check_books(pool)
    for name in [one for one in pool if one.startswith("m")]:
        use(pool, name)
    check_books(pool)


number, failed = 1, []
while True:
    pool = ModelPool("cpu", host_budget=1 << 22, device_budget=int(1.5 * WIDTH * WIDTH * 4))
    for model in range(2):
        pool.register(f"m{model}", {"net": files[model]}, build={"net": layer})
    pool.load_adapter("m0", lora, name="a")
    if what == "branches":
        pool.set_adapters("m0", ["a"])
        pool.sleep("m0")
    elif what == "unload_adapter":
        pool.set_adapters("m0", ["a"], merge=True)
    pool.switch("m0")
    interrupt = Interrupt(number)
    sys.settrace(interrupt)
    raised = False
    try:
        operations[what](pool)
    except KeyboardInterrupt:
        raised = True
    finally:
        sys.settrace(None)
    if not interrupt.at:
        break
    for left in list(pool._requests.granted):
        if raised and interrupt.at not in outside:
            failed.append((interrupt.at, "left", left.name))
        pool._requests.drop(left)
    errors = []
    def guarded():
        try:
            check(pool)
        except BaseException as error:
            errors.append(error)
    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(20)
    if thread.is_alive():
        print("it hangs after", interrupt.at, flush=True)
        os._exit(1)
    failed += [(interrupt.at, repr(error)) for error in errors]
    pool.close()
    number += step
print(number, failed)
assert not failed
"""
OPERATIONS = ["use", "lease", "write", "switch", "pin", "prefetch"]
OPERATIONS += ["sleep", "unload", "register", "adopt", "resize", "close"]
OPERATIONS += ["merge", "branch", "branches", "unload_adapter"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_ctrl_c_anywhere_leaves_a_pool_that_works(files: list[Path], operation: str) -> None:
    interrupt_at_every(29, operation, files)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_ctrl_c_at_every_line_leaves_a_pool_that_works(files: list[Path], operation: str) -> None:
    interrupt_at_every(1, operation, files)


def interrupt_at_every(step: int, operation: str, files: list[Path]) -> None:
    said = run(INTERRUPTED, operation, str(step), *map(str, files))
    # So many lines at least: it was interrupted at all.
    assert int(said.split()[0]) > 50
