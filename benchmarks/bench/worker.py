"""The program of every measured process: carries out tasks by their name.

    python -m PACKAGE.worker TASK.json RESULT.json      # one task; the answer goes to a file
    python -m PACKAGE.worker --resident fork|keep       # tasks by line; each in a forked child, or all in this process

A task is a JSON object: ``do`` names it, and the rest is the task's own. The module of a task is imported only for it,
so no measurement pays for what another one imports. It does not matter what a loader prints, or how it dies at exit.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

# The module of each task; its function ``run_task`` takes the task and returns the answer.
TASKS = {
    "load": "measure",
    "limit": "limits",
    "serialise": "loaders.tensorizer",
    "vllm": "loaders.vllm",
    "sglang": "loaders.sglang",
    "rank": "experiments.sharing",
    "switch": "experiments.switch",
}


def carry_out(task: dict[str, Any]) -> dict[str, Any]:
    """The answer to a task."""
    if task.get("do") not in TASKS:
        raise SystemExit(f"no task {task.get('do')!r}: {', '.join(TASKS)}")
    os.environ.update(task.get("env", {}))
    answer: dict[str, Any] = importlib.import_module(f".{TASKS[task['do']]}", __package__).run_task(task)
    return answer


def resident(*, fork: bool) -> None:
    """Answers tasks by line, having imported torch once. What a load prints goes to the error stream."""
    import torch  # noqa: F401 - what takes seconds, once

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write((_in_a_child(line) if fork else _answer(line)) + "\n")
        answers.flush()


def _answer(line: str) -> str:
    try:
        return json.dumps(carry_out(json.loads(line)))
    except BaseException as error:  # noqa: BLE001 - passed on as the answer
        traceback.print_exc()
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:300]})


def _in_a_child(line: str) -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(write, "w") as pipe:
            pipe.write(_answer(line))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer or '{"error": "the child ended without an answer"}'


def main() -> None:
    if sys.argv[1] == "--resident":
        resident(fork=sys.argv[2] == "fork")
        return
    question, answer = map(Path, sys.argv[1:])
    answer.write_text(json.dumps(carry_out(json.loads(question.read_text()))))


if __name__ == "__main__":
    main()
