"""vLLM with each of its load formats: seconds for the weights, for the model and until it answers, memory, tokens.

    python -m benchmarks engines_vllm DIRECTORY --output X.json                            # 15.2 GB, one GPU
    python -m benchmarks engines_vllm DIRECTORY --output X.json --states warm --rounds 5
    python -m benchmarks engines_vllm DIRECTORY --output X.json --formats auto,penstock,runai_streamer@penstock \\
        --site runai_streamer@penstock=SITE
    python -m benchmarks engines_vllm DIRECTORY --output X.json --device cpu --gb 0.01 --formats auto,penstock

Builds a Llama of random BF16 weights in DIRECTORY (on a disk: a file in memory cannot be cold). Then each round starts
vLLM with every format, in a drawn order and a fresh process, from a page cache that is proved to be cold or warm, and
lets it generate a few tokens. ``--states cold-machine`` drops the whole page cache, libraries included.
``FORMAT@LABEL`` is a format once more, with the packages that ``--site`` puts first and the
``model_loader_extra_config`` of ``--extra``: so ``runai_streamer`` is measured with NVIDIA's package and with the one
that brings Penstock, and with ``{"distributed": true}``, with which vLLM has it load to the GPU. Needs no network. With
``--append`` measurements are added to those that OUTPUT has.

Seconds for weights and model are what vLLM logs itself. Memory is torch's at the moment when vLLM says that the model
is loaded: the most that was allocated, above what is. Tokens, and checksums of all parameters as vLLM has them after
loading, are compared with those of ``auto``, whose weights safetensors reads.

The engine runs in the process that is measured, where all of that can be seen. With ``--processes`` it has one of its
own, as it usually has: it starts later then, and only the seconds until it answers are told.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import common, engines

FORMATS = ("auto", "runai_streamer", "fastsafetensors", "penstock")
VLLM = {
    # In this process, where it can be looked at.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
FIGURES = ("weights_seconds", "model_seconds", "ready_seconds")


def main(arguments: list[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    model = engines.build(options.directory / f"llama-{options.gb:g}gb", options.gb, options.files)
    files = sorted(model.glob("*.safetensors"))
    result: dict[str, Any] = {
        "machine": common.machine() | {"gpu": common.gpu_name(), "filesystem": common.filesystem(options.directory)},
        "command": f"python -m benchmarks engines_vllm DIRECTORY --gb {options.gb:g} --files {options.files} --states "
        f"{options.states} --formats {options.formats} --rounds {options.rounds} --output FILE"
        + "".join(f" --extra {given}" for given in options.extra)
        + " --processes" * options.processes,
        "versions": {
            name: common.version_of(name) for name in ("torch", "vllm", "safetensors", "runai-model-streamer")
        },
        "bytes": sum(path.stat().st_size for path in files),
        "measurements": [],
    }
    if options.append and options.output.exists():
        before = json.loads(options.output.read_text())
        result["command"] = f"{before['command']}; {result['command']}"
        result["measurements"] = before["measurements"]
    environment = VLLM | (PROCESSES if options.processes else {})
    formats, extra = options.formats.split(","), dict(given.split("=", 1) for given in options.extra)
    with tempfile.TemporaryDirectory() as work:
        for number in range(options.rounds):
            for state in options.states.split(","):
                for label in random.sample(formats, len(formats)):
                    task = {
                        "do": "vllm",
                        "model": str(model),
                        "format": label.partition("@")[0],
                        "extra": json.loads(extra.get(label, "{}")),
                        "device": options.device,
                    }
                    where = environment | site(options, label)
                    item = {"format": label, "state": state, "round": number} | engines.measured(
                        task, files, state, Path(work), options.limit, env=where
                    )
                    result["measurements"].append(item)
                    options.output.write_text(json.dumps(result, indent=1) + "\n")
                    print(json.dumps(item), file=sys.stderr, flush=True)
    print(table(result["measurements"]))
    if not options.keep:
        shutil.rmtree(model)


def make_parser() -> argparse.ArgumentParser:
    parser = engines.parser_of(__doc__, gb=15.2, limit=300)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add = parser.add_argument
    add("--formats", default=",".join(FORMATS), help="load formats, by comma, each with a label after @ if need be")
    add("--site", action="append", default=[], metavar="FORMAT@LABEL=DIRECTORY", help="packages that come first for it")
    add("--extra", action="append", default=[], metavar="FORMAT@LABEL=JSON", help="its model_loader_extra_config")
    add("--processes", action="store_true", help="the engine in a process of its own")
    add("--append", action="store_true", help="add to the measurements that OUTPUT has")
    return parser


def site(options: argparse.Namespace, label: str) -> dict[str, str]:
    """The environment that puts a label's packages first."""
    for given in options.site:
        name, _, directory = given.partition("=")
        if name == label:
            before = os.environ.get("PYTHONPATH")
            return {"PYTHONPATH": f"{Path(directory).resolve()}{os.pathsep + before if before else ''}"}
    return {}


def table(measurements: list[dict[str, Any]]) -> str:
    """Medians of each format in each state."""
    columns = ["state", "format", "weights s", "model s", "ready s", "ready less import s", "later than the best s"]
    columns += ["allocated above the model", "tokens, weights"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for item in measurements:
        groups.setdefault((item["state"], item["format"]), []).append(item)
    expected = next((outcome(item) for item in measurements if item["format"] == "auto" and "tokens" in item), None)
    for (state, label), items in groups.items():
        good = [item for item in items if "tokens" in item]
        if not good:
            lines.append(f"| {state} | {label} | failed: {items[0]['error']} |" + " |" * 6)
            continue
        cells = [median([item[figure] for item in good]) for figure in FIGURES]
        cells.append(median([less_import(item) for item in good]))
        best = best_format(measurements, state)
        later = [less_import(item) - best[item["round"]] for item in good if item["round"] in best]
        cells.append(median(later))
        seen = [item["allocated_above"] for item in good if item["allocated_above"] is not None]
        above = f"{max(seen) / 2**20:.0f} MiB" if seen else "not seen"
        same = "unknown" if expected is None else "equal" if all(outcome(i) == expected for i in good) else "OTHERS"
        failed = f", {len(items) - len(good)} failed" if len(good) < len(items) else ""
        lines.append(f"| {state} | {label} | {' | '.join(cells)} | {above} | {same}{failed} |")
    return "\n".join(lines)


def less_import(item: dict[str, Any]) -> float:
    """Seconds until the engine answers, without those in which it was imported."""
    return float(item["ready_seconds"] - item["import_seconds"])


def best_format(measurements: list[dict[str, Any]], state: str) -> dict[int, float]:
    """Of the format with the smallest median: by round, its seconds until it answers, less import."""
    by_format: dict[str, dict[int, float]] = {}
    for item in measurements:
        if item["state"] == state and "tokens" in item:
            by_format.setdefault(item["format"], {})[item["round"]] = less_import(item)
    return min(by_format.values(), key=lambda rounds: statistics.median(rounds.values()))


def outcome(item: dict[str, Any]) -> tuple[Any, Any]:
    """What every format has to come to."""
    return item["tokens"], item["parameters"]


def median(values: list[float | None]) -> str:
    """Of what was heard: some formats do not say how long the weights took, and other processes are not listened to."""
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f}" if known else "not heard"


if __name__ == "__main__":
    main()
