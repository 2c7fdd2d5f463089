"""A command as a child: its output goes where it would have gone, byte for byte, and its lines are told.

Signals that this process gets go on to the child, but for those of the terminal, which it gets by itself. Where stdout
or stderr is a terminal, the child has a terminal too, so that it writes as it would. The exit status is the child's;
a child that a signal ended ends this process by the same signal.
"""

from __future__ import annotations

import fcntl
import os
import pty
import resource
import select
import signal
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of a command that cannot be started, as a shell has them."""

_FORWARDED = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
_AWAITED = _FORWARDED | {signal.SIGCHLD, signal.SIGCONT, signal.SIGWINCH}
_BY_KERNEL = 0x80
"""``SI_KERNEL``: a key of the terminal, whose whole process group gets the signal."""
_LONGEST_LINE = 64 << 10
_DRAIN_SECONDS = 1.0
"""How long output of the child's children is waited for once it has ended."""

Told = Callable[[bytes, float], None]
"""Gets each line without its end, and the monotonic time at which it came."""


class Child:
    """A command that runs.

    Attributes:
        pid: its process.
        begun: the monotonic time at which it was started.

    Args:
        arguments: the command and its arguments; looked for in PATH.
        environment: of the command.
        told: called for each line of its stdout and stderr, from one thread at a time.
        stdout_to: the file descriptor that gets its stdout.

    Raises:
        OSError: where it cannot be started.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], told: Told, *, stdout_to: int = 1
    ) -> None:
        self._told = told
        self._locked = threading.Lock()
        self._terminals: list[int] = []
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        outlets = {1: stdout_to, 2: 2}
        ends: dict[tuple[int, int], tuple[int, int]] = {}
        actions = []
        for number, target in outlets.items():
            status = os.fstat(target)
            key = status.st_dev, status.st_ino
            # One pipe for both where both go to one place: their order is kept.
            if key not in ends:
                ends[key] = self._outlet(target)
            actions.append((os.POSIX_SPAWN_DUP2, ends[key][1], number))
        self.begun = time.monotonic()
        try:
            self.pid = os.posix_spawnp(
                arguments[0],
                list(arguments),
                dict(environment),
                file_actions=actions,
                setsigmask=self._mask,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores
            )
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            for source, sink in ends.values():
                os.close(source)
                os.close(sink)
            raise
        self._relays = []
        for target in dict.fromkeys(outlets.values()):
            status = os.fstat(target)
            if pair := ends.pop((status.st_dev, status.st_ino), None):
                os.close(pair[1])
                relay = threading.Thread(target=self._relay, args=(pair[0], target), name="penstock-relay", daemon=True)
                relay.start()
                self._relays.append(relay)

    def signal(self, number: int) -> None:
        """Sends it a signal, if it is still there."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, tick: Callable[[], None], *, every: float = 0.05) -> int:
        """Passes signals on until the child has ended, and calls ``tick`` in between.

        Returns:
            the exit code, or the negative number of the signal that ended it.
        """
        while True:
            caught = signal.sigtimedwait(_AWAITED, every)
            if caught is not None:
                if caught.si_signo == signal.SIGWINCH:
                    self._resize()
                elif caught.si_signo in _FORWARDED and caught.si_code != _BY_KERNEL:
                    self.signal(caught.si_signo)
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                for relay in self._relays:
                    relay.join(_DRAIN_SECONDS)
                return os.waitstatus_to_exitcode(status)
            tick()

    def restore_signals(self) -> None:
        """Signals are this process's own again."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _outlet(self, target: int) -> tuple[int, int]:
        if not os.isatty(target):
            return os.pipe()
        master, slave = pty.openpty()
        modes = termios.tcgetattr(slave)
        modes[1] &= ~termios.OPOST  # the terminal itself will do that
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        self._terminals.append(master)
        self._resize()
        for end in (master, slave):
            os.set_inheritable(end, False)
        return master, slave

    def _resize(self) -> None:
        for master in self._terminals:
            with suppress(OSError):
                fcntl.ioctl(master, termios.TIOCSWINSZ, fcntl.ioctl(1, termios.TIOCGWINSZ, bytes(8)))

    def _relay(self, source: int, target: int) -> None:
        rest = b""
        while True:
            try:
                data = os.read(source, _LONGEST_LINE)
            except OSError:  # a terminal that nobody holds any more
                break
            when = time.monotonic()
            if not data:
                break
            try:
                _write(target, data)
            except OSError:
                # Whoever reads has gone away: the child is to find that out by itself, too.
                break
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-_LONGEST_LINE:]
            with self._locked:
                for line in lines:
                    self._told(line.rstrip(b"\r"), when)
        if rest:
            with self._locked:
                self._told(rest, time.monotonic())
        os.close(source)


def _write(target: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(target, left) :]
        except BlockingIOError:
            select.select([], [target], [])


def end_as(status: int) -> int:
    """The exit code for a child's status; does not return where a signal that ends this process ended the child."""
    if status >= 0:
        return status
    number = -status
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core is the child's
    with suppress(OSError, ValueError):
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    return 128 + number  # process 1 of a container, which its own signals do not end
