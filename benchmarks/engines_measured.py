"""What runs in the fresh process of one measurement of ``engines.py``.

Before the clock: imports (also of the module that the model's class lies in) and the CUDA context. Timed: the call, and
waiting for the device. After it: memory, and the checksums of all parameters where they lie.
"""

from __future__ import annotations

import json
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import checksum


def loader_of(name: str) -> Callable[[str, str, Any], Any]:
    """The loader: a function of the model's directory, the device and the dtype. Imports what it needs."""
    if name not in {"stock", "patched", "penstock", "mapped"}:
        raise ValueError(f"no loader {name!r}")
    import transformers
    import transformers.models.llama.modeling_llama

    if name in {"penstock", "mapped"}:
        from penstock.integrations.transformers import from_pretrained

        options = {"mmap": True} if name == "mapped" else {}
        return lambda model, device, dtype: from_pretrained("auto", model, device=device, dtype=dtype, **options)

    def stock(model: str, device: str, dtype: Any) -> Any:
        # The class itself, as the other loader finds it by the configuration too.
        return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype, device_map={"": device})

    if name == "stock":
        return stock
    import penstock

    return penstock.patch_safetensors()(stock)


class Watch:
    """Samples how much memory of the GPU is in use, by anyone."""

    def __init__(self, device: str) -> None:
        self.peak = 0
        self._device = device
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        import torch

        while not self._over.wait(0.005):
            free, total = torch.cuda.mem_get_info(self._device)
            self.peak = max(self.peak, total - free)

    def end(self) -> int:
        self._over.set()
        self._thread.join()
        return self.peak


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    import torch

    device, cuda = task["device"], task["device"].startswith("cuda")
    load = loader_of(task["loader"])
    dtype = getattr(torch, task["dtype"])
    watch, before = None, 0
    if cuda:
        torch.cuda.set_device(device)
        torch.empty(1 << 20, device=device).fill_(1)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]
        if task.get("watch", True):
            watch = Watch(device)
    else:
        torch.zeros(1).clone()
    began = time.perf_counter()
    model = load(task["model"], device, dtype)
    if cuda:
        torch.cuda.synchronize()
    else:
        # Views of a file are read by their first use.
        for parameter in model.parameters():
            parameter.view(torch.int16).reshape(-1)[::2048].sum()
    seconds = time.perf_counter() - began
    in_use = watch.end() - before if watch else 0
    parameters = dict(model.named_parameters())
    result: dict[str, Any] = {
        "seconds": round(seconds, 4),
        "bytes": sum(p.nbytes for p in parameters.values()),
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "allocated_above": torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() if cuda else 0,
        "reserved_above": torch.cuda.max_memory_reserved() - torch.cuda.memory_allocated() if cuda else 0,
        "in_use_above": in_use - torch.cuda.memory_allocated() if cuda else 0,
        "bytes_ok": all(p.device == torch.device(device) for p in parameters.values()),
    }
    if task["reference"]:
        expected = json.loads(Path(task["reference"]).read_text())
        wrong = checksum.wrong(checksum.of_tensors({n: p.detach() for n, p in parameters.items()}), expected)
        result |= {"bytes_ok": result["bytes_ok"] and not wrong, "wrong": wrong[:10]}
    return result
