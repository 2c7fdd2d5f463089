"""Experiments on files of a disk or of memory: they differ in their defaults alone."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from penstock.bench import checkpoints
from penstock.bench.files import LIMITS, STATES, WHOLE, Files

from . import Experiment


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--states", metavar="A,B", help=f"of the page cache: {', '.join(STATES)}")
    add("--cases", metavar="A,B", help=f"checkpoints to make: {', '.join(checkpoints.NAMES)}")
    add("--gb", type=float, metavar="N", help="size of the checkpoints")
    add("--one-gb", type=float, default=12.0, metavar="N", help="size of the case one-tensor")
    add("--tensors", type=int, default=100_000, metavar="N", help="how many the case small-tensors has")
    add("--files", type=int, default=4, metavar="N", help="files of the cases llama and model")
    add("--tmpfs", type=Path, default=Path("/dev/shm"), metavar="DIR", help="where the state tmpfs is made")
    add("--no-limits", action="store_true", help="without the machine's limits")
    modes = ("fresh", "fork", "keep")
    add("--process", choices=modes, help="of a measurement: fresh, forked, or one that stays")


def _experiment(name: str, summary: str, about: str, *, beside: tuple[str, ...] = (), **defaults: Any) -> Experiment:
    usual = {"device": "cuda:0", "rounds": 3, "gb": 15.19, "cases": "llama", "process": "fresh", "timeout": 300.0}
    rest = {"given": None, "limits": {}, "limit_rounds": math.inf, "rotate": False, "second_cold": False, "env": {}}
    return Experiment(name, summary, about, Files, add_options, usual | rest | defaults, beside)


EXPERIMENTS = [
    _experiment(
        "rivals",
        "files to a GPU or the CPU, beside other loaders and the limits",
        "Every loader that is installed, in each state of the page cache, from\n"
        "checkpoints whose shapes tell loaders apart.",
        states="cold,half,warm,tmpfs",
        cases="llama,small-tensors,one-tensor",
        timeout=120.0,
        limits=LIMITS,
        loaders="penstock,penstock-second,penstock-stream,safetensors,safetensors-prefetch,runai,runai-buffered,"
        "fastsafetensors,fastsafetensors-buffered,instanttensor,instanttensor-buffered,tensorizer",
    ),
    _experiment(
        "local_cpu",
        "files to CPU tensors, beside plain readers and safetensors",
        "The limits are plain readers to one buffer of the file's size: O_DIRECT\n"
        "when cold, cached pages when warm, to memory that is ready or fresh.",
        device="cpu",
        rounds=5,
        gb=2.15,
        cases="narrow",
        states="cold,warm",
        limits=WHOLE,
        env={"OMP_NUM_THREADS": "1"},
        second_cold=True,
        loaders="penstock,penstock-each,penstock-into,penstock-mmap,safetensors-clone,safetensors",
    ),
    _experiment(
        "readers",
        "the number of readers that is found, beside fixed ones",
        "What is found should be within 3 % of the best fixed number. A few rounds\n"
        "on a noisy disk can say no better than its noise.",
        device="cpu",
        rounds=5,
        gb=2.0,
        states="cold,warm",
        loaders="penstock,penstock:readers=1|2|4|8|12|16|24|32",
        beside=("penstock:",),
    ),
    _experiment(
        "blocks",
        "block sizes by numbers of readers",
        "Second loads of forked processes: what a load does once it runs, not what\nthe first load of a process costs.",
        rounds=2,
        states="warm,tmpfs",
        process="fork",
        loaders="penstock-second:readers=8|10|12|14|16+block_bytes="
        + "|".join(str(mib << 20) for mib in (1, 2, 3, 4, 6, 8)),
    ),
    _experiment(
        "disk",
        "readers of a disk whose rate wanders, file by file",
        "Each round reads one file of the checkpoint by O_DIRECT, in processes that\n"
        "have loaded before. A rate over the mean of all in its round is not moved\n"
        "by a disk that wanders within minutes.",
        rounds=8,
        states="cold",
        process="keep",
        rotate=True,
        loaders="plain:threads=16|8+kib=512,plain:threads=16+kib=256,plain:threads=16|12|8+kib=512+block_kib=4096,"
        "plain:threads=8|4+kib=4096,penstock:cache=bypass,penstock:cache=bypass+readers=16|12|24",
    ),
    _experiment(
        "engines",
        "from_pretrained of transformers, stock and Penstock's",
        "Builds a Llama of random weights that transformers can run.",
        gb=8.2,
        cases="model",
        states="cold,warm",
        timeout=600.0,
        loaders="transformers,transformers-patched,transformers-penstock",
        beside=("transformers",),
    ),
    _experiment(
        "engines_vllm",
        "vLLM, or SGLang, with each load format until it answers",
        "vllm-FORMAT and sglang-FORMAT are rows; settings are the format's extra\n"
        "configuration, and processes=1 gives vLLM's engine a process of its own.\n"
        "Tokens and parameters are compared with those of the format auto.",
        gb=15.2,
        cases="model",
        states="cold,warm",
        loaders="vllm-auto,vllm-runai_streamer,vllm-fastsafetensors,vllm-penstock",
        beside=("vllm-auto", "sglang-auto"),
    ),
    _experiment(
        "pairs",
        "two builds of Penstock, loads that alternate",
        "Needs --site penstock@before=DIR and --site penstock@after=DIR, directories\n"
        "with a build each. The ratio of medians has its 95 % interval, by\n"
        "bootstrap over rounds.",
        rounds=16,
        gb=15.2,
        states="warm,tmpfs",
        process="fork",
        loaders="penstock@before,penstock@after",
        beside=("penstock@before",),
    ),
]
