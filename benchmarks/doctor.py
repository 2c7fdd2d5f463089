"""Predictions of ``penstock doctor`` beside the loads they are of: ``python -m benchmarks.doctor FILE``.

Prediction and load alternate, each in a fresh process, in the same state: ``disk`` (the file is not in the page cache),
``cached``, ``loopback`` (S3 over HTTP) and ``shaped`` (the same with latency and limits). Prints and writes, of each
state, the pairs, the median error, and how many loads took a time within the interval that was stated.
What making memory costs on a virtual machine is part of both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.bench import machine, states

from . import servers

_S3 = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
SHAPE = ["--latency-ms", "20", "--connection-mb", "40", "--link-mb", "400"]
PAUSE = 8.0
"""Seconds."""
STATES = ("disk", "cached", "loopback", "shaped")


def run(command: str, location: str, environment: dict[str, str]) -> dict[str, Any]:
    """What a command of Penstock prints as JSON."""
    asked = [sys.executable, "-m", "penstock", command, location, "--device", "cpu", "--json"]
    done = subprocess.run(asked, env=os.environ | environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextlib.contextmanager
def served(program: str, file: Path, state: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Where the file is read from in a state, and the variables for that."""
    if state in {"disk", "cached"}:
        yield str(file), {}
        return
    with servers.serving(program, file.parent, SHAPE if state == "shaped" else []) as address:
        yield f"s3://bucket/{file.name}", _S3 | {"AWS_ENDPOINT_URL": f"http://{address}"}


def prepare(file: Path, state: str) -> None:
    """Makes the state. The pause lets a virtual machine's host take back what is free: both meet the same memory."""
    states.set_cache([file], "cold" if state == "disk" else "warm")
    time.sleep(PAUSE)


def pairs(program: str, file: Path, state: str, count: int) -> dict[str, Any]:
    """Predictions and loads in turns."""
    found = []
    with served(program, file, state) as (location, environment):
        for _ in range(count):
            prepare(file, state)
            asked = run("doctor", location, environment)
            prediction = asked["prediction"]
            if prediction is None:
                raise SystemExit(f"no prediction: {asked['missing']} {asked['failure']}")
            prepare(file, state)
            load = run("load", location, environment)
            seconds = load["total_seconds"]
            pair = {
                "predicted": prediction["seconds"],
                "low": prediction["low"],
                "high": prediction["high"],
                "loaded": seconds,
                "error": round(prediction["seconds"] / seconds - 1, 3),
                "within": prediction["low"] <= seconds <= prediction["high"],
                "limited_by": [prediction["limited_by"], load["stats"]["limited_by"]],
                "doctor_seconds": asked["seconds"],
            }
            found.append(pair)
            sys.stderr.write(f"{state}: {pair}\n")
    errors = [abs(pair["error"]) for pair in found]
    within = sum(pair["within"] for pair in found)
    return {"state": state, "median_error": statistics.median(errors), "within": within, "pairs": found}


def main() -> None:
    """Measures what the command line names."""
    parser = argparse.ArgumentParser(description="Predictions of penstock doctor beside loads.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--states", nargs="+", choices=STATES, default=STATES)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--server", default="benchmarks/http/target/release/http-bench")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    about = machine.about(options.file.parent, "cpu")
    results = [pairs(options.server, options.file, state, options.pairs) for state in options.states]
    for result in results:
        within = f"{result['within']} of {options.pairs} loads within the interval"
        sys.stdout.write(f"{result['state']}: median error {result['median_error']:.0%}, {within}\n")
    if options.output:
        document = {
            "machine": about,
            "bytes": options.file.stat().st_size,
            "shape": SHAPE,
            "states": results,
        }
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
