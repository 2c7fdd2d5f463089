"""Bytes of a block and numbers of readers, every pair by turns: how fast files in memory are loaded with each.

    python -m benchmarks blocks DIRECTORY --output FILE.json [--device cpu] [--gb 2] [--blocks 2,4,8] [--readers 8,12]

All loads are of one process, whose staging memory is made anew for each pair by a load that is not counted; so this
shows what a load does once it runs, not what the first load of a process costs. Files lie in the page cache, and once
more in tmpfs. A difference between machines is to be expected: blocks should still be in the processor's cache when
they are copied on, and how much of that there is depends on who else uses it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import penstock

from . import checkpoints, common


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--gb", type=float, default=15.19)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--blocks", default="1,2,3,4,6,8", help="MiB, by comma")
    parser.add_argument("--readers", default="8,10,12,14,16")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="where the files lie once more")
    options = parser.parse_args()
    case = checkpoints.given_or_llama(options.directory, options.gb)
    blocks, numbers = ([int(number) for number in given.split(",")] for given in (options.blocks, options.readers))
    pairs = list(itertools.product(blocks, numbers))
    result: dict[str, Any] = {
        "machine": common.machine() | {"gpu": common.gpu_name(), "filesystem": common.filesystem(options.directory)},
        "command": f"python -m benchmarks blocks DIRECTORY --device {options.device} --gb {options.gb:g} --rounds "
        f"{options.rounds} --blocks {options.blocks} --readers {options.readers} --output FILE",
        "bytes": case.nbytes,
        "measurements": [],
    }
    with tempfile.TemporaryDirectory(dir=options.tmpfs) as memory:
        places = {"warm": case.files, "tmpfs": [Path(shutil.copy(file, memory)) for file in case.files]}
        common.set_cache(case.files, "warm")
        for number in range(options.rounds):
            random.shuffle(pairs)
            for block, readers in pairs:
                config = penstock.LoadOptions(readers=readers, block_bytes=block << 20)
                penstock.release_staging()
                load(places["warm"], config, options.device)
                for place, files in places.items():
                    pair = {"round": number, "files": place, "block_mib": block, "readers": readers}
                    result["measurements"].append(pair | load(files, config, options.device))
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["measurements"]))


def load(files: list[Path], options: penstock.LoadOptions, device: str) -> dict[str, Any]:
    """Seconds of one load, and of the process's CPU time. What it loaded is dropped."""
    checkpoint = penstock.open(files, options=options)
    wall, cpu = time.perf_counter(), time.process_time()
    tensors = checkpoint.load(device=device)
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()
    item = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    del tensors
    return {name: round(value, 4) for name, value in item.items()}


def table(measurements: list[dict[str, Any]]) -> str:
    """Median seconds: a line for each size of a block, a column for each number of readers."""
    lines = []
    readers = sorted({item["readers"] for item in measurements})
    for place in sorted({item["files"] for item in measurements}):
        lines += [f"| {place}, MiB | {' | '.join(map(str, readers))} |", "|---" * (len(readers) + 1) + "|"]
        for block in sorted({item["block_mib"] for item in measurements}):
            cells = []
            for number in readers:
                key = (place, block, number)
                found = [
                    item["seconds"]
                    for item in measurements
                    if (item["files"], item["block_mib"], item["readers"]) == key
                ]
                cells.append(f"{statistics.median(found):.3f}")
            lines.append(f"| {block} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
