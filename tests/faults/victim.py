"""A process that loads a checkpoint while something fails, and says as JSON how that ended. Run by ``Victim``.

It loads once before the fault, so that what the first load of a process brings with it is no leftover, and once more
after it: the process must be able to load again.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

import penstock
from conftest import Remains
from faults import seccomp


def load(ckpt: penstock.Checkpoint, how: str) -> dict[str, Any]:
    if how == "into":
        fresh = {name: np.zeros(info.shape, np.uint8) for name, info in ckpt.items()}
        ckpt.load_into(fresh)
        return fresh
    if how == "stream":
        return dict(ckpt.stream(framework="np", options=penstock.LoadOptions(cache=CACHE, window_bytes=1 << 20)))
    if how == "prefault":
        return ckpt.load(framework="np", mmap=True, prefault=True)
    if how == "open":
        return dict(penstock.open([path for path, _ in ckpt.files]))
    return ckpt.load(framework="np")


def digests(loaded: dict[str, Any]) -> dict[str, str]:
    return {name: hashlib.sha256(np.ascontiguousarray(array)).hexdigest() for name, array in loaded.items()}


def described(error: BaseException) -> dict[str, Any]:
    fields = ("location", "tensor", "byte_range", "cause", "remedy", "errno")
    classes = [base.__name__ for base in type(error).__mro__]
    return {"classes": classes, "message": str(error)} | {field: getattr(error, field, None) for field in fields}


@contextmanager
def trouble(request: dict[str, Any]) -> Iterator[None]:
    """What is asked for, until the end of the block."""
    limits = {getattr(resource, f"RLIMIT_{name}"): value for name, value in request["limits"].items()}
    if resource.RLIMIT_AS in limits:
        limits[resource.RLIMIT_AS] += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if resource.RLIMIT_NOFILE in limits:
        limits[resource.RLIMIT_NOFILE] += max(int(fd) for fd in os.listdir("/proc/self/fd"))
    before = {which: resource.getrlimit(which) for which in limits}
    os.environ.update(request["faults"])
    for which, value in limits.items():
        resource.setrlimit(which, (value, before[which][1]))
    try:
        yield
    finally:
        for which, value in before.items():
            resource.setrlimit(which, value)
        for name in request["faults"]:
            del os.environ[name]


def main() -> None:
    request = json.loads(sys.argv[1])
    if request["forbid"]:
        # Before anything else: a filter is there before the program is.
        seccomp.forbid(request["forbid"])
    global CACHE  # noqa: PLW0603 - a program of one page
    CACHE = request["cache"]
    ckpt = penstock.open(request["paths"], options=penstock.LoadOptions(cache=CACHE, readers=request["readers"]))
    answer: dict[str, Any] = {}
    load(ckpt, request["how"])
    answer["stats_before"] = None if ckpt.stats is None else ckpt.stats.as_dict()
    gc.collect()
    before = Remains.now()
    ticks = 0
    ended = threading.Event()

    def tick() -> None:
        # Another thread of the program, which shall not notice.
        nonlocal ticks
        while not ended.wait(0.01):
            ticks += 1

    began = time.perf_counter()
    if request["interrupt_after"]:
        threading.Thread(target=tick).start()
        threading.Timer(request["interrupt_after"], os.kill, (os.getpid(), signal.SIGINT)).start()
    loaded: dict[str, Any] = {}
    error: dict[str, Any] | None = None
    try:
        with trouble(request):
            loaded = load(ckpt, request["how"])
    except (penstock.PenstockError, MemoryError, KeyboardInterrupt) as raised:
        error = described(raised)
    answer["error"] = error
    answer["seconds"] = time.perf_counter() - began
    ended.set()
    answer["ticks"] = ticks
    answer["stats"] = None if error or ckpt.stats is None else ckpt.stats.as_dict()
    if request["how"] == "open":
        answer["names"] = sorted(loaded)
    else:
        answer["digests"] = digests(loaded)
    loaded.clear()
    while threading.active_count() > 1:
        time.sleep(0.001)
    gc.collect()
    answer["remains"] = [list(before), list(Remains.now())]
    answer["again"] = digests(load(ckpt, "load"))
    sys.stdout.write(json.dumps(answer))


CACHE: Any = None

if __name__ == "__main__":
    main()
