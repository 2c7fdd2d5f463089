"""Ranks of a tensor-parallel model, reading each for itself and all together: seconds, bytes read, GPU memory.

    python -m benchmarks sharing [--directory DIR] [--ranks 2] [--device cuda] [--layers 8] [--output X.json]

Writes layers of Llama-3-8B's shapes, loads them in a process for each rank as tensor parallelism does (rows of some
matrices, columns of `o_proj` and `down_proj`), from the disk and from the page cache, and checks every byte of the
columns against safetensors. The page cache is made cold or warm before each load, and proved.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import distributed

import penstock
from penstock.distributed import Peers, Sharing
from penstock.recording import Recorder

from . import common, processes

HIDDEN, INNER, KEYS = 4096, 14336, 1024
ROWS = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (KEYS, HIDDEN), "v_proj": (KEYS, HIDDEN), "gate_proj": (INNER, HIDDEN)}
ROWS["up_proj"] = (INNER, HIDDEN)
COLUMNS = {"o_proj": (HIDDEN, HIDDEN), "down_proj": (HIDDEN, INNER)}

SAYS = "LOADED "
"""What a rank's lines begin with: libraries print to the same stream."""


def generate(directory: Path, layers: int) -> list[str]:
    """Files of one layer each, with random numbers."""
    files = []
    for layer in range(layers):
        path = directory / f"model-{layer:05}.safetensors"
        files.append(str(path))
        if not path.exists():
            shapes: dict[str, tuple[int, ...]] = {**ROWS, **COLUMNS, "norm": (HIDDEN,)}
            common.write_checkpoint(path, {f"layers.{layer}.{name}": of for name, of in shapes.items()}, seed=layer)
    return files


def part(size: int, rank: int, ranks: int) -> tuple[int, int]:
    return size // ranks * rank, size // ranks


def load(files: list[str], case: dict[str, Any], peers: Peers, device: torch.device) -> dict[str, Any]:
    """One load of one rank."""
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


def be_a_rank(rank: int, ranks: int, port: int, files: list[str], cases: list[dict[str, Any]], device: str) -> None:
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(where)
    store = distributed.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=store, rank=rank,
                                   world_size=ranks)  # fmt: skip
    control = distributed.new_group(backend="gloo")
    data = distributed.new_group(backend="nccl") if device == "cuda" else None
    for case in cases:
        distributed.barrier(group=control)
        if rank == 0:
            common.set_cache([Path(file) for file in files], "cold" if case["cold"] else "warm")
        distributed.barrier(group=control)
        found = load(files, case, Peers(control, data), where)
        print(SAYS + json.dumps({"rank": rank, **case, **found}), flush=True)
    distributed.barrier(group=control)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        be_a_rank(**given.rank)
        return
    with tempfile.TemporaryDirectory() as temporary:
        files = generate(given.directory or Path(temporary), given.layers)
        size = sum(Path(file).stat().st_size for file in files)
        rows = [(cold, together) for cold in (True, False) for together in (False, True)]
        cases = [
            {"cold": cold, "together": together, "check": number == given.rounds - 1}
            for number in range(given.rounds)
            for cold, together in rows
        ]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        task = {"ranks": given.ranks, "port": port, "files": files, "cases": cases, "device": given.device}
        processes = [
            subprocess.Popen(
                processes.command("sharing", "--rank", json.dumps({"rank": rank, **task})),
                env=processes.environment(),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(given.ranks)
        ]
        said = [process.communicate()[0].splitlines() for process in processes]
        found = [[json.loads(line[len(SAYS) :]) for line in lines if line.startswith(SAYS)] for lines in said]
        for rank, loads in enumerate(found):
            if len(loads) < len(cases):
                raise SystemExit(f"rank {rank} ended after {len(loads)} of {len(cases)} loads")
    results = []
    print(f"{given.ranks} ranks on {given.device}, {size / 1e9:.2f} GB\n")
    print(
        "| state | ranks read | seconds | of the checkpoint, from storage | GPU memory besides |\n|---|---|---|---|---|"
    )
    for cold, together in rows:
        loads = [
            [ranks[number] for ranks in found]
            for number, case in enumerate(cases)
            if (case["cold"], case["together"]) == (cold, together)
        ]
        seconds = sorted(max(rank["seconds"] for rank in load) for load in loads)
        read = sum(rank["read_bytes"] for rank in loads[-1]) / size
        peak = max(rank.get("peak_bytes", 0) for load in loads for rank in load)
        if not all(rank["right"] for rank in loads[-1]):
            raise SystemExit("what was loaded is not what is in the files")
        results.append({"cold": cold, "together": together, "seconds": seconds, "read": read, "peak_bytes": peak})
        name = ("cold" if cold else "warm", "together" if together else "each for itself")
        print(f"| {' | '.join(name)} | {seconds[len(seconds) // 2]:.2f} | {read:.2f} | {peak / (1 << 20):.0f} MiB |")
    if given.output:
        about = {
            "machine": common.machine() | {"gpu": common.gpu_name() if given.device == "cuda" else None},
            "command": f"python -m benchmarks sharing --ranks {given.ranks} --device {given.device} "
            f"--layers {given.layers} --rounds {given.rounds} --output FILE",
            "bytes": size,
        }
        given.output.write_text(json.dumps({**about, "results": results, "loads": found}, indent=1))


if __name__ == "__main__":
    main()
