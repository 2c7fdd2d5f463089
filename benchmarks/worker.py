"""What every fresh process of a measurement runs: one task by its name, from a file, answered in a file.

    python -m benchmarks.worker TASK.json RESULT.json

A task is a JSON object: ``do`` names it, and the rest is the task's own. The module of a task is imported only for it,
so no measurement pays for what another one imports. The answer goes to a file, so it does not matter what a loader
prints, or how it dies at exit.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

# The module of each task; its function ``run_task`` takes the task and returns the answer.
TASKS = {
    "load": "measured",
    "limit": "measured",
    "serialise": "measured",
    "from_pretrained": "engines_measured",
    "vllm": "engines_vllm_measured",
}


def main() -> None:
    question, answer = map(Path, sys.argv[1:])
    task = json.loads(question.read_text())
    if task.get("do") not in TASKS:
        raise SystemExit(f"no task {task.get('do')!r}: {', '.join(TASKS)}")
    module = importlib.import_module(f".{TASKS[task['do']]}", __package__)
    answer.write_text(json.dumps(module.run_task(task)))


if __name__ == "__main__":
    main()
