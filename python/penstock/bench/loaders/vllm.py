"""vLLM with each of its load formats: ``vllm-FORMAT``, such as ``vllm-auto`` or ``vllm-runai_streamer@penstock``.

The clock for "ready" starts with the process and ends when tokens were generated. What vLLM logs of loading is caught
as it is logged, with the memory of that moment. After the clock, all of the model's parameters are summed up. Settings
are its ``model_loader_extra_config``: ``vllm-runai_streamer:distributed=true``. With ``processes=1`` the engine has a
process of its own, as it usually has: it starts later then, and only the seconds until it answers are known.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import resource
import time
from pathlib import Path
from typing import Any

from . import Loader, settings
from .transformers import OFFLINE

# Read where the process begins: this module is imported for its task, and before vLLM.
BEGAN = time.perf_counter()
WEIGHTS = re.compile(r"Loading weights took ([\d.]+) seconds")
MODEL = re.compile(r"Model loading took .* ([\d.]+) seconds")


class Heard:
    """Figures that vLLM logs while it loads. Heard where records are made, since vLLM changes handlers as it goes."""

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self._make = logging.getLogRecordFactory()
        self.weights: float | None = None
        self.model: float | None = None
        self.above: int | None = None
        self.lines: list[str] = []
        logging.setLogRecordFactory(self._hear)

    def _hear(self, *arguments: Any, **named: Any) -> logging.LogRecord:
        record = self._make(*arguments, **named)
        if record.name.startswith("vllm"):
            self._note(record.getMessage())
        return record

    def _note(self, line: str) -> None:
        if found := WEIGHTS.search(line):
            self.weights = float(found[1])
        elif found := MODEL.search(line):
            self.model = float(found[1])
            self.above = 0
            if self._cuda:
                import torch

                self.above = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        elif line.startswith("Penstock:"):
            self.lines.append(line)


ENV = OFFLINE | {
    # In this process, where it can be looked at.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
FORMATS = ["auto", "runai_streamer", "fastsafetensors", "penstock"]


def make(name: str) -> Loader:
    """Any format that vLLM may know."""
    assert name.startswith("vllm-")
    return Loader("vllm", env=ENV, task="vllm")


LOADERS = {f"vllm-{name}": make(f"vllm-{name}") for name in FORMATS}


def format_of(name: str) -> str:
    """The load format of a row: ``runai_streamer`` of ``vllm-runai_streamer@gpu:distributed=true``."""
    return name.partition(":")[0].partition("@")[0].partition("-")[2]


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    given = settings(task["loader"])
    if given.pop("processes", "0") == "1":
        os.environ.update(PROCESSES)
    from vllm import LLM, SamplingParams

    from penstock.bench import checksum  # whose name another process of the engine finds it by

    imported = time.perf_counter() - BEGAN
    heard = Heard(cuda=task["device"].startswith("cuda"))
    llm = LLM(
        str(Path(task["files"][0]).parent),
        load_format=format_of(task["loader"]),
        model_loader_extra_config={key: json.loads(value) for key, value in given.items()},
        dtype="bfloat16",
        max_model_len=512,
        enforce_eager=True,
        skip_tokenizer_init=True,
        seed=0,
    )
    prompt: Any = {"prompt_token_ids": list(range(3, 20))}
    made = llm.generate([prompt], SamplingParams(max_tokens=16, temperature=0, detokenize=False), use_tqdm=False)
    ready = time.perf_counter() - BEGAN
    [sums] = llm.apply_model(checksum.of_model)
    return {
        "seconds": round(ready - imported, 2),
        "weights_seconds": heard.weights,
        "model_seconds": heard.model,
        "ready_seconds": round(ready, 2),
        "import_seconds": round(imported, 2),
        "allocated_above": heard.above,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "outcome": [
            list(made[0].outputs[0].token_ids),
            hashlib.sha256(json.dumps(sorted(sums.items())).encode()).hexdigest()[:16],
        ],
        "log": heard.lines,
    }
