"""A start as it is watched: steps from log lines or hooks, CPU and disk use, and what becomes resident."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from penstock.start import environment as environments
from penstock.start import usage
from penstock.start.command import Child
from penstock.start.environment import Environment
from penstock.start.residency import drop
from penstock.start.scanner import Read, Scanner
from penstock.start.steps import FIRST, STEPS, Step, Timeline, markers
from penstock.start.usage import Usage

EVENTS = "_PENSTOCK_START_EVENTS"
"""The variable that tells the hooks of a program where their pipe is. Internal."""
_HOOKS = str(Path(__file__).parent / "hooks")
_POLL_SECONDS = 0.2


@dataclass
class Start:
    """What was seen of a start.

    Attributes:
        command: what was started.
        environment: of the command.
        steps: each of the six.
        used: by step that ended: what the processes had used by then since they began.
        reads: what became resident, in order, and during which step.
        before: bytes of the candidate files that were resident before, and bytes that they have.
        hidden: files whose residency the kernel does not tell.
        ready: whether the first answer was seen.
        status: exit code, or the negative number of the signal; None while it runs.
    """

    command: list[str]
    environment: Environment
    steps: list[Step] = field(default_factory=list)
    used: dict[str, Usage] = field(default_factory=dict)
    reads: list[tuple[str, Read]] = field(default_factory=list)
    before: tuple[int, int] = (0, 0)
    hidden: int = 0
    ready: bool = False
    status: int | None = None

    def used_by_step(self) -> dict[str, Usage]:
        """CPU and disk of each step alone, of those whose end was seen."""
        found, before = {}, Usage()
        for step in self.steps:
            if (now := self.used.get(step.name)) is not None:
                cpu, disk = now.cpu_seconds - before.cpu_seconds, now.disk_bytes - before.disk_bytes
                found[step.name] = Usage(max(cpu, 0.0), max(disk, 0), now.processes)
                before = now
        return found


@dataclass(frozen=True)
class Readiness:
    """How it is known that a program answers, where its log does not tell.

    Attributes:
        url: asked until it answers without an error.
        body: JSON that is posted to it, in place of a GET.
        log: a line that holds this.
    """

    url: str | None = None
    body: str | None = None
    log: re.Pattern[str] | None = None

    def asked(self) -> bool:
        """Whether the URL answers now."""
        data = None if self.body is None else self.body.encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(str(self.url), data, headers)  # noqa: S310 - the user's own URL
            with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
                answer.read(1)
        except (OSError, ValueError):
            return False
        return True


class Observer:
    """A command that is started, watched until it answers, and waited for.

    Args:
        command: what to start.
        readiness: when it answers.
        look: whether files are looked at.
        cold: put the candidate files out of the page cache first, as far as nobody has mapped them.
        stdout_to: the file descriptor that gets the command's stdout.
    """

    def __init__(
        self,
        command: Sequence[str],
        readiness: Readiness | None = None,
        *,
        look: bool = True,
        cold: bool = False,
        stdout_to: int = 1,
    ) -> None:
        self._readiness = readiness or Readiness()
        self._stdout_to = stdout_to
        self.start = Start(list(command), environments.of(command))
        files = environments.candidates(self.start.environment, command) if look or cold else {}
        if cold:
            for path in files:
                drop(path)
        self._scanner = Scanner(files if look else {})
        self.start.before, self.start.hidden = self._scanner.before, self._scanner.hidden
        self._locked = threading.Lock()
        self._pipe: int | None = None
        self._folder = ""
        self._rest = b""
        self._ended = threading.Event()

    def run(self, on_ready: Callable[[Start], None], *, stop_when_ready: bool = False) -> int:
        """Runs the command to its end; the exit code, or the negative number of the signal that ended it.

        Args:
            on_ready: called once, from another thread: when the program has answered, or has ended before.
            stop_when_ready: end it with SIGTERM after that.

        Raises:
            OSError: where the command cannot be started.
        """
        environ = self._environ()
        try:
            with self._locked:  # lines wait until there is a timeline
                table = markers(self.start.environment.engine, self.start.environment.version)
                self._child = Child(self.start.command, environ, self._feed, stdout_to=self._stdout_to)
                self._timeline = Timeline(self._child.begun, table, self._readiness.log)
        except OSError:
            self._close()
            raise
        self._scanner.start()
        if self._readiness.url:
            threading.Thread(target=self._ask, name="penstock-ready", daemon=True).start()
        reporter: threading.Thread | None = None

        def report() -> None:
            self._finish()
            on_ready(self.start)
            if stop_when_ready:
                self._child.signal(signal.SIGTERM)

        def tick() -> None:
            nonlocal reporter
            self._read_events()
            if self._timeline.is_ready and reporter is None:
                reporter = threading.Thread(target=report, name="penstock-report", daemon=True)
                reporter.start()

        status = self._child.wait(tick)
        now = time.monotonic()
        self._ended.set()
        self._read_events()
        self.start.status = status
        if status == 0 and not self._readiness.url and self._readiness.log is None:
            # A program that is no server has answered when it has ended well.
            self._timeline.end(FIRST, now)
        if reporter is None:
            self._finish()
            on_ready(self.start)
        else:
            reporter.join()
        self._close()
        self._child.restore_signals()
        return status

    def _environ(self) -> dict[str, str]:
        environ = dict(os.environ)
        if self.start.environment.engine != "python" or self.start.environment.python is None:
            return environ
        self._folder = tempfile.mkdtemp(prefix="penstock-start-")
        pipe = str(Path(self._folder) / "events")
        os.mkfifo(pipe, 0o600)
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        path = [_HOOKS, *filter(None, [environ.get("PYTHONPATH")])]
        return environ | {"PYTHONPATH": os.pathsep.join(path), EVENTS: pipe}

    def _feed(self, text: bytes, when: float) -> None:
        with self._locked:
            step = self._timeline.feed(text.decode(errors="replace"), when)
            if step is not None:
                self._step_ended(step, when)

    def _step_ended(self, step: str, when: float) -> None:
        if (used := usage.of(self._child.pid)).processes:
            self.start.used[step] = used
        self._scanner.step_ended(step, when)

    def _read_events(self) -> None:
        if self._pipe is None:
            return
        with suppress(BlockingIOError):
            while data := os.read(self._pipe, 1 << 16):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for event in lines:
                    when, _, text = event.partition(b" ")
                    with suppress(ValueError):
                        self._feed(text, float(when))

    def _ask(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            if self._readiness.asked():
                when = time.monotonic()
                with self._locked:
                    self._timeline.end(FIRST, when)
                    self._step_ended(FIRST, when)
                return

    def _finish(self) -> None:
        steps = self._timeline.steps()
        self.start.steps, self.start.ready = steps, self._timeline.is_ready
        ended = [step.ended for step in steps if step.ended is not None]
        self._scanner.end(self._child.begun + ended[-1] if self.start.ready else time.monotonic())
        self.start.reads = [(self._step_at(read.when), read) for read in self._scanner.found]

    def _step_at(self, when: float) -> str:
        """The step that a time is in; the one behind the last that ended where that is all there is."""
        since = when - self._child.begun
        known = [step for step in self.start.steps if step.ended is not None]
        for step in known:
            if step.ended is not None and since <= step.ended:
                return step.name
        return STEPS[min(STEPS.index(known[-1].name) + 1, len(STEPS) - 1)] if known else STEPS[0]

    def _close(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
