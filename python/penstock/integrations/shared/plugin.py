"""What plugins of engines have in common before the engine is imported: is it one that we know?

An engine calls a plugin in each of its processes, whether its format is asked for or not. So nothing that goes wrong
here may reach the engine, and nothing is said above DEBUG: the engine goes on without the format, and refuses it in its
own words if it is asked for. Only who uses the format hears of versions (``warn_if_untried``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import MissingDependencyError
from penstock.optional import dotted, installed_version
from penstock.patches import DISABLE, is_disabled

if TYPE_CHECKING:
    from penstock.recording import Statistics

FORMAT = "penstock"
"""What ``--load-format`` calls it."""

_warned: set[str] = set()
"""Engines whose users were warned in this process."""


@dataclass
class Plugin:
    """A plugin's engine, and what of it is known."""

    engine: str
    """What people call it."""
    distributions: tuple[str, ...]
    """What it is installed as."""
    oldest: tuple[int, ...]
    """Older ones lack what the plugin uses."""
    newest_tried: tuple[int, ...]
    """The newest that the tests ran with."""
    logger: logging.Logger
    last_load: Statistics | None = None
    """Figures of the latest load of this process by the format."""

    def register(self, setting_up: Callable[[], None]) -> None:
        """Does what makes the engine know the format. If that fails, or is turned off, it is logged at DEBUG."""
        try:
            if is_disabled():
                self.logger.debug("%s is set: --load-format penstock is not registered", DISABLE)
                return
            self.check()
            setting_up()
        except Exception as error:  # engines do not guard their plugins
            self.logger.debug(
                "%s: --load-format penstock is not available: %s: %s",
                *(self.engine, type(error).__name__, error),
                exc_info=True,
            )

    def check(self) -> None:
        """Checks that the engine is not too old.

        Raises:
            MissingDependencyError: in one sentence, what is too old and what to do.
        """
        version = self.version()
        if version is not None and version < self.oldest:
            raise MissingDependencyError(
                f"{self.described()} is too old for --load-format penstock, which needs {dotted(self.oldest)} or newer",
                remedy=f"Update {self.engine}",
            )

    def warn_if_untried(self) -> None:
        """Warns of a version that the tests have not run with; once in a process. For those who use the format."""
        if self.engine in _warned:
            return
        _warned.add(self.engine)
        version = self.version()
        if version is None:
            self.logger.warning(
                "the version of %s is not known; penstock was tried with %s %s",
                *(self.engine, self.engine, dotted(self.newest_tried)),
            )
        elif version[: len(self.newest_tried)] > self.newest_tried:
            self.logger.warning(
                "%s is newer than what this penstock was tried with (%s); if loading fails, use --load-format auto "
                "and report it",
                self.described(),
                dotted(self.newest_tried),
            )

    def version(self) -> tuple[int, ...] | None:
        """The numbers of the installed version, or None where none is known."""
        return next(filter(None, map(installed_version, self.distributions)), None)

    def described(self) -> str:
        """The engine and its version."""
        version = self.version()
        return self.engine if version is None else f"{self.engine} {dotted(version)}"
