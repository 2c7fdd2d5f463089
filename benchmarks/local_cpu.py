"""Local file to CPU tensors, against the limits of the machine and against safetensors.

    python -m benchmarks local_cpu --show FILE.json
    python -m benchmarks local_cpu [--gib 2] [--rounds 5] [--directory DIR] [--output FILE.json]

Rows are interleaved round by round, in an order that changes, each in a fresh process, and the median is reported. The
limits are measured in the same run: plain ``O_DIRECT`` reads (cold) and parallel ``pread`` of cached pages into memory
that is ready (warm), each at the best of several numbers of threads. Peak memory is the process's own (RSS), less what
it was before the load. "Of the round" is a rate over the mean of all rows of that state in the same round, with its
standard error: a disk that wanders does not move it, and the luckiest of several plain readers does not set it.
``--show`` prints the table of a result.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import common, limits, processes

LIMITS = {
    "cold": [f"direct-{threads}x{mib}" for threads in (4, 8) for mib in (2, 8)],
    "warm": [f"ready-2x{mib}" for mib in (1, 4)],
    "fresh": ["fresh-2x2"],
}
LOADERS = ["load", "stream", "load_into", "mmap", "safetensors-clone", "safetensors-touch"]


# ---- what runs in the measured process


def read_threads(path: str, threads: int, block: int, *, direct: bool, ready: bool) -> tuple[float, float]:
    """Plain parallel reads of the whole file to one buffer: the limit that loaders are compared with."""
    size = os.path.getsize(path)
    common.settle_memory(size + size // 2)
    view = limits.buffer(size + (4 << 20), ready=ready)
    seconds, cpu, _ = limits.read_files(
        [Path(path)], threads, block, lambda _, at, length: view[at : at + length], direct=direct
    )
    return seconds, cpu


def run_loader(path: str, what: str) -> tuple[float, float, int]:
    """Loads the file; returns the seconds it took, CPU seconds, and peak memory above what there was before."""
    import safetensors.torch
    import torch

    import penstock

    torch.set_num_threads(1)
    # Imports and first calls are not loading.
    torch.zeros(1).clone()
    destinations = {}
    if what == "load_into":
        # Memory that an earlier load brought: ready, and in huge pages like the plain reader's.
        destinations = penstock.open(path).load()
    size = os.path.getsize(path)
    common.settle_memory(2 * size + size // 2)
    before = rss()
    began, cpu = time.perf_counter(), time.process_time()
    if what == "load":
        kept: Any = penstock.open(path).load()
    elif what == "stream":
        kept = [tensor.shape for _, tensor in penstock.open(path).stream()]
    elif what == "load_into":
        kept = penstock.open(path).load_into(destinations)
    elif what == "mmap":
        kept = penstock.open(path).load(mmap=True, prefault=True)
        common.touch(kept)
    elif what == "safetensors-clone":
        kept = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    else:
        kept = safetensors.torch.load_file(path)
        common.touch(kept)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    del kept
    return seconds, cpu, peak_rss() - before


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def child(path: str, what: str) -> dict[str, float]:
    kind, _, setting = what.partition("-")
    if kind in {"direct", "ready", "fresh"}:
        threads, mib = (int(number) for number in setting.split("x"))
        seconds, cpu = read_threads(path, threads, mib << 20, direct=kind == "direct", ready=kind == "ready")
        peak = 0
    else:
        seconds, cpu, peak = run_loader(path, what)
    return {"seconds": seconds, "cpu_seconds": cpu, "peak_rss": peak}


# ---- the benchmark


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where the checkpoint is made; a temporary directory by default")
    parser.add_argument("--only", help="loaders to measure beside the limits, by comma: load_into,mmap")
    parser.add_argument("--output", type=Path, help="where the results go as JSON")
    parser.add_argument("--show", type=Path, help="a result whose table is printed; nothing is measured")
    parser.add_argument("--child", nargs=2, metavar=("PATH", "WHAT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*options.child)))
        return
    if options.show:
        table(json.loads(options.show.read_text()))
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        path = Path(directory) / "model.safetensors"
        layers = max(1, round(options.gib * 2**30 / 2 / 67_000_000))
        common.write_checkpoint(path, common.llama_shapes(layers, 2048, 8192, 32000, 512))
        results = compare(path, options.rounds, options.only)
    table(results)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


def compare(path: Path, rounds: int, only: str | None) -> dict[str, Any]:
    size = path.stat().st_size
    plan: list[tuple[str, str, Callable[[], object]]] = []
    for state in ("cold", "warm"):
        kinds = ["cold"] if state == "cold" else ["warm", "fresh"]
        of_machine = [name for kind in kinds for name in LIMITS[kind]]
        names = of_machine + [name for name in LOADERS if only is None or name in only.split(",")]
        plan += [(state, name, lambda state=state: common.set_cache([path], state)) for name in names]
    samples: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(rounds):
        # In another order each time: what a virtual disk gives may depend on what it gave just before.
        for state, name, prepare in random.Random(number).sample(plan, len(plan)):
            prepare()
            sample = processes.measure("local_cpu", "--child", str(path), name)
            samples.setdefault((state, name), []).append(sample)
            print(
                f"round {number + 1} {state} {name}: {size / sample['seconds'] / common.GB:.2f} GB/s", file=sys.stderr
            )
    rows: list[dict[str, Any]] = []
    for state, name in ((state, name) for state, name, _ in plan):
        taken = samples[state, name]
        seconds = statistics.median(sample["seconds"] for sample in taken)
        rows.append(
            {
                "state": state,
                "what": name,
                "seconds": round(seconds, 4),
                "gb_per_s": round(size / seconds / common.GB, 3),
                "all_seconds": [round(sample["seconds"], 4) for sample in taken],
                "cpu_seconds": round(statistics.median(sample["cpu_seconds"] for sample in taken), 3),
                "peak_rss_over_checkpoint_mib": round(
                    max(sample["peak_rss"] for sample in taken) / 2**20 - size / 2**20
                ),
            }
        )
    command = f"python -m benchmarks local_cpu --rounds {rounds}" + (f" --only {only}" if only else "")
    return {"command": command, "machine": common.machine(), "bytes": size, "rounds": rounds, "rows": rows}


def table(results: dict[str, Any]) -> None:
    """Prints the rows with their share of the limit: the best plain reader of the same state."""
    rows = results["rows"]
    for state in ("cold", "warm"):
        of_state = [row for row in rows if row["state"] == state]
        plain = [row for row in of_state if row["what"].startswith("direct" if state == "cold" else "ready")]
        limit = max(row["gb_per_s"] for row in plain)
        print(f"\n{state}: {results['bytes'] / common.GB:.2f} GB, limit {limit:.2f} GB/s")
        heads = f"{'of limit':>8} {'of the round':>13} {'CPU s':>6} {'peak RSS - file':>16}"
        print(f"{'':20} {'seconds':>8} {'GB/s':>7} {heads}")
        shares = of_rounds(of_state)
        for row in of_state:
            share = row["gb_per_s"] / limit
            memory = f"{row['peak_rss_over_checkpoint_mib']} MiB" if row["what"] in LOADERS else ""
            print(
                f"{row['what']:20} {row['seconds']:8.3f} {row['gb_per_s']:7.2f} {share:8.2f} "
                f"{shares[row['what']]:>13} {row['cpu_seconds']:6.2f} {memory:>16}"
            )


def of_rounds(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Of each row: the mean of its rates over its rounds' means, and their standard error."""
    rates = zip(*([1 / seconds for seconds in row["all_seconds"]] for row in rows), strict=True)
    rounds = (dict(zip([row["what"] for row in rows], of_round, strict=True)) for of_round in rates)
    shares = common.shares_of_rounds(rounds)
    return {what: f"{statistics.mean(of):.2f} +- {common.standard_error(of):.2f}" for what, of in shares.items()}


if __name__ == "__main__":
    main()
