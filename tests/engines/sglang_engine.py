"""Runs models in SGLang's engine, and prints what each generated as one line of JSON.

    python sglang_engine.py '{"model_path": DIRECTORY, "load_format": "penstock", …}' …

Each argument is one engine's keywords, besides ``updates`` (models that take its place while it serves).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def run(settings: dict[str, Any]) -> dict[str, Any]:
    import sglang

    updates = settings.pop("updates", [])
    engine = sglang.Engine(
        device="cpu",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        dtype="float32",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        disable_radix_cache=True,
        context_length=128,
        max_total_tokens=512,
        mem_fraction_static=0.3,
        random_seed=0,
        log_level="info",
        **settings,
    )

    def tokens() -> list[int]:
        made = engine.generate(
            input_ids=list(range(3, 20)), sampling_params={"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
        )
        return list(made["output_ids"])

    found = [tokens()]
    updated = []
    for path in updates:
        for _ in range(20):
            went_well, message, *_ = engine.update_weights_from_disk(path)
            if went_well:
                break
            # It may take a moment to see that a request has ended, and says so instead of flushing its cache.
            time.sleep(0.5)
        updated.append(message)
        found.append(tokens())
    engine.shutdown()
    return {"tokens": found, "updated": updated}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print("\nRESULT " + json.dumps(run(json.loads(argument))), flush=True)
