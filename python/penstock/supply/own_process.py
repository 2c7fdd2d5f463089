"""State that threads of one process share, which a forked child begins anew.

No thread that reads is in the child, and a lock that one held when the process was forked is held there for ever.
"""

from __future__ import annotations

import os
import threading


class OwnProcess:
    """Base of what reads ahead, whose methods use their state within ``_locked``."""

    def __init__(self) -> None:
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Sets what a child is not to take over."""
        self._process = os.getpid()
        self._lock = threading.Lock()

    def _locked(self) -> threading.Lock:
        if self._process != os.getpid():
            self._begin_anew()
        return self._lock
