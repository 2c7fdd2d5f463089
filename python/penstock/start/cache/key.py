"""What has to be equal for a cache to fit: the key of a command on this machine.

Engines and compilers have keys of their own, and look their files up by these. This one decides which files are fetched
for them, and adds what they leave out: instructions of the processor, for which compilers build (``-march=native``),
and the driver. It is made of the model's configuration, not of where the model lies. Arguments and names are hashed, so
that an index tells no secret of them.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock._native import read_object
from penstock.arguments import is_url
from penstock.doctor.tree import Tree
from penstock.errors import PenstockError
from penstock.start.environment import Environment, hub_folder

_WITHOUT_EFFECT = re.compile(
    r"--(host|port|api-key|served-model-name|load-format|model-loader-extra-config|download-dir|root-path|"
    r"uvicorn-[\w-]+|ssl-[\w-]+|log-[\w-]+|otlp-[\w-]+|max-log-len|chat-template|admin-api-key)"
)
"""Options of engines that nothing compiled depends on, with values."""
_MODEL_OPTIONS = ("--model", "--model-path")
_CONFIGURATIONS = ("config.json", "model_index.json")
_LARGEST_CONFIGURATION = 16 << 20
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def described(command: Sequence[str], environment: Environment, tree: Tree | None = None) -> dict[str, Any]:
    """What the key is made of: JSON, without secrets."""
    tree = tree or Tree()
    return {
        "engine": environment.engine,
        "version": environment.version,
        "python": environment.abi,
        "libraries": dict(environment.libraries),
        "system": " ".join([platform.machine(), *platform.libc_ver(), _system(tree)]),
        "processor": _hashed(sorted(_instructions(tree).split()))[:16],
        **gpus(tree),
        "model and arguments": _hashed(arguments(command)),
    }


def key_of(what: Mapping[str, Any]) -> str:
    """The key itself: 64 hexadecimal digits."""
    return _hashed(what)


def arguments(command: Sequence[str]) -> list[str]:
    """A command with its model's configuration in place of the model, without what nothing compiled depends on."""
    found = [os.path.basename(command[0])]
    revision = next((after for word, after in _pairs(command) if word == "--revision"), None)
    skipping = False
    for before, word in _pairs(["", *command[1:]]):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            skipping = _WITHOUT_EFFECT.fullmatch(name) is not None
            if not skipping:
                found.append(name + equals + (_named(value, revision, name in _MODEL_OPTIONS) if equals else ""))
            continue
        if not skipping:
            found.append(_named(word, revision, before in {*_MODEL_OPTIONS, "serve"}))
    return found


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    return itertools.pairwise(words)


def _named(word: str, revision: str | None, is_model: bool) -> str:
    """A word of a command; where it names a model, the hash of its configuration."""
    for name in _CONFIGURATIONS:
        with suppress(OSError, PenstockError, ValueError):
            if (data := _configuration(word, name, revision, is_model)) is not None:
                return "model:" + hashlib.sha256(data).hexdigest()
    return word


def _configuration(word: str, name: str, revision: str | None, is_model: bool) -> bytes | None:
    if is_url(word):
        return bytes(read_object(f"{word.rstrip('/')}/{name}", _LARGEST_CONFIGURATION)) if is_model else None
    if os.path.isdir(word):
        path = Path(word, name)
        return path.read_bytes() if path.stat().st_size <= _LARGEST_CONFIGURATION else None
    if not _REPOSITORY.fullmatch(word):
        return None
    folder = Path(hub_folder(word))
    commit = folder / "refs" / (revision or "main")
    at = commit.read_text().strip() if commit.is_file() else revision or "main"
    snapshot = folder / "snapshots" / at / name
    if snapshot.is_file():
        return snapshot.read_bytes()
    if not is_model or os.environ.get("HF_HUB_OFFLINE", "0").lower() in {"1", "true", "yes", "on"}:
        return None
    return bytes(read_object(f"hf://{word}@{revision or 'main'}/{name}", _LARGEST_CONFIGURATION))


def gpus(tree: Tree) -> dict[str, Any]:
    """Names and compute capabilities of the GPUs that are seen, and their driver; empty where there are none."""
    with suppress(OSError, AttributeError):
        return _nvidia()
    folder = "sys/class/kfd/kfd/topology/nodes"
    words = (line.split() for node in tree.names(folder) for line in tree.lines(f"{folder}/{node}/properties"))
    amd = sorted({pair[1] for pair in words if pair[0] == "gfx_target_version" and pair[1] != "0"})
    return {"gpus": amd, "driver": tree.text("sys/module/amdgpu/version") if amd else None}


def _nvidia() -> dict[str, Any]:
    library = ctypes.CDLL("libnvidia-ml.so.1")
    if library.nvmlInit_v2():
        raise OSError("NVML does not start")
    try:
        text = ctypes.create_string_buffer(96)
        number, major, minor = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int()
        library.nvmlSystemGetDriverVersion(text, len(text))
        driver = text.value.decode()
        library.nvmlDeviceGetCount_v2(ctypes.byref(number))
        found = set()
        for each in range(number.value):
            device = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(each, ctypes.byref(device)):
                continue
            library.nvmlDeviceGetName(device, text, len(text))
            library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
            found.add(f"{text.value.decode()} {major.value}.{minor.value}")
        return {"gpus": sorted(found), "driver": driver}
    finally:
        library.nvmlShutdown()


def _instructions(tree: Tree) -> str:
    for line in tree.lines("proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return value
    return ""


def _system(tree: Tree) -> str:
    names = dict(line.split("=", 1) for line in tree.lines("etc/os-release") if "=" in line)
    return " ".join(names.get(name, "").strip('"') for name in ("ID", "VERSION_ID"))


def _hashed(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
