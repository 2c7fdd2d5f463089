"""What a run was measured on: processor, memory, kernel, GPU, file system and versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def about(directory: Path, device: str) -> dict[str, Any]:
    """The machine of a run that loads files of ``directory`` to ``device``."""
    cpu = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "gpu": None if device == "cpu" else gpu_name(),
        "filesystem": filesystem(directory),
        "load_average": round(os.getloadavg()[0], 2),
    }


def version_of(distribution: str) -> str | None:
    """The installed version, from its metadata: nothing is imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_name() -> str | None:
    """The first GPU and its driver, as ``nvidia-smi`` says."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def filesystem(path: Path) -> str:
    """The type of the file system that a path lies on."""
    path = path.resolve()
    found, kind = -1, ""
    for line in _lines("/proc/self/mounts"):
        _, mount, of_mount, *_ = line.split()
        if path.is_relative_to(mount) and len(mount) >= found:
            found, kind = len(mount), of_mount
    return kind


def available_memory() -> int:
    """Bytes that processes may still take, as the kernel estimates it."""
    return next(int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable"))


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
