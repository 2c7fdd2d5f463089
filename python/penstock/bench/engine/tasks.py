"""One start of an engine in a state of the cache, watched by ``penstock.start`` until it answers.

``cold`` is the page cache as far as this process may: the weights, and every file that the engine's start may read (its
Python, packages, libraries), unless another process has it mapped. How much of those was cached is told.
``cold-machine`` drops the machine's page cache. ``warm`` is a second start: its files and its compile cache are there.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from .. import states
from .engines import EAGER, Started, said, started

DROPPED = {"cold": "cold", "cold-machine": "cold"}


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """Starts an engine, and says how long each step took until it answered."""
    files = [Path(file) for file in task["files"]]
    with tempfile.TemporaryDirectory(prefix="penstock-engine-") as home:
        work = Path(home)
        if task["state"] == "warm":
            _warm(task, work)
        # What an earlier measurement compiled is there in the warm state only.
        compiled = sum(1 for path in Path(task["caches"]).rglob("*") if path.is_file())
        share = states.set_cache(files, DROPPED.get(task["state"], "warm"))
        if task["state"] == "cold-machine":
            states.drop_page_cache()
        start, told = _watched(task, started(task, work), work, cold=task["state"] == "cold")
    nbytes = sum(file.stat().st_size for file in files)
    device_bytes = told.pop("device_bytes", None)
    cache: dict[str, Any] = {"before": round(share, 4)}
    if device_bytes is not None and task["counted"]:
        cache["device"] = round(device_bytes / nbytes, 4)
    return _figures(task, start, told) | {
        "cache": cache,
        "candidates_cached": start.before[0] / max(start.before[1], 1),
        "candidate_bytes": start.before[1],
        "compile_cache_files": compiled,
    }


def _warm(task: dict[str, Any], work: Path) -> None:
    """Has the files of a start in the page cache; of what compiles, a start before fills the compile cache."""
    if task["engine"] != "transformers" or (task["mode"] != EAGER and not any(Path(task["caches"]).iterdir())):
        _watched(task, started(task, work), work, cold=False)
    else:
        _watched(task, started(task, work, imports_only=True), work, cold=False, answers=False)


def _watched(
    task: dict[str, Any], of: Started, work: Path, *, cold: bool, answers: bool = True
) -> tuple[Any, dict[str, Any]]:
    """The start as it was seen, and what the engine said.

    Raises:
        RuntimeError: it ended without an answer.
    """
    from penstock.start.observe import Observer, Readiness

    for name, value in of.env.items():
        os.environ[name] = value
    Path(task["caches"]).mkdir(parents=True, exist_ok=True)
    found: list[tuple[Any, dict[str, Any]]] = []

    def ready(start: Any) -> None:
        # A server is asked once more before it is ended: it says the same, and this time we read it.
        told = said(of, work) if answers and start.ready else {}
        if of.url is not None:
            before = start.used.get("engine start")
            last = start.used.get("first answer")
            if before is not None and last is not None:
                told["device_bytes"] = last.disk_bytes - before.disk_bytes
        found.append((start, told))

    observer = Observer(of.command, Readiness(of.url, of.body), look=answers, cold=cold, stdout_to=2)
    status = observer.run(ready, stop_when_ready=of.url is not None)
    (start, told) = found[0]
    if not start.ready or (answers and not told):
        raise RuntimeError(f"{task['engine']} ended with status {status} and did not answer")
    return start, told


def _figures(task: dict[str, Any], start: Any, told: dict[str, Any]) -> dict[str, Any]:
    """Seconds in all and by step; a step whose end was not seen is in the next that was."""
    ended = [step for step in start.steps if step.ended is not None]
    figures: dict[str, Any] = {f"stage_{step.name}": round(step.seconds, 4) for step in ended}
    compiled = told.get("compiled_seconds")
    if compiled and "stage_first answer" in figures:
        last = figures.pop("stage_first answer")
        figures |= {"stage_compile": round(compiled, 4), "stage_first answer": round(last - compiled, 4)}
    used = max((use.cpu_seconds for use in start.used.values()), default=None)
    figures |= {"seconds": round(ended[-1].ended, 4)} | ({"cpu_seconds": used} if used is not None else {})
    return figures | {"outcome_said": told["outcome"], "engine": task["engine"]}
