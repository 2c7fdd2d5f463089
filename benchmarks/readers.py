"""The number of readers that Penstock finds, beside every number that could have been given by hand.

    python -m benchmarks readers DIRECTORY --output FILE.json [--device cpu] [--gb 2] [--rounds 5] [--readers 1,2,4,8]

Each load runs in a fresh process; numbers take turns within a round, the page cache's state is made and proved before
each. The checkpoint under DIRECTORY is made where there is none (Llama-3-8B's shapes). What is found should be within
3 % of the best fixed number, whichever that is; a few rounds on a noisy disk can tell no better than its noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import checkpoints, common, processes

FOUND = "found"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--readers", default="1,2,4,8,12,16,24,32")
    parser.add_argument("--states", default="cold,warm")
    options = parser.parse_args()
    case = checkpoints.given_or_llama(options.directory, options.gb)
    numbers = [FOUND, *options.readers.split(",")]
    result: dict[str, Any] = {
        "machine": common.machine() | {"filesystem": common.filesystem(options.directory)},
        "command": f"python -m benchmarks readers DIRECTORY --device {options.device} --gb {options.gb:g} "
        f"--rounds {options.rounds} --readers {options.readers} --states {options.states} --output FILE",
        "bytes": case.nbytes,
        "measurements": [],
    }
    with tempfile.TemporaryDirectory() as work:
        for turn in range(options.rounds):
            for state in options.states.split(","):
                shift = turn * 2 % len(numbers)
                for number in numbers[shift:] + numbers[:shift]:
                    item = load(case, state, number, options.device, Path(work))
                    result["measurements"].append({"round": turn, "state": state, "readers": number} | item)
                    print(f"round {turn + 1} {state} {number}: {item['seconds']:.3f} s", file=sys.stderr, flush=True)
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


def load(case: checkpoints.Case, state: str, readers: str, device: str, work: Path) -> dict[str, Any]:
    """Seconds of one load, and what the tuner tried."""
    common.set_cache(case.files, state)
    task = {
        "do": "load",
        "loader": "penstock",
        "files": [str(file) for file in case.files],
        "device": device,
        "reference": None,
        "settle": common.enough_memory(case.nbytes) if device == "cpu" else 0,
    }
    env = {} if readers == FOUND else {"PENSTOCK_READERS": readers}
    done = processes.run(task, work, seconds=300, env=env)
    stats = done["stats"]
    return {"seconds": done["seconds"], "used": stats["readers"], "tried": stats["tried"]}


def table(result: dict[str, Any]) -> str:
    """Medians, and each over the best fixed one."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for item in result["measurements"]:
        seconds.setdefault((item["state"], item["readers"]), []).append(item["seconds"])
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    lines = ["| state | readers | seconds (least to most) | of the best fixed number's time |", "|---|---|---|---|"]
    for (state, readers), median in medians.items():
        best = min(value for (of, number), value in medians.items() if of == state and number != FOUND)
        spread = seconds[state, readers]
        extent = f"{median:.3f} ({min(spread):.3f}-{max(spread):.3f})"
        lines.append(f"| {state} | {readers} | {extent} | {median / best:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
