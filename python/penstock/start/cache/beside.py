"""A start cache around a start: restored before the engine, saved once it has made something and is quiet.

All of it happens in a helper, so that nothing that fails or hangs here holds the engine up longer than ``PATIENCE``.
Starts of one node that want the same cache restore it once: the others wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from penstock.errors import PenstockError
from penstock.start import environment as environments
from penstock.start.cache import index as indices
from penstock.start.cache import key as keys
from penstock.start.cache.location import Directory, Location, opened
from penstock.start.cache.places import Place, Stamp, looked_at, places
from penstock.start.cache.restore import Restored, restore
from penstock.start.cache.save import save
from penstock.start.node import Turns
from penstock.start.prefetch import be_idle
from penstock.units import size

PATIENCE = 10.0
"""Seconds that a start waits for its cache. What comes later is found by what the engine compiles later."""
_EVERY = 2.0
_QUIET = 8.0
"""Seconds without a new file after which what there is gets saved."""
_ATTEMPTS = 3

Say = Callable[[str], None]
Files = dict[tuple[str, str], Stamp]


class StartCache:
    """The cache of one start.

    Args:
        location: as the user named it.
        limit: most bytes that the location keeps.
        command: what is started.
        say: gets lines for the user.

    Raises:
        ConfigError: the location is refused.
    """

    def __init__(self, location: str, limit: int, command: Sequence[str], say: Say) -> None:
        self._location: Directory | Location = opened(location)
        self._limit = limit
        self._say = say
        self._places: list[Place] = places()
        self._of = keys.described(command, environments.of(command))
        self._key = keys.key_of(self._of)
        self._saved: Files = {}

    def restore(self, ended: Callable[[], object]) -> None:
        """Restores what fits; whatever fails is said. Afterwards it is known what the start finds."""
        self._saved = looked_at(self._places)
        try:
            with Turns("start-cache").at(self._key, ended):
                names = self._restore(ended)
        except (OSError, PenstockError) as error:
            self._say(f"nothing is restored from {self._location.shown}: {_cause(error)}")
            return
        # And nothing else: the engine may have been started meanwhile.
        self._saved |= {name: stamp for name, stamp in looked_at(self._places).items() if name in names}

    def save_until(self, ended: Callable[[], object]) -> None:
        """Saves what is new whenever nothing has changed for a while, and at last when the command has ended."""
        location = self._location
        if not isinstance(location, Directory):
            return
        be_idle()
        before, since, failures, tried = self._saved, time.monotonic(), 0, self._saved
        while failures < _ATTEMPTS:
            is_over = _over(ended, _EVERY)
            now = looked_at(self._places)
            if now != before:
                before, since = now, time.monotonic()
            if (is_over or time.monotonic() - since >= _QUIET) and now != tried and (new := self._new(now)):
                is_saved = self._save(location, new)
                failures, tried = (0, now) if is_saved else (failures + 1, tried)
            if is_over:
                return

    def _restore(self, ended: Callable[[], object]) -> set[tuple[str, str]]:
        data = self._location.index(self._key)
        if data is None:
            more = "" if isinstance(self._location, Directory) else "; none is saved: it is only read"
            self._say(f"{self._location.shown} has no cache of this start: {self._brief()}{more}")
            return set()
        begun = time.monotonic()
        done = restore(indices.loaded(data, self._location.shown), self._location, self._places, ended)
        self._say(_told(done, self._location.shown, time.monotonic() - begun))
        return done.names

    def _new(self, now: Files) -> list[tuple[tuple[str, str], Stamp]]:
        return [(name, stamp) for name, stamp in now.items() if self._saved.get(name) != stamp]

    def _save(self, location: Directory, new: list[tuple[tuple[str, str], Stamp]]) -> bool:
        try:
            done = save(new, location, self._key, self._of, self._places, self._limit)
        except (OSError, PenstockError) as error:
            self._say(f"nothing is saved to {self._location.shown}: {_cause(error)}")
            return False
        self._saved |= {name: stamp for name, stamp in new if name in done.names}
        if done.names:
            went = f", {done.removed} older caches went" if done.removed else ""
            self._say(f"{size(done.nbytes)} of {_files(len(done.names))} are saved to {self._location.shown}{went}")
        return True

    def _brief(self) -> str:
        of = self._of
        names = [of["engine"], of["version"], *of["gpus"], of["driver"] and f"driver {of['driver']}"]
        return " ".join(filter(None, names)) + f", key {self._key[:12]}"


def _told(done: Restored, shown: str, seconds: float) -> str:
    parts = [f"{size(done.nbytes)} of {_files(len(done.names))} are restored from {shown} in {seconds:.1f} s"]
    parts += [f"{done.there:,} were there"] if done.there else []
    parts += [f"{number:,} left out ({why})" for why, number in done.left_out.items()]
    return ", ".join(parts)


def _files(number: int) -> str:
    return f"{number:,} compiled file" + ("" if number == 1 else "s")


def _cause(error: OSError | PenstockError) -> str:
    if isinstance(error, PenstockError):
        return error.cause
    return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")


def _over(ended: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not ended():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True
