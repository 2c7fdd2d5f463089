"""Fresh processes for measurements: what they are asked, how long they may take, and how they failed.

A loader may crash, hang, print what it likes or die at exit; none of that may end the comparison. Each task runs in a
session of its own, which is killed as a whole when its time is over, and answers in a file (see ``worker.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Where this package lies: fresh processes import it from there, after everything else.
ROOT = Path(__file__).resolve().parent.parent


class FailedError(Exception):
    """The process ended without an answer; says why in one line."""


class HungError(FailedError):
    """The process was killed because its time was over."""


def command(module: str, *arguments: str) -> list[str]:
    """The command line of a module of this package."""
    return [sys.executable, "-m", f"{__package__}.{module}", *arguments]


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a fresh process: ours with that one over it, in which this package can be imported.

    The current directory is not searched for modules, and what PYTHONPATH names comes before this package.
    """
    merged = os.environ | dict(env or {})
    path = os.pathsep.join(filter(None, [merged.get("PYTHONPATH"), str(ROOT)]))
    return merged | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def run(
    task: dict[str, Any],
    work: Path,
    *,
    seconds: float,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs a task of ``worker.py`` in a fresh process and returns its answer.

    If the process dies after its answer was written, the answer counts, and ``exit`` in it says how it died.
    """
    question, answer, errors = work / "task.json", work / "answer.json", work / "errors.txt"
    question.write_text(json.dumps(task))
    answer.unlink(missing_ok=True)
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            command("worker", str(question), str(answer)),
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            env=environment(env),
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise HungError(f"no end after {seconds:.0f} s") from None
        finally:
            # Whatever it has started goes with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not answer.exists():
        raise FailedError(f"{_ended(code)}: {_last_words(errors.read_text(errors='replace'))}")
    result: dict[str, Any] = json.loads(answer.read_text())
    return result | ({"exit": _ended(code)} if code else {})


def measure(module: str, *arguments: str) -> dict[str, Any]:
    """Runs a module of this package in a fresh process; its last line of output is its result as JSON."""
    done = subprocess.run(command(module, *arguments), env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last_words(text: str) -> str:
    """The line of a traceback that says what happened; else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "Exit", "Interrupt"))]
    return (named or lines or ["nothing was printed"])[-1][:300]
