"""Ranks of a tensor-parallel model, reading each for itself and all together: seconds, bytes read, GPU memory.

Layers of Llama-3-8B's shapes are loaded in a process for each rank as tensor parallelism does: rows of some matrices,
columns of ``o_proj`` and ``down_proj``, whose bytes are checked against safetensors in the first round. A rank loads
once before its clock, so that its communicators exist.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.bench import data, processes, states
from penstock.bench.schedule import Axes, Schedule

from . import IMPORTABLE, Experiment

HIDDEN, INNER, KEYS = 4096, 14336, 1024
ROWS = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (KEYS, HIDDEN), "v_proj": (KEYS, HIDDEN), "gate_proj": (INNER, HIDDEN)}
ROWS["up_proj"] = (INNER, HIDDEN)
COLUMNS = {"o_proj": (HIDDEN, HIDDEN), "down_proj": (HIDDEN, INNER)}


class Ranks:
    """Ranks that begin together for each measurement."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.files: list[Path] = []

    def stages(self) -> list[str]:
        return ["layers"]

    @contextlib.contextmanager
    def stage(self, name: str, schedule: Schedule) -> Iterator[None]:
        for layer in range(self.options.layers):
            path = self.options.directory / f"model-{layer:05}.safetensors"
            shapes: dict[str, tuple[int, ...]] = {**ROWS, **COLUMNS, "norm": (HIDDEN,)}
            if not path.exists():
                data.write_checkpoint(path, {f"layers.{layer}.{key}": of for key, of in shapes.items()}, seed=layer)
            self.files.append(path)
        size = sum(path.stat().st_size for path in self.files)
        schedule.add_case(name, {"bytes": size, "tensors": 8 * len(self.files), "files": len(self.files)})
        yield

    def groups(self, stage: str, number: int) -> list[list[Axes]]:
        del number
        ways = ("apart", "together")
        return [[{"case": stage, "state": state, "loader": way} for way in ways] for state in self.options.states]

    def measure(self, axes: Axes, number: int, seconds: float) -> dict[str, Any]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        task = {
            "do": __name__,
            "ranks": self.options.ranks,
            "port": port,
            "files": [str(path) for path in self.files],
            "state": axes["state"],
            "together": axes["loader"] == "together",
            "check": number == 0,
            "device": self.options.device,
        }
        tasks = [task | {"rank": rank} for rank in range(self.options.ranks)]
        found = processes.run_together(tasks, self.work, seconds=seconds, env=IMPORTABLE)
        right = all(rank.get("right", True) for rank in found)
        checks = {"bytes_ok": right, "wrong": [] if right else ["columns"]} if number == 0 else {}
        read = sum(rank["read_bytes"] for rank in found)
        return checks | {
            "seconds": max(rank["seconds"] for rank in found),
            "bytes": sum(path.stat().st_size for path in self.files),
            "read_bytes": read,
            "gpu_peak_torch": max(rank.get("peak_bytes", 0) for rank in found),
            "cache": {"before": found[0]["cached"]},
            "ranks": found,
        }


# ---- what runs in the process of a rank


def part(size: int, rank: int, ranks: int) -> tuple[int, int]:
    return size // ranks * rank, size // ranks


def load(files: list[str], case: dict[str, Any], peers: Any, device: Any) -> dict[str, Any]:
    """One load of one rank."""
    import torch
    from safetensors import safe_open
    from torch import distributed

    import penstock
    from penstock.distributed import Sharing
    from penstock.recording import Recorder

    rank, ranks = peers.rank, peers.size
    checkpoint = penstock.open(files)
    memory = {}
    for name in checkpoint:
        shape = list(checkpoint[name].shape)
        kind = name.rpartition(".")[2]
        if kind != "norm":
            shape[kind in COLUMNS] //= ranks
        memory[name] = torch.empty(shape, dtype=torch.bfloat16, device=device)
    sharing = Sharing(peers, always=True) if case["together"] else None
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    distributed.barrier(group=peers._control)
    began = time.perf_counter()
    with Recorder(device, sharing=sharing) as recorder, torch.no_grad():
        for name, weight in recorder.weights(checkpoint):
            kind = name.rpartition(".")[2]
            dimension = int(kind in COLUMNS)
            shard = weight if kind == "norm" else weight.narrow(dimension, *part(weight.shape[dimension], rank, ranks))
            memory[name].copy_(shard)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    found = {"seconds": seconds, **recorder.statistics.as_dict()}
    if cuda:
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        found["gone_bytes"] = free - torch.cuda.mem_get_info()[0]
    if case["check"]:
        for file in files:
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - it is no dict
                    kind = name.rpartition(".")[2]
                    if kind in COLUMNS:
                        whole = stored.get_tensor(name)
                        start, size = part(whole.shape[1], rank, ranks)
                        expected = whole[:, start : start + size].contiguous().view(torch.int16)
                        found["right"] = found.get("right", True) and bool(
                            torch.equal(memory[name].cpu().view(torch.int16), expected)
                        )
    del found["loads"]
    return found


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """Joins the group, loads once before the clock, and once more from the state that is asked for."""
    import torch
    from torch import distributed

    from penstock.distributed import Peers

    rank, device = task["rank"], task["device"].partition(":")[0]
    cuda = device == "cuda"
    where = torch.device(device, rank) if cuda else torch.device(device)
    if cuda:
        torch.cuda.set_device(where)
    store = distributed.TCPStore("127.0.0.1", task["port"], task["ranks"], is_master=rank == 0)
    backends = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    distributed.init_process_group(backends, store=store, rank=rank, world_size=task["ranks"])
    control = distributed.new_group(backend="gloo")
    exchange = distributed.new_group(backend="nccl") if cuda else None
    # Ranks agree once: each load has peers of its own.
    load(task["files"], task | {"check": False}, Peers(control, exchange), where)
    distributed.barrier(group=control)
    cached = states.set_cache([Path(file) for file in task["files"]], task["state"]) if rank == 0 else None
    distributed.barrier(group=control)
    found = load(task["files"], task, Peers(control, exchange), where)
    distributed.barrier(group=control)
    return found | {"cached": cached}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--states", metavar="A,B", help="of the page cache: cold, half, warm")
    add("--ranks", type=int, default=2, metavar="N", help="processes, with a GPU each")
    add("--layers", type=int, default=8, metavar="N", help="of Llama-3-8B's shapes, 0.4 GB each")


EXPERIMENT = Experiment(
    "sharing",
    "ranks that share reads, beside ranks that do not",
    "Ranks of a tensor-parallel model, each for itself (apart) and together.",
    Ranks,
    add_options,
    {"device": "cuda:0", "rounds": 3, "states": "cold,warm", "loaders": "", "timeout": 300.0},
    ("apart",),
)
