"""Two builds of Penstock, before and after a change: pairs of loads that alternate in one run.

    python -m benchmarks pairs DIRECTORY --before SITE --after SITE --output X.json                  # 15.2 GB, one GPU
    python -m benchmarks pairs DIRECTORY --before SITE --after SITE --output X.json --states cold --gb 7.6
    python -m benchmarks pairs DIRECTORY --before SITE --after SITE --output X.json --device cpu --gb 1

Each SITE is a directory with one build of the package (``pip install --target``), or a clone's ``python``. A pair is
one load by each build, in a drawn order, from the same state of the page cache; every load has a process of its own.
These processes are forked from one that has imported torch and made no CUDA context, so a pair takes seconds. All
tensors of the first pair of each state are compared with checksums of the files.

What is printed and kept for each state: the medians, the ratio of medians (after / before), and its 95 % interval by
bootstrap over pairs. For cold loads also the bytes that the kernel read from the device, and CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from . import checkpoints, checksum, common, processes

BUILDS = ("before", "after")
RESAMPLES = 10_000
# The figures of which ratios are told, and whether less is better is the reader's to know.
FIGURES = ("seconds", "cpu_seconds", "device_bytes")


class Zygote:
    """A process that has imported torch with one build first on its path, and forks a child for each load."""

    def __init__(self, site: Path) -> None:
        path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            processes.command("pairs", "--zygote"),
            env=processes.environment({"PYTHONPATH": path}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def load(self, task: dict[str, Any]) -> dict[str, Any]:
        """One load in a forked child.

        Raises:
            RuntimeError: the load failed; the message is its traceback.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline() or '{"error": "the process ended"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def zygote() -> None:
    """Reads tasks, forks a child for each, and passes its answer on. What a load prints goes to the error stream."""
    import torch  # noqa: F401 - what takes seconds, once

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            with os.fdopen(write, "w") as pipe:
                pipe.write(json.dumps(_measure(json.loads(line))))
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            answer = pipe.read()
        os.waitpid(child, 0)
        answers.write((answer or '{"error": "the child ended without an answer"}') + "\n")
        answers.flush()


def _measure(task: dict[str, Any]) -> dict[str, Any]:
    from . import measured

    try:
        answer = measured.measure(**task)
    except BaseException:  # noqa: BLE001 - passed on as the answer
        return {"error": traceback.format_exc()}
    # Of this process alone, and of nothing before the fork.
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return answer | {"device_bytes": int(counters["read_bytes"])}


def interval(before: list[float], after: list[float]) -> tuple[float, float, float]:
    """The ratio of the medians (after / before) and its 95 % interval, by bootstrap over pairs."""
    draws = np.random.default_rng(0).integers(0, len(before), (RESAMPLES, len(before)))
    ratios = np.median(np.array(after)[draws], axis=1) / np.median(np.array(before)[draws], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(np.median(after) / np.median(before)), float(low), float(high)


def compare(samples: list[dict[str, Any]], state: str) -> dict[str, Any]:
    """Of a state: medians, their ratios and intervals, figure by figure."""
    of_state = [item for item in samples if item["state"] == state]
    told: dict[str, Any] = {"state": state, "pairs": len(of_state) // 2}
    for figure in FIGURES:
        before, after = ([item[figure] for item in of_state if item["build"] == build] for build in BUILDS)
        if min(before, default=0) > 0 and min(after, default=0) > 0:
            ratio, low, high = interval(before, after)
            medians = {"before": float(np.median(before)), "after": float(np.median(after))}
            told[figure] = medians | {"ratio": round(ratio, 4), "interval": [round(low, 4), round(high, 4)]}
    return told


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("directory", type=Path, help="on a disk: where the checkpoint lies, or is made")
    add("--before", type=Path, required=True, help="a directory with the build before the change")
    add("--after", type=Path, required=True, help="the same with the build after it")
    add("--output", type=Path, required=True, help="the samples and their comparison, as JSON")
    add("--states", default="warm,tmpfs", help="of the page cache: cold, half, warm, tmpfs")
    add("--pairs", type=int, default=16, help="of each state")
    add("--case", choices=checkpoints.NAMES, default="llama", help="the checkpoint that is made")
    add("--gb", type=float, default=15.2, help="how large llama and one-tensor are")
    add("--small", type=int, default=100_000, help="how many tensors small-tensors has")
    add("--loader", default="penstock", help="the row of loaders.py: penstock, penstock-stream, penstock-into, ...")
    add("--device", default="cuda:0")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    result: dict[str, Any] = {
        "machine": common.machine() | {"gpu": common.gpu_name(), "filesystem": common.filesystem(options.directory)},
        "command": " ".join(["python -m benchmarks pairs DIRECTORY", *sys.argv[2:]]),
        "samples": [],
        "comparisons": [],
    }
    case = checkpoints.given(options.directory) or checkpoints.make(
        options.case, options.directory, gb=options.gb, small=options.small, one_gb=options.gb
    )
    result["case"] = {"name": case.name} | case.as_dict()
    reference = options.output.with_suffix(".checksums.json")
    reference.write_text(json.dumps(checksum.of_files(case.files)))
    memory = Path("/dev/shm/penstock-pairs")
    zygotes = {build: Zygote(getattr(options, build)) for build in BUILDS}
    try:
        for state in options.states.split(","):
            place = checkpoints.copy(case, memory, also=[]) if state == "tmpfs" else case
            for number in range(options.pairs):
                for build in random.sample(BUILDS, 2):
                    if state != "tmpfs":
                        common.set_cache(place.files, state)
                    task = {
                        "loader": options.loader,
                        "files": [str(path) for path in place.files],
                        "device": options.device,
                        "reference": str(reference) if number == 0 else None,
                        "settle": common.enough_memory(case.nbytes) if options.device == "cpu" else 0,
                    }
                    answer = zygotes[build].load(task)
                    if not answer.get("bytes_ok", True):
                        raise RuntimeError(f"{build}: wrong bytes in {answer['wrong']}")
                    result["samples"].append({"state": state, "pair": number, "build": build} | answer)
            result["comparisons"].append(compare(result["samples"], state))
            print(json.dumps(result["comparisons"][-1]), flush=True)
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        reference.unlink(missing_ok=True)
        for each in zygotes.values():
            each.close()


if __name__ == "__main__":
    zygote() if sys.argv[1:] == ["--zygote"] else main()
