"""The libraries that integrations are for: absent or too old, each is one sentence.

Integrations call ``required`` before they import anything of the library, so that its absence is no stack trace of
imports.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

from penstock.errors import MissingDependencyError

MINIMUM = {
    "transformers": (4, 56),
    "diffusers": (0, 35),
    "peft": (0, 17),
    "accelerate": (1, 10),
    "safetensors": (0, 4),
    "torch": (2, 3),
}
"""Older ones lack what integrations use. docs/engines/index.md has the table for people; a test compares the two."""

METRICS = {"prometheus-client": (0, 20), "opentelemetry-api": (1, 25)}
"""Those of ``penstock.metrics``."""

_MODULES = {"prometheus-client": "prometheus_client", "opentelemetry-api": "opentelemetry"}
"""By distribution, the module to import, where it has another name."""


def required(*names: str, by: str) -> None:
    """Checks that libraries are installed, in versions that the integration knows.

    Args:
        names: their distributions.
        by: the module that needs them, as the user wrote it.

    Raises:
        MissingDependencyError: naming the library, what is installed, and what to install.
    """
    for name in names:
        minimum = (MINIMUM | METRICS)[name]
        wanted = f"{name}>={dotted(minimum)}"
        remedy = f"pip install '{wanted}'"
        if importlib.util.find_spec(_module(name)) is None:
            raise MissingDependencyError(
                f"{by} needs the package {name!r}, which is not installed. Install it: {remedy}",
                cause=f"{name!r} is not installed",
                remedy=remedy,
            )
        version = installed_version(name)
        if version and version < minimum:
            installed = dotted(version)
            raise MissingDependencyError(
                f"{by} needs {wanted}; version {installed} is installed. Update it: {remedy}",
                cause=f"{name} {installed} is too old",
                remedy=remedy,
            )


def _module(name: str) -> str:
    return _MODULES.get(name, name)


def is_installed(name: str) -> bool:
    """Whether a library is there, in a version that the integration knows."""
    version = installed_version(name) if importlib.util.find_spec(_module(name)) is not None else ()
    return bool(version) and version >= MINIMUM[name]


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
