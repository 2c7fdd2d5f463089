"""SGLang with a load format: ``sglang-auto``, ``sglang-penstock``. Seconds until it has generated a few tokens.

Its model is loaded in processes of its own, so what they log is not heard, and tokens alone are compared.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from . import Loader
from .transformers import OFFLINE
from .vllm import BEGAN, format_of


def make(name: str) -> Loader:
    """Any format that SGLang may know."""
    assert name.startswith("sglang-")
    return Loader("sglang", env=OFFLINE, task="sglang")


LOADERS = {name: make(name) for name in ("sglang-auto", "sglang-penstock")}


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    import sglang

    imported = time.perf_counter() - BEGAN
    engine = sglang.Engine(
        model_path=str(Path(task["files"][0]).parent),
        load_format=format_of(task["loader"]),
        device=task["device"].partition(":")[0],
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        context_length=512,
        random_seed=0,
    )
    made = engine.generate(input_ids=list(range(3, 20)), sampling_params={"max_new_tokens": 16, "temperature": 0})
    ready = time.perf_counter() - BEGAN
    engine.shutdown()
    return {
        "seconds": round(ready - imported, 2),
        "ready_seconds": round(ready, 2),
        "import_seconds": round(imported, 2),
        "outcome": [list(made["output_ids"]), None],
    }
