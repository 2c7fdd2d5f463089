"""The program of every measured process: carries out tasks by their name.

    python worker.py TASK.json RESULT.json      # one task; the answer goes to a file
    python worker.py --resident fork|keep [MODULE …]  # tasks by line; each in a forked child, or all in this process

A task is a JSON object: ``do`` names it, and the rest is the task's own. The module of a task is imported only for it,
so no measurement pays for what another one imports. It does not matter what a loader prints, or how it dies at exit.

The package is imported from this file's directory as ``penstock_bench``. So no loader's process imports ``penstock``
that does not use it, and a process may measure another build of it than the one that measures.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The module of each task; its function ``run_task`` takes the task and returns the answer.
TASKS = {
    "load": "measure",
    "limit": "limits",
    "serialise": "loaders.tensorizer",
    "switch": "switch.tasks",
    "engine": "engine.tasks",
    "vllm": "loaders.vllm",
    "sglang": "loaders.sglang",
}
ALIAS = "penstock_bench"


def carry_out(task: dict[str, Any]) -> dict[str, Any]:
    """The answer to a task."""
    do = str(task.get("do"))
    # A name with dots is a module that brings its own task.
    module = do if "." in do else f"{ALIAS}.{TASKS[do]}" if do in TASKS else None
    if module is None:
        raise SystemExit(f"no task {do!r}: {', '.join(TASKS)}")
    os.environ.update(task.get("env", {}))
    answer: dict[str, Any] = importlib.import_module(module).run_task(task)
    return answer


def resident(*, fork: bool, imports: Sequence[str] = ()) -> None:
    """Answers tasks by line, having imported torch once. What a load prints goes to the error stream."""
    for module in ("torch", *imports):  # what takes seconds, once
        importlib.import_module(module)

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
        resident(fork=sys.argv[2] == "fork", imports=sys.argv[3:])
        return
    question, answer = map(Path, sys.argv[1:])
    answer.write_text(json.dumps(carry_out(json.loads(question.read_text()))))


def _import_package() -> None:
    """Imports the package that this file is of, under its other name."""
    here = Path(__file__).resolve().parent
    # Python before 3.11 looks for modules beside a script.
    sys.path[:] = [path for path in sys.path if not path or Path(path).resolve() != here]
    spec = importlib.util.spec_from_file_location(ALIAS, here / "__init__.py", submodule_search_locations=[str(here)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[ALIAS] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    _import_package()
    main()
