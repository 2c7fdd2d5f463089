"""A program as people write it with transformers: imports, a model, an answer. ``python program.py TASK.json``.

What ``penstock.start`` sees of it are its imports and its ``from_pretrained``. It says itself how long compiling took
and what it read from the device: nobody else can tell.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

TOKENS = 4


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(task["model"])
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]  # imports its module
    if task["loader"] == "penstock":
        from penstock.integrations.transformers import from_pretrained
    if task["imports_only"]:
        return
    read = device_bytes()
    if task["loader"] == "penstock":
        model = from_pretrained(kind, task["model"], device=task["device"], dtype=torch.bfloat16)
    else:
        model = kind.from_pretrained(task["model"], dtype=torch.bfloat16, device_map={"": task["device"]})
    prompt = torch.arange(3, 20, device=task["device"])[None]
    compiled = 0.0
    if task["compiled"]:
        began = time.perf_counter()
        model.forward = torch.compile(model.forward, dynamic=True)
        with torch.inference_mode():
            model(prompt, use_cache=False)
        compiled = time.perf_counter() - began
    answer = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, use_cache=True)
    told: dict[str, Any] = {"outcome": answer[0, prompt.shape[1] :].tolist(), "compiled_seconds": compiled}
    told["device_bytes"] = device_bytes() - read
    Path(task["answer"]).write_text(json.dumps(told))


def device_bytes() -> int:
    """What the kernel has read from devices for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


if __name__ == "__main__":
    main()
