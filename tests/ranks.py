"""One of several ranks that load a model together, as a process: for ``test_sharing.py``.

    python ranks.py RANK RANKS STORE '[SETTINGS, …]'

Prints a line of JSON for each of its settings: checksums of what was loaded, Penstock's figures, what went wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

import penstock
from penstock.distributed import Peers, Sharing, exchange, plan, sharing
from penstock.progress import SharedProgress
from penstock.recording import Recorder


def memory_of(checkpoint: penstock.Checkpoint, rank: int, ranks: int) -> tuple[dict[str, torch.Tensor], Any]:
    """The parameters of one rank, and the code that loads them: rows, columns, experts, all, and other dtypes."""

    def part(name: str, dimension: int) -> tuple[int, int]:
        size = checkpoint[name].shape[dimension]
        return size * rank // ranks, size * (rank + 1) // ranks

    memory: dict[str, torch.Tensor] = {}

    def loads(weights: Any) -> None:
        for name, weight in weights:
            if name in {"norm", "router"}:
                memory[name] = torch.zeros(weight.shape)
                memory[name].copy_(weight)
                continue
            dimension = {"up": 0}.get(name, weight.dim() - 1)
            start, end = part(name, dimension)
            shard = weight.narrow(dimension, start, end - start)
            if name == "cast":
                memory[name] = torch.zeros(shard.shape, dtype=torch.float16)
            elif name == "down":
                # Beside another in a fused parameter: its rows are a part that lies together.
                memory[name] = torch.zeros((shard.shape[0] + 8, shard.shape[1]), dtype=weight.dtype)
                memory[name].narrow(0, 4, shard.shape[0]).copy_(shard)
                continue
            elif name == "last":
                memory[name] = torch.zeros((shard.shape[1], shard.shape[0]), dtype=weight.dtype)
                memory[name].copy_(shard.t())
                continue
            else:
                memory[name] = torch.zeros(shard.shape, dtype=weight.dtype)
            memory[name].copy_(shard)

    return memory, loads


def sums_of(memory: dict[str, torch.Tensor]) -> dict[str, str]:
    """A checksum of every parameter."""
    return {
        name: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in sorted(memory.items())
    }


@contextmanager
def spoiled(wrong: str) -> Iterator[None]:
    """Makes this rank unable to do something for a while."""

    def fails(why: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise RuntimeError(why)

        return call

    def at(number: int, original: Any, failure: Any) -> Any:
        calls = 0

        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            return failure(*arguments, **named) if calls == number else original(*arguments, **named)

        return call

    def broken(*_: Any) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(penstock.StorageError("the disk is broken"))
        return future

    advance = SharedProgress.advance

    def shown(self: Any, nbytes: int) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        advance(self, nbytes)

    def signalled(original: Any) -> Any:
        def first(*arguments: Any, **named: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            return original(*arguments, **named)

        return at(1, original, first)

    original = exchange.Exchange.__init__

    def init(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        self._read = at(3 if "later" in wrong else 1, self._read, broken)

    made_ready = exchange.Exchange._made_ready
    changes: dict[str, tuple[Any, str, Any]] = {
        "cannot propose": (sharing._Table, "proposal", fails("no reach")),
        "cannot plan": (sharing, "make_plan", fails("no plan")),
        "cannot read": (exchange.Exchange, "__init__", init),
        "cannot read later": (exchange.Exchange, "__init__", init),
        "cannot take": (exchange._Arriving, "arrived", at(4, exchange._Arriving.arrived, fails("no place"))),
        "raises without threads": (threading.Thread, "start", fails("can't start new thread")),
        "is interrupted while it shows progress": (SharedProgress, "advance", shown),
        "is interrupted while it reads": (exchange.Exchange, "_made_ready", at(2, made_ready, interrupts)),
        "is interrupted while it hands on": (Peers, "_messages", signalled(Peers._messages)),
        "is interrupted while it answers": (distributed, "all_reduce", signalled(distributed.all_reduce)),
        "is interrupted while it plans": (sharing, "make_plan", interrupts),
        "is interrupted": (exchange.Exchange, "run", at(1, exchange.Exchange.run, interrupts)),
    }
    if wrong not in changes:
        yield
        return
    owner, name, replacement = changes[wrong]
    before = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Counted:
    """torch, as far as ``exchange`` knows it, that counts the bytes of tensors which live at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *arguments: Any, **named: Any) -> torch.Tensor:
        tensor = torch.empty(*arguments, **named)
        self._add(tensor.nbytes)
        weakref.finalize(tensor, self._add, -tensor.nbytes)
        return tensor

    def _add(self, nbytes: int) -> None:
        with self._lock:
            self.now += nbytes
            self.most = max(self.most, self.now)


def interrupts(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def run(rank: int, ranks: int, case: dict[str, Any]) -> dict[str, Any]:
    plan.UNIT_BYTES = case.get("unit_bytes", 64 << 20)
    plan.BATCH_BYTES = case.get("batch_bytes", 320 << 20)
    plan.LEAST_BYTES = 1 << 10
    wrong = case.get("wrong", "")
    if wrong == "dies":
        os._exit(0)
    together = Sharing(Peers(distributed.group.WORLD), always=case.get("always", False))
    checkpoint = penstock.open(case["model"])
    recorder = Recorder(sharing=together if case.get("sharing", True) else None)
    memory, loads = memory_of(checkpoint, rank, ranks)
    found: dict[str, Any] = {}
    counted = Counted()
    exchange.torch = counted
    try:
        if wrong == "never records":
            together.opt_out("it does not record")
        else:
            with spoiled(wrong), recorder:
                loads(recorder.weights(checkpoint))
                if wrong.startswith("raises"):
                    raise ValueError("a model's own")  # noqa: TRY301 - as loading code does
                if wrong == "is stopped while loading":
                    raise KeyboardInterrupt  # noqa: TRY301
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - it is what the test looks at
        found["error"] = f"{type(error).__name__}: {error}"
    found["sums"] = sums_of(memory)
    threads = [thread for thread in threading.enumerate() if "penstock" in thread.name]
    return {**recorder.statistics.as_dict(), **found, "threads": len(threads), "most_held": counted.most}


def main() -> None:
    rank, ranks, store, cases = sys.argv[1:]
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(store, int(ranks)),
        rank=int(rank),
        world_size=int(ranks),
        timeout=timedelta(seconds=60),
    )
    # All are there before any may go.
    distributed.barrier()
    for case in json.loads(cases):
        print(json.dumps(run(int(rank), int(ranks), case)), flush=True)
    # Another that is still talking is not to see this one go in an orderly way.
    os._exit(0)


if __name__ == "__main__":
    main()
