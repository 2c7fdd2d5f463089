"""One of several ranks that load a model together, as a process: for ``test_sharing.py``.

    python ranks.py RANK RANKS STORE MODEL SETTINGS

Prints one line of JSON: checksums of what was loaded, Penstock's figures, what went wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

import penstock
from penstock.recording import Peers, Recorder, Sharing, exchange, shares, sharing


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


def spoil(wrong: str) -> None:
    """Makes this rank unable to do something, once."""

    def fails(why: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise RuntimeError(why)

        return call

    def later(original: Any, good: int, failure: Any) -> Any:
        calls = 0

        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            return failure() if calls == good + 1 else original(*arguments, **named)

        return call

    if wrong == "cannot propose":
        sharing._Table.proposal = fails("no reach")  # type: ignore[method-assign]
    elif wrong == "cannot plan":
        sharing.plan = fails("no plan")
    elif wrong.startswith("cannot read"):

        def broken() -> Future[None]:
            future: Future[None] = Future()
            future.set_exception(penstock.StorageError("the disk is broken"))
            return future

        original = exchange.Exchange.__init__

        def init(self: Any, *arguments: Any) -> None:
            original(self, *arguments)
            self._read = later(self._read, 2 * ("later" in wrong), broken)

        exchange.Exchange.__init__ = init  # type: ignore[method-assign]
    elif wrong == "cannot take":
        exchange._Arriving.came = later(exchange._Arriving.came, 3, fails("no place"))  # type: ignore[method-assign]
    elif wrong == "is interrupted":
        exchange.Exchange.run = later(exchange.Exchange.run, 0, interrupts)  # type: ignore[method-assign]


def interrupts() -> None:
    raise KeyboardInterrupt


def run(rank: int, ranks: int, model: str, case: dict[str, Any]) -> dict[str, Any]:
    shares.UNIT_BYTES = case.get("unit_bytes", shares.UNIT_BYTES)
    shares.BATCH_BYTES = case.get("batch_bytes", shares.BATCH_BYTES)
    shares.LEAST_BYTES = 1 << 10
    wrong = case.get("wrong", "")
    spoil(wrong)
    if wrong == "dies":
        os._exit(0)
    together = Sharing(Peers(distributed.group.WORLD), always=case.get("always", False))
    checkpoint = penstock.open(case.get("model", model))
    recorder = Recorder(sharing=together if case.get("sharing", True) else None)
    memory, loads = memory_of(checkpoint, rank, ranks)
    found: dict[str, Any] = {}
    try:
        if wrong == "never records":
            together.withdraw("it does not record")
        else:
            with recorder:
                loads(recorder.weights(checkpoint))
                if wrong.startswith("raises"):
                    raise ValueError("a model's own")  # noqa: TRY301 - as loading code does
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - it is what the test looks at
        found["error"] = f"{type(error).__name__}: {error}"
    found["sums"] = sums_of(memory)
    threads = [thread for thread in threading.enumerate() if "penstock" in thread.name]
    return {**recorder.statistics.as_dict(), **found, "threads": len(threads)}


def main() -> None:
    rank, ranks, store, model, case = sys.argv[1:]
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(store, int(ranks)),
        rank=int(rank),
        world_size=int(ranks),
        timeout=timedelta(seconds=60),
    )
    # All are there before any may go.
    distributed.barrier()
    if json.loads(case).get("wrong") == "dies":
        print("{}", flush=True)
    found = run(int(rank), int(ranks), model, json.loads(case))
    print(json.dumps(found), flush=True)
    # Another that is still talking is not to see this one go.
    os._exit(0)


if __name__ == "__main__":
    main()
