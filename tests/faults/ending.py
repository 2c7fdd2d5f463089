"""A process whose load is ended while its storage is slow or hangs, and that says as JSON how that went.

Run under the fault-injecting library, with what is to happen, the path of a file to hold reads by, and the checkpoint's
paths. Where something waits for ever, so does this: the test has a timeout.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock
from penstock.errors import LoadCancelledError


def outcome(act: Callable[[], Any]) -> str:
    try:
        act()
    except LoadCancelledError:
        return "LoadCancelledError"
    return "nothing raised"


def in_thread(act: Callable[[], Any]) -> tuple[threading.Thread, list[str]]:
    """A thread that does it, and how that ended."""
    ended: list[str] = []
    thread = threading.Thread(target=lambda: ended.append(outcome(act)))
    thread.start()
    return thread, ended


class Held:
    """Reads that wait until they are let go."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.touch()
        os.environ["FAULT_HOLD"] = str(file)

    def wait(self) -> None:
        """Until one does."""
        while not Path(f"{self._file}.held").exists():
            time.sleep(0.001)

    def let_go(self) -> None:
        self._file.unlink()


def session_of(ckpt: penstock.Checkpoint) -> Any:
    session = ckpt._native.session(None, {}, "slab", penstock.LoadOptions(readers=2, block_bytes=65_536))
    session.attach_slab(len(ckpt))
    return session


def stop_while_waiting(ckpt: penstock.Checkpoint, file: Path) -> list[str]:
    """One thread waits, another stops the load, whose reads hang."""
    held = Held(file)
    session = session_of(ckpt)
    held.wait()

    def wait_for_all() -> None:
        while session.wait():
            pass

    waiter, told = in_thread(wait_for_all)
    stopper, stopped = in_thread(session.stop)
    waiter.join()
    # The one that stops it still has the session, as reads are still under way.
    attached = outcome(lambda: session.attach_slab(0))
    assert stopper.is_alive()
    held.let_go()
    stopper.join()
    return [*told, attached, *stopped, outcome(session.wait)]


def cancel(ckpt: penstock.Checkpoint, _: Path) -> list[str]:
    """A thread iterates, another cancels."""
    os.environ["FAULT_HANG"] = "30"
    load = ckpt.begin(ckpt.offset_keys(), "cpu", "np")
    begun = threading.Event()

    def iterate() -> None:
        stream = load.stream(1 << 30)
        begun.set()
        list(stream)

    waiter, told = in_thread(iterate)
    begun.wait()
    time.sleep(0.1)
    load.cancel()
    waiter.join()
    return told


def close_supply(ckpt: penstock.Checkpoint, _: Path) -> list[str]:
    """An engine's supply of tensors is closed while one thread drives it and another waits for a tensor."""
    from penstock.supply.streamed import Supply, one_group

    os.environ["FAULT_HANG"] = "30"
    supply = Supply(ckpt, one_group(ckpt), "cpu")
    supply.begin()
    waiter, told = in_thread(lambda: supply.take(ckpt.offset_keys()[-1]))
    time.sleep(0.1)
    supply.close()
    waiter.join()
    return [*told, str(supply.failure)]


def abandon(ckpt: penstock.Checkpoint, file: Path) -> list[str]:
    """The last reference to a session goes while a read hangs, which only another Python thread can end."""
    held = Held(file)
    session = session_of(ckpt)
    held.wait()
    going = threading.Event()

    def rescue() -> None:
        going.wait()
        # Long enough for the other thread to get where it waits; then this needs the GIL.
        time.sleep(0.3)
        held.let_go()

    thread = threading.Thread(target=rescue)
    thread.start()
    going.set()
    del session
    thread.join()
    return ["came back"]


def main() -> None:
    what, file, *paths = sys.argv[1:]
    ckpt = penstock.open(paths, options=penstock.LoadOptions(readers=2, block_bytes=4096))
    ways = {way.__name__: way for way in (stop_while_waiting, cancel, close_supply, abandon)}
    sys.stdout.write(json.dumps(ways[what](ckpt, Path(file))))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
