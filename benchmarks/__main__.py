"""The command: ``python -m benchmarks EXPERIMENT ...``. It knows the experiments' names and nothing of what they do."""

from __future__ import annotations

import importlib
import sys

EXPERIMENTS = {
    "rivals": "files to one GPU or CPU, beside the limits and other loaders",
    "local_cpu": "files to CPU tensors, beside the limits and safetensors",
    "readers": "the number of readers that is found, beside fixed ones",
    "blocks": "block sizes and numbers of readers",
    "disk": "readers of a disk in a drawn order, file by file",
    "disk_cache": "the disk cache of remote stores",
    "remote": "object stores, beside plain clients and other loaders",
    "engines": "from_pretrained of transformers, stock and Penstock's",
    "engines_vllm": "vLLM with each load format",
    "sharing": "ranks that share reads, beside ranks that do not",
    "pairs": "two builds of Penstock, loads that alternate",
}


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(usage())
        return
    name = arguments[0]
    if name not in EXPERIMENTS:
        raise SystemExit(f"no experiment {name!r}\n\n{usage()}")
    sys.argv = [f"{__package__} {name}", *arguments[1:]]
    importlib.import_module(f".{name}", __package__).main()


def usage() -> str:
    """The names of all experiments, one a line."""
    width = max(map(len, EXPERIMENTS))
    lines = [f"  {name:{width}}  {what}" for name, what in EXPERIMENTS.items()]
    head = ["usage: python -m benchmarks EXPERIMENT [options]", "", "experiments:"]
    return "\n".join([*head, *lines, "", "EXPERIMENT --help lists the options of one."])


if __name__ == "__main__":
    main()
