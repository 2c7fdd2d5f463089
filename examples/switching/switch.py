"""Two models, and room for one on the device: a, then b, then a again. See README.md."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import penstock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from penstock.bench import bars

TURNS = ("a", "b", "a")


def make(layers: int, width: int) -> torch.nn.Module:
    """A model of some matrices, on the CPU."""
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(layers))).eval()


def synchronise(device: str) -> None:
    """Waits for the GPU, if it is one."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(work: Callable[[str], torch.Tensor], device: str) -> list[tuple[str, float, torch.Tensor]]:
    """What each turn took, and what the model answered."""
    took = []
    for name in TURNS:
        began = time.perf_counter()
        answer = work(name)
        synchronise(device)
        took.append((name, time.perf_counter() - began, answer))
    return took


def main(arguments: list[str] | None = None) -> None:
    """Switches, prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--chart", type=Path, default=Path("switch.svg"))
    options = parser.parse_args(arguments)
    models = {name: make(options.layers, options.width) for name in "ab"}
    nbytes = sum(parameter.nbytes for parameter in models["a"].parameters())
    x = torch.randn(1, options.width, dtype=torch.bfloat16, device=options.device)

    def by_to(name: str) -> torch.Tensor:
        models["b" if name == "a" else "a"].to("cpu")
        return models[name].to(options.device)(x)

    with torch.inference_mode():
        plain = timed(by_to, options.device)
        for model in models.values():
            model.to("cpu")
        with penstock.ModelPool(options.device, host_budget=2 * nbytes + 4096, device_budget=nbytes + 4096) as pool:
            for name, model in models.items():
                pool.adopt(name, model)

            def by_pool(name: str) -> torch.Tensor:
                with pool.use(name) as lease:
                    return lease["model"](x).clone()

            pooled = timed(by_pool, options.device)
            print(pool.explain("a"))
    for (name, before, expected), (_, after, answer) in zip(plain, pooled, strict=True):
        same = "the same answer" if torch.equal(expected, answer) else "ANOTHER ANSWER"
        print(f"{name}: .to {before:.4f} s, pool {after:.4f} s, {same}")
    rows = [("Penstock", pooled[-1][1]), (".to, both ways", plain[-1][1])]
    title = f"Seconds to switch back to {nbytes / 1e9:.2f} GB and use it, {options.device}"
    options.chart.write_text(bars.bars(title, [(label, took, f"{took:.3f} s") for label, took in rows]))
    print(f"wrote {options.chart}")


if __name__ == "__main__":
    main()
