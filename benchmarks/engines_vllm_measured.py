"""What runs in the fresh process of one measurement of ``engines_vllm.py``.

The clock for "ready" starts with the process and ends when tokens were generated. What vLLM logs of loading is caught
as it is logged, with the memory of that moment. After the clock, all of the model's parameters are summed up.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import resource
import time
from typing import Any

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


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    from . import checksum

    imported = time.perf_counter() - BEGAN
    cuda = task["device"] == "cuda"
    heard = Heard(cuda=cuda)
    llm = LLM(
        task["model"],
        load_format=task["format"],
        model_loader_extra_config=task["extra"],
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
        "weights_seconds": heard.weights,
        "model_seconds": heard.model,
        "ready_seconds": round(ready, 2),
        "import_seconds": round(imported, 2),
        "allocated_above": heard.above,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "tokens": list(made[0].outputs[0].token_ids),
        "parameters": hashlib.sha256(json.dumps(sorted(sums.items())).encode()).hexdigest()[:16],
        "log": heard.lines,
    }
