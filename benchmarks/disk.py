"""What a disk gives to whom, by turns, file by file: plain readers of many settings, Penstock, and a rival.

    python -m benchmarks disk DIRECTORY --output FILE.json [--rounds 8] [--plain 16x512,8x1024] [--loaders penstock]

A disk whose rate wanders by a third within minutes cannot be compared over whole checkpoints: too few loads fit between
two changes. So here a load is one file of the checkpoint, in one process that has loaded before, everything reads that
file with ``O_DIRECT`` (the page cache is proved to be without it before and after), and all of them take turns in an
order that is drawn anew for every round. What is told is each one's rate over the mean of all in its round, which a
wandering disk does not move. ``--plain`` are threads and KiB of a request: all threads side by side, or, with
``16x512/4096``, each in a block of so many KiB of its own. ``--loaders`` are those of ``rivals.py``, or
``penstock:readers=16`` and the like: Penstock with that in its ``Config``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import checkpoints, common, limits, loaders

PLAIN = "16x256,16x512,16x512/4096,12x512/4096,8x512,8x512/4096,8x4096,4x4096"
LOADERS = "penstock,penstock:readers=16,penstock:readers=12,penstock:readers=24"
Load = Callable[[Path], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--gb", type=float, default=15.19)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--plain", default=PLAIN)
    parser.add_argument("--loaders", default=LOADERS)
    parser.add_argument("--budget", type=float, default=400, help="seconds after which no round begins")
    options = parser.parse_args()
    began = time.monotonic()
    case = checkpoints.given_or_llama(options.directory, options.gb)
    common.set_cache(case.files, "cold")
    contestants = {setting: plain(setting) for setting in options.plain.split(",")}
    contestants |= {name: loader(name, options.device) for name in options.loaders.split(",")}
    result: dict[str, Any] = {
        "machine": common.machine() | {"gpu": common.gpu_name(), "filesystem": common.filesystem(options.directory)},
        "command": f"python -m benchmarks disk DIRECTORY --device {options.device} --gb {options.gb:g} --rounds "
        f"{options.rounds} --plain {options.plain} --loaders {options.loaders} --output FILE",
        "measurements": [],
    }
    # Staging memory, streams and imports exist from here on.
    smallest = min(case.files, key=lambda file: file.stat().st_size)
    for load in contestants.values():
        load(smallest)
    for number in range(options.rounds):
        if time.monotonic() - began > options.budget:
            break
        file = case.files[number % len(case.files)]
        order = random.sample(list(contestants), len(contestants))
        for place, name in enumerate(order):
            start = time.perf_counter()
            contestants[name](file)
            seconds = time.perf_counter() - start
            item = {"round": number, "place": place, "name": name, "seconds": round(seconds, 4)}
            result["measurements"].append(item | {"gb_per_s": round(file.stat().st_size / seconds / common.GB, 3)})
        cached = float(common.resident_pages(file).mean())
        if cached > 0.01:
            raise common.StateError(f"{cached:.0%} of {file.name} came into the page cache")
        options.output.write_text(json.dumps(result, indent=1) + "\n")
        print(f"round {number + 1}: {mean(result['measurements'], number):.2f} GB/s", file=sys.stderr, flush=True)
    print(table(result["measurements"]))


def plain(setting: str) -> Load:
    """Threads that read to small buffers which are ready."""
    threads, _, sizes = setting.partition("x")
    kib, _, block_kib = sizes.partition("/")
    request, block = int(kib) << 10, int(block_kib or kib) << 10
    buffers = [limits.buffer(request) for _ in range(int(threads))]

    def place(worker: int, _at: int, size: int) -> memoryview:
        return buffers[worker][:size]

    def load(file: Path) -> None:
        limits.read_files([file], len(buffers), block, place, direct=True, request=request)

    return load


def loader(name: str, device: str) -> Load:
    """One of the loaders of ``rivals.py``, or Penstock with settings."""
    if loaders.kind(name) != "penstock":
        theirs = loaders.of(name).prepare(device, {})
        return lambda file: finish(theirs([str(file)]), device)
    import penstock

    given = {key: int(value) for key, value in loaders.settings(name).items()}
    options = penstock.LoadOptions(cache="bypass", **given)
    return lambda file: finish(penstock.open([file], options=options).load(device=device), device)


def finish(tensors: dict[str, Any], device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()
    tensors.clear()


def mean(measurements: list[dict[str, Any]], number: int) -> float:
    return statistics.mean(item["gb_per_s"] for item in measurements if item["round"] == number)


def table(measurements: list[dict[str, Any]]) -> str:
    """Of each: the mean of its rates over its rounds' means, their standard error, and its median rate."""
    rates: dict[str, list[float]] = {}
    rounds: dict[int, dict[str, float]] = {}
    for item in measurements:
        rates.setdefault(item["name"], []).append(item["gb_per_s"])
        rounds.setdefault(item["round"], {})[item["name"]] = item["gb_per_s"]
    shares = common.shares_of_rounds(rounds.values())
    lines = ["| reader | of the mean of all | GB/s |", "|---|---|---|"]
    for name, of in sorted(shares.items(), key=lambda pair: -statistics.mean(pair[1])):
        error = common.standard_error(of)
        lines.append(f"| {name} | {statistics.mean(of):.3f} ± {error:.3f} | {statistics.median(rates[name]):.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
