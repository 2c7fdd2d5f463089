"""Code of the program that a pool calls, handlers of logging and of signals: none meets the pool's lock."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from penstock.pool import ModelPool
from penstock.pool import lock as of_lock
from pool_books import check_books
from pool_models import layer, pool_of, use, write_files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_files(tmp_path_factory.mktemp("pool"))


class Handler(logging.Handler):
    """Notes what the pool logs, whether its lock was held then, and does what a test wants besides."""

    def __init__(self, pool: ModelPool, then: Callable[[], object]) -> None:
        super().__init__()
        self._lock, self._then = pool._movement.changed._lock, then
        self.said: list[str] = []
        self.locked: list[bool] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        self.locked.append(self._lock._is_owned())
        self._then()


@pytest.fixture
def handle(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., Handler]]:
    """Adds a handler to the pool's loggers."""
    logger, added = logging.getLogger("penstock.pool"), []
    caplog.set_level(logging.INFO, logger.name)

    def add(pool: ModelPool, then: Callable[[], object] = lambda: None) -> Handler:
        added.append(Handler(pool, then))
        logger.addHandler(added[-1])
        return added[-1]

    yield add
    for handler in added:
        logger.removeHandler(handler)


def everything_that_is_logged(pool: ModelPool, files: list[Path], same: Path) -> None:
    """A return to the device, a master that is read again, changes of what is shared and of what is not, a merge."""
    for number in (0, 1, 0):
        use(pool, number)
        check_books(pool)
    pool.sleep("m0", level=2)
    use(pool, 0)
    pool.register("twin", {"net": files[0]}, build={"net": layer})
    with pool.use("twin") as lease, torch.no_grad():
        lease["net"].weight.fill_(7)
    check_books(pool)
    same.write_bytes(files[2].read_bytes())
    pool.register("same", {"net": same}, build={"net": layer})
    for name in ("m2", "same"):
        pool.prefetch(name, to="host").result(10)
    check_books(pool)


def test_nothing_is_logged_with_the_lock_held(
    files: list[Path], tmp_path: Path, handle: Callable[..., Handler]
) -> None:
    with pool_of(files, models=1) as pool:
        handler = handle(pool)
        everything_that_is_logged(pool, files, tmp_path / "same.safetensors")
    for what in ("is copied to", "is fetched for", "has its own now", "they are one"):
        assert any(what in said for said in handler.said), what
    assert not any(handler.locked)


def test_a_handler_that_waits_for_another_thread_which_uses_the_pool_ends(
    files: list[Path], handle: Callable[..., Handler]
) -> None:
    with pool_of(files, models=1) as pool:
        hang: list[bool] = []

        def ask() -> None:
            thread = threading.Thread(target=pool.stats, daemon=True)
            thread.start()
            thread.join(5)
            hang.append(thread.is_alive())

        handler = handle(pool, ask)
        for number in (0, 1, 0):
            use(pool, number)
            check_books(pool)
        assert handler.said
        assert not any(hang)


def test_a_handler_that_raises_breaks_nothing(
    files: list[Path], handle: Callable[..., Handler], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise ValueError("no room for a line")

    with pool_of(files, models=1) as pool:
        handler = handle(pool, refuse)
        for number in (0, 1, 0):
            use(pool, number)
            check_books(pool)
        assert handler.said
    assert "no room for a line" in capsys.readouterr().err


def test_what_waits_to_be_logged_is_logged_before_a_thread_waits() -> None:
    lock, said = of_lock.Lock(), []
    entered = threading.Event()

    def wait() -> None:
        with lock, lock:
            lock.later(said.append, lock)
            entered.set()
            lock.wait()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert entered.wait(10)
    while not said:
        thread.join(0.01)
    with lock:
        lock.notify_all()
    thread.join(10)
    assert not thread.is_alive()


def test_each_signal_that_was_held_back_is_told_though_the_first_one_raises() -> None:
    told: list[int] = []

    def note(number: int, frame: object) -> None:
        told.append(number)
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)

    def hold_back(numbers: tuple[int, ...]) -> None:
        with of_lock.deferred():
            for number in numbers:
                os.kill(os.getpid(), number)
            assert not told

    before = [signal.signal(number, note) for number in numbers]
    try:
        with pytest.raises(KeyboardInterrupt):
            hold_back(numbers)
        assert sorted(told) == sorted(numbers)
        assert [signal.getsignal(number) for number in numbers] == [note, note]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
