"""transformers' ``from_pretrained`` as it is, within ``patch_safetensors``, and through ``penstock.integrations``.

    python -m benchmarks engines DIRECTORY --output X.json                       # 8.2 GB of random weights, cuda:0
    python -m benchmarks engines DIRECTORY --output X.json --gb 16 --states warm --rounds 5
    python -m benchmarks engines DIRECTORY --output X.json --device cpu --gb 0.01

Builds a Llama of random BF16 weights in DIRECTORY (on a disk: a file in memory cannot be cold), then, round by round
and in turn, loads it with each loader in a fresh process, from a page cache that is proved to be cold or warm. Each
process has imported its libraries and made the CUDA context before its clock starts (``engines_measured.py``). Every
tensor's bytes are checked on the device. Needs no network.

What is measured: seconds until the model is on the device; the most memory that torch had allocated, and had reserved,
above what the model takes when it is loaded; the most memory of the GPU that was in use, sampled; the process's peak of
resident host memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import checksum, common, processes

# The page cache of the whole machine is dropped, not only the checkpoint's files.
COLD_MACHINE = "cold-machine"
LOADERS = ("stock", "patched", "penstock")
"""On the CPU there is also ``mapped``: Penstock's views of the files, which is what stock's parameters are there."""
CONFIG = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096}
LARGE = CONFIG | {"intermediate_size": 14336, "vocab_size": 128256}
SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "hidden_size": 64}
TINY = SMALL | {"intermediate_size": 128, "vocab_size": 512}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def main(arguments: list[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    model = build(options.directory / f"llama-{options.gb:g}gb", options.gb, options.files)
    files = sorted(model.glob("*.safetensors"))
    nbytes = sum(path.stat().st_size for path in files)
    print(f"{model.name}: {nbytes / 1e9:.2f} GB in {len(files)} files", file=sys.stderr)
    result: dict[str, Any] = {
        "machine": common.machine() | {"gpu": common.gpu_name(), "filesystem": common.filesystem(options.directory)},
        "versions": {name: common.version_of(name) for name in ("torch", "transformers", "safetensors", "accelerate")},
        "bytes": nbytes,
        "device": options.device,
        "dtype": options.dtype,
        "measurements": [],
    }
    measurements: list[dict[str, Any]] = result["measurements"]
    with tempfile.TemporaryDirectory() as work:
        reference = Path(work) / "reference.json"
        reference.write_text(json.dumps(checksum.of_files(files)))
        for number in range(options.rounds):
            for state in options.states.split(","):
                for loader in options.loaders.split(","):
                    task = {
                        "loader": loader,
                        "model": str(model),
                        "device": options.device,
                        "dtype": options.dtype,
                        "reference": str(reference) if options.dtype == "bfloat16" else None,
                    }
                    measurements.append(
                        {"loader": loader, "state": state, "round": number}
                        | measured(task, files, state, Path(work), options.limit)
                    )
                    print(json.dumps(measurements[-1]), file=sys.stderr)
                    # After each: a machine may be taken away before the last.
                    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(table(measurements))
    if not options.keep:
        shutil.rmtree(model)


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, gb=8.2, limit=600)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16", help="of the loaded model; the files have bfloat16")
    parser.add_argument("--loaders", default=",".join(LOADERS))
    return parser


def parser_of(description: str | None, *, gb: float, limit: float) -> argparse.ArgumentParser:
    """The options of all comparisons that build a model and load it by turns."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the model is built")
    parser.add_argument("--output", type=Path, required=True, help="the figures, as JSON")
    parser.add_argument("--gb", type=float, default=gb, help="about how large the model is; below 0.5, a tiny one")
    parser.add_argument("--files", type=int, default=4, help="into how many files")
    parser.add_argument("--states", default="cold,warm", help=f"of the page cache: cold, half, warm, {COLD_MACHINE}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=limit, help="seconds that one measurement may take")
    parser.add_argument("--keep", action="store_true", help="leave the model for the next run")
    return parser


def build(directory: Path, gb: float, files: int) -> Path:
    """A Llama of random weights in ``directory``, if it is not there yet."""
    if (directory / "model.safetensors.index.json").exists():
        return directory
    sizes = TINY if gb < 0.5 else LARGE
    of = {
        "hidden": sizes["hidden_size"],
        "intermediate": sizes["intermediate_size"],
        "vocabulary": sizes["vocab_size"],
        "kv": sizes["num_key_value_heads"] * sizes["head_dim"],
    }

    def nbytes(layers: int) -> int:
        shapes = common.llama_shapes(layers=layers, **of).values()
        return sum(2 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes)

    layers = max(1, round((gb * 1e9 - nbytes(0)) / (nbytes(1) - nbytes(0))))
    directory.mkdir(parents=True, exist_ok=True)
    config = sizes | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))
    names = list(common.llama_shapes(layers=layers, **of).items())
    weight_map: dict[str, str] = {}
    for number in range(files):
        part = dict(names[len(names) * number // files : len(names) * (number + 1) // files])
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        common.write_checkpoint(directory / name, part, seed=number)
        weight_map |= dict.fromkeys(part, name)
    # Last, so that it tells that the rest is there.
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def measured(
    task: dict[str, Any],
    files: list[Path],
    state: str,
    work: Path,
    limit: float,
    *,
    env: dict[str, str] | None = None,
) -> dict[str, Any]:
    """One load in a fresh process, from a page cache in that state; a failure is an answer too.

    ``cold-machine`` drops the page cache of the whole machine, so that Python, torch and the engine are cold too.
    """
    try:
        if task["device"] == "cpu":
            # Memory that a virtual machine has not touched yet would be what is measured.
            common.settle_memory(int(1.5 * sum(path.stat().st_size for path in files)))
        cached = common.set_cache(files, "cold" if state == COLD_MACHINE else state)
        if state == COLD_MACHINE:
            common.drop_page_cache()
        began = time.monotonic()
        answer = processes.run({"do": "from_pretrained"} | task, work, seconds=limit, env=OFFLINE | (env or {}))
    except (processes.FailedError, common.StateError) as error:
        return {"error": str(error)}
    return answer | {"cached": cached, "process_seconds": round(time.monotonic() - began, 2)}


def table(measurements: list[dict[str, Any]]) -> str:
    """Medians of each loader in each state, beside stock's."""
    lines = [
        "| state | loader | s | GB/s | stock / this | allocated above final | reserved above final | RSS | bytes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for item in measurements:
        groups.setdefault((item["state"], item["loader"]), []).append(item)
    stock = {
        state: statistics.median(item["seconds"] for item in items if "seconds" in item)
        for (state, loader), items in groups.items()
        if loader == "stock" and any("seconds" in item for item in items)
    }
    for (state, loader), items in groups.items():
        good = [item for item in items if "seconds" in item]
        if not good:
            lines.append(f"| {state} | {loader} | failed: {items[0]['error']} |" + " |" * 6)
            continue
        seconds = statistics.median(item["seconds"] for item in good)
        ratio = f"{stock[state] / seconds:.2f}" if state in stock else ""
        above = [f"{max(item[key] for item in good) / 2**20:.0f} MiB" for key in ("allocated_above", "reserved_above")]
        rss = max(item["peak_rss"] for item in good) / 1e9
        right = "ok" if all(item["bytes_ok"] for item in good) else "WRONG"
        rate = good[0]["bytes"] / seconds / 1e9
        lines.append(
            f"| {state} | {loader} | {seconds:.3f} | {rate:.2f} | {ratio} "
            f"| {' | '.join(above)} | {rss:.1f} GB | {right} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
