"""Compiles a function with torch.compile for the CPU, and says in JSON what came of it and whether it was cached."""

from __future__ import annotations

import json
import re
import subprocess

import torch

COMPILER = re.compile(r"\S*\b(g\+\+|gcc|c\+\+|cc|clang\+\+|clang)[-.\d]* ")
started: list[str] = []


class Watched(subprocess.Popen):  # type: ignore[type-arg]
    """Notes which programs are started: a compiler, or none."""

    def __init__(self, args: object, *more: object, **keywords: object) -> None:
        words = args if isinstance(args, list | tuple) else str(args).split()
        started.append(" ".join(map(str, words)))
        super().__init__(args, *more, **keywords)  # type: ignore[call-overload]


subprocess.Popen = Watched  # type: ignore[misc]


@torch.compile
def computed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ y).sum(-1) + torch.sin(x).mean()


x = torch.arange(4096, dtype=torch.float32).reshape(64, 64) / 4096
found = computed(x, x).sum().item()
counters = torch._dynamo.utils.counters
print(
    json.dumps(
        {
            "sum": found,
            "graph hits": counters["inductor"]["fxgraph_cache_hit"],
            "graph misses": counters["inductor"]["fxgraph_cache_miss"],
            "autograd hits": counters["aot_autograd"]["autograd_cache_hit"],
            "compiled": [one for one in started if COMPILER.match(one) and " -o " in one and " -E " not in one],
        }
    )
)
