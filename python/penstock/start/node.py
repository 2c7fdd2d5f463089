"""What the starts of one user on one machine share: locks, so that several at once do each thing once.

A lock is held by a process and ends with it, however it ends. Where there is nowhere to keep locks, everyone goes on
without: then the same is done more than once, and nothing else happens.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.errors import ConfigError

_POLL_SECONDS = 0.005
_NAMES = 1 << 62


class Turns:
    """Turns at what has a name: of the processes that want the same, one has it at a time.

    Args:
        of: what kind of thing it is: turns at things of other kinds are others.
        folder: where the lock is; of this user and machine by default.
    """

    def __init__(self, of: str, folder: Path | None = None) -> None:
        self._handle: int | None = None
        with suppress(OSError, ConfigError):
            path = (folder or state_folder()) / f"{of}.lock"
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    @contextmanager
    def at(self, name: str, stop: Callable[[], object]) -> Iterator[None]:
        """Waits for a turn, and has it meanwhile. ``stop`` is asked while waiting; an answer ends that."""
        # A byte of the file for each name. Two names of one byte wait for each other, and that is all.
        place = int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8], "big") % _NAMES
        held = False
        while self._handle is not None and not held:
            try:
                fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                held = True
            except (BlockingIOError, PermissionError):
                if stop():
                    break
                time.sleep(_POLL_SECONDS)
            except OSError:
                break  # a file system without locks
        try:
            yield
        finally:
            if held and self._handle is not None:
                fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, place)

    def close(self) -> None:
        """Ends all turns."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def state_folder() -> Path:
    """A directory of this user on this machine, for locks.

    Raises:
        ConfigError: somebody else has made it, or may write to it.
        OSError: it cannot be made.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime, "penstock") if runtime else Path(tempfile.gettempdir(), f"penstock-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(location=str(folder), cause="it belongs to another user, or others may write to it")
    return folder
