"""Penstock: whole loads, streams, loads into memory that exists, and mapped files."""

from __future__ import annotations

from typing import Any

from . import Load, Loader, Tensors, Use


def _loading(take: Any) -> Any:
    """A row that takes tensors from a checkpoint by ``take(checkpoint, use)``."""

    def prepare(use: Use) -> Load:
        # What would be imported when it is first used.
        import penstock
        import penstock.checkpoint
        import penstock.frameworks.torch

        def load(files: list[str]) -> Tensors:
            checkpoint = penstock.open(files)
            tensors: Tensors = take(checkpoint, use)
            use.notes["stats"] = checkpoint.stats.as_dict() if checkpoint.stats else None
            return tensors

        return load

    return prepare


def _each(checkpoint: Any, use: Use) -> Tensors:
    """Of a stream whose tensors are dropped, the last one."""
    use.notes["bytes"] = checkpoint.nbytes
    last: Tensors = {}
    for name, tensor in checkpoint.stream(device=use.device):
        last = {name: tensor}
        use.arrived()
    return last


def _stream(checkpoint: Any, use: Use) -> Tensors:
    tensors: Tensors = {}
    for name, tensor in checkpoint.stream(device=use.device):
        tensors[name] = tensor
        use.arrived()
    return tensors


def _into(use: Use) -> Load:
    held: Tensors = {}

    def take(checkpoint: Any, _: Use) -> Tensors:
        if held:
            checkpoint.load_into(held)
        else:
            held.update(checkpoint.load(device=use.device))
        return dict(held)

    prepared: Load = _loading(take)(use)
    return prepared


def _flush(notes: dict[str, Any]) -> None:
    """Waits for the disk cache, which is written after the load; how long is a figure of its own."""
    import time

    import penstock

    began = time.perf_counter()
    if not penstock.flush_disk_cache(300):
        raise RuntimeError("the disk cache is not written after 300 s")
    notes["flush_seconds"] = round(time.perf_counter() - began, 4)
    notes["network_bytes"] = (notes.get("stats") or {}).get("network_bytes")


whole = _loading(lambda checkpoint, use: checkpoint.load(device=use.device))
LOADERS = {
    "penstock": Loader("penstock", whole),
    "penstock-second": Loader("penstock", whole, second=True),
    # Tensors that exist are filled.
    "penstock-into": Loader("penstock", _into, second=True),
    "penstock-stream": Loader("penstock", _loading(_stream)),
    "penstock-each": Loader("penstock", _loading(_each), checked=False),
    "penstock-mmap": Loader("penstock", _loading(lambda checkpoint, _: checkpoint.load(mmap=True, prefault=True))),
    "penstock-cached": Loader("penstock", whole, finish=_flush),
}
