"""One measurement of ``penstock bench switch``, carried out in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import models, turns

EXPECTED = "sample.json"
"""What is sampled of the tensors that were written."""


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """Measures one arm of one part."""
    import torch

    torch.set_grad_enabled(False)
    part, directory = task["case"], Path(task["directory"])
    if part == "write":
        return _write(task, directory)
    if task["device"] != "cpu":
        torch.cuda.set_device(task["device"])
        torch.empty(1 << 20, device=task["device"]).fill_(1)
    task = task | {"expected": json.loads((directory / EXPECTED).read_text())}
    if part == "read":
        from . import reading

        return reading.run(task)
    if part in {"order", "reload"}:
        from . import building

        return building.order(task) if part == "order" else building.reload(task)
    if part == "copy":
        from . import copying

        return copying.run(task)
    if part == "request":
        from . import stages

        return stages.run(task)
    return turns.run(task)


def _write(task: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Writes the model that all parts read."""
    modules = turns.built(task, task["model"], 0)
    files = models.save(task["model"], modules, directory)
    (directory / EXPECTED).write_text(json.dumps(models.sample(modules)))
    tensors = sum(len(module.state_dict()) for module in modules.values())
    return {"bytes": sum(map(models.nbytes, modules.values())), "tensors": tensors, "files": [str(of) for of in files]}
