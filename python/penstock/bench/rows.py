"""The rows of a run: which loaders can be measured here, their packages and their environment; and running a task."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from . import loaders, processes


class Rows:
    """The loaders of a run: which can be measured here, their packages and their environment."""

    def __init__(self, options: argparse.Namespace, work: Path, env: dict[str, str] | None = None) -> None:
        self.options = options
        self.env = env or {}
        self.versions: dict[str, str | None] = {}
        self.skipped: dict[str, str] = {}
        for name in options.loaders:
            try:
                self.versions[name] = loaders.version(name, self.site(name))
                reason = loaders.reason_to_skip(name, self.versions[name], options.device)
            except loaders.PluginError as error:
                reason = without_directories(str(error), options, work)
            if reason:
                self.skipped[name] = reason
        self.names = [name for name in options.loaders if name not in self.skipped]

    def site(self, name: str) -> str | None:
        """The directory whose packages come first for a row."""
        found: str | None = self.options.site.get(name, self.options.site.get(loaders.labelled(name)))
        return found

    def env_of(self, name: str) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [self.site(name), os.environ.get("PYTHONPATH", "")]))
        return self.env | loaders.of(name).env | ({"PYTHONPATH": path} if path else {})


def without_directories(text: str, options: argparse.Namespace, work: Path) -> str:
    """An error message that names no directory of this machine."""
    for place in [work, options.directory, getattr(options, "tmpfs", work), *options.site.values(), sys.prefix]:
        text = text.replace(f"{Path(place).resolve()}/", "").replace(f"{place}/", "")
    return text


def run(
    task: dict[str, Any], options: argparse.Namespace, work: Path, *, seconds: float, env: dict[str, str]
) -> dict[str, Any]:
    """Runs a task in a fresh process; what its failure says names no directory."""
    try:
        return processes.run(task, work, seconds=seconds, env=env)
    except processes.HungError:
        raise
    except processes.FailedError as error:
        raise processes.FailedError(without_directories(str(error), options, work)) from error
