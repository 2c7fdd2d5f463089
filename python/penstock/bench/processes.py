"""Fresh processes for measurements: what they are asked, how long they may take, and how they failed.

A loader may crash, hang, print what it likes or die at exit; none of that may end the comparison. Each task runs in a
session of its own, which is killed as a whole when its time is over, and answers in a file (see ``worker.py``). A
``Resident`` answers several tasks: it has imported torch once, and forks for each task or keeps what a load has made.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).resolve().with_name("worker.py")


class FailedError(Exception):
    """The process ended without an answer; says why in one line."""


class HungError(FailedError):
    """The process was killed because its time was over."""


def command(*arguments: str) -> list[str]:
    """The command line of a worker: by its file, since what it measures may be another build of ``penstock``."""
    return [sys.executable, str(WORKER), *arguments]


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a fresh process: ours with that one over it, without the current directory's modules."""
    return os.environ | dict(env or {}) | {"PYTHONSAFEPATH": "1"}


def run(task: dict[str, Any], work: Path, *, seconds: float, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Runs a task of ``worker.py`` in a fresh process and returns its answer.

    If the process dies after its answer was written, the answer counts, and ``exit`` in it says how it died.
    """
    (answer,) = run_together([task], work, seconds=seconds, env=env)
    return answer


def run_together(
    tasks: list[dict[str, Any]], work: Path, *, seconds: float, env: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Runs tasks side by side, each in a fresh process: ranks that wait for each other."""
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(_started(task, work / str(n), env)) for n, task in enumerate(tasks)]
        return [_answer(process, place, deadline, seconds) for process, place in started]


@contextlib.contextmanager
def _started(
    task: dict[str, Any], place: Path, env: Mapping[str, str] | None
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    place.mkdir(parents=True, exist_ok=True)
    question, answer = place / "task.json", place / "answer.json"
    question.write_text(json.dumps(task))
    answer.unlink(missing_ok=True)
    with (place / "errors.txt").open("wb") as stderr:
        process = subprocess.Popen(
            command(str(question), str(answer)),
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            env=environment(env),
            start_new_session=True,
        )
        try:
            yield process, place
        finally:
            # Whatever it has started goes with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answer(process: subprocess.Popen[bytes], place: Path, deadline: float, seconds: float) -> dict[str, Any]:
    try:
        code = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise HungError(f"no end after {seconds:.0f} s") from None
    if not (place / "answer.json").exists():
        raise FailedError(f"{_ended(code)}: {_last_words((place / 'errors.txt').read_text(errors='replace'))}")
    result: dict[str, Any] = json.loads((place / "answer.json").read_text())
    return result | ({"exit": _ended(code)} if code else {})


class Resident:
    """A process that answers one task after another, by ``mode``: ``fork`` or ``keep`` (see ``worker.py``).

    Besides torch it has imported ``imports``, so that forked processes need not.
    """

    def __init__(self, mode: str, env: Mapping[str, str] | None = None, imports: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            command("--resident", mode, *imports),
            env=environment(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def run(self, task: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        """The answer to a task.

        Raises:
            FailedError: the task failed, or the process has ended; the message says how.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise FailedError("the process has ended") from None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            self.close()
            raise HungError(f"no end after {seconds:.0f} s")
        answer: dict[str, Any] = json.loads(self._process.stdout.readline() or '{"error": "the process has ended"}')
        if "error" in answer:
            raise FailedError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()
        self._process.wait()


def _ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last_words(text: str) -> str:
    """The line of a traceback that says what happened; else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "Exit", "Interrupt"))]
    return (named or lines or ["nothing was printed"])[-1][:300]
