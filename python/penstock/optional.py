"""The libraries that engines plug into: absent, too old, or newer than what was tried, each is one sentence.

Engines call ``required`` before they import anything of the library, so that its absence is no stack trace of imports.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import re
from typing import NamedTuple

from penstock.errors import MissingDependencyError

logger = logging.getLogger(__name__)


class Versions(NamedTuple):
    """What is known of a library's versions."""

    minimum: tuple[int, ...]
    """Older ones lack what the engine uses."""
    tried: tuple[int, ...]
    """The newest that the tests ran with; a newer one of the same major version gets no word."""


KNOWN = {
    "transformers": Versions((4, 56), (5, 23)),
    "diffusers": Versions((0, 35), (0, 42)),
    "peft": Versions((0, 17), (0, 21)),
    "accelerate": Versions((1, 10), (1, 15)),
    "safetensors": Versions((0, 4), (0, 8)),
    "torch": Versions((2, 3), (2, 15)),
}
"""By distribution. docs/engines/index.md has the table for people; a test holds the two together."""

_warned: set[str] = set()


def required(*names: str, by: str) -> None:
    """Checks that libraries are installed, in versions that the engine knows.

    A version of a later major number than any that was tried is used, with one warning in the log.

    Args:
        names: their distributions.
        by: the module that needs them, as the user wrote it.

    Raises:
        MissingDependencyError: naming the library, what is installed, and what to install.
    """
    for name in names:
        known = KNOWN[name]
        wanted = f"{name}>={dotted(known.minimum)}"
        remedy = f"pip install '{wanted}'"
        if importlib.util.find_spec(name) is None:
            raise MissingDependencyError(
                f"{by} needs the package {name!r}, which is not installed. Install it: {remedy}",
                cause=f"{name!r} is not installed",
                remedy=remedy,
            )
        version = installed_version(name)
        if version and version < known.minimum:
            installed = dotted(version)
            raise MissingDependencyError(
                f"{by} needs {wanted}; version {installed} is installed. Update it: {remedy}",
                cause=f"{name} {installed} is too old",
                remedy=remedy,
            )
        if version[:1] > known.tried[:1] and name not in _warned:
            _warned.add(name)
            tried = dotted(known.tried)
            logger.warning(
                "%s %s is newer than what this Penstock was tried with (up to %s); if loading fails, "
                "penstock.patch_safetensors() with the library's own from_pretrained is the way that depends on least",
                *(name, dotted(version), tried),
            )


def is_installed(name: str) -> bool:
    """Whether a library is there, in a version that the engine knows."""
    version = installed_version(name) if importlib.util.find_spec(name) is not None else ()
    return bool(version) and version >= KNOWN[name].minimum


def installed_version(name: str) -> tuple[int, ...]:
    """The numbers of a distribution's version, as many as are plain; none where its metadata is missing."""
    try:
        text = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ()
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def dotted(version: tuple[int, ...]) -> str:
    """A version as people write it."""
    return ".".join(map(str, version))
