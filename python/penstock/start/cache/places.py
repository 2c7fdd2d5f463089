"""The directories in which engines and compilers keep what they have compiled, and which files in them count.

Where they are is decided by the variables of their owners, as these read them. Nothing is imported, nothing is written.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

_PLACES = (
    ("vllm", "VLLM_CACHE_ROOT", "", "{cache}/vllm"),
    ("inductor", "TORCHINDUCTOR_CACHE_DIR", "", "{tmp}/torchinductor_{user}"),
    ("triton", "TRITON_CACHE_DIR", "", "{triton}/.triton/cache"),
    ("flashinfer", "FLASHINFER_WORKSPACE_BASE", "/.cache/flashinfer", "{home}/.cache/flashinfer"),
    ("deep_gemm", "DG_JIT_CACHE_DIR", "", "{home}/.deep_gemm"),
    ("sglang", "SGLANG_CACHE_DIR", "", "{home}/.cache/sglang"),
    ("sglang_deep_gemm", "SGLANG_DG_CACHE_DIR", "", "{home}/.cache/deep_gemm"),
    ("tvm_ffi", "TVM_FFI_CACHE_DIR", "", "{home}/.cache/tvm-ffi"),
)
"""Name, the variable that moves it, what its owner puts below that, and where it is otherwise."""
_WITHIN = {"vllm": ("torch_compile_cache", "modelinfos", "deep_gemm", "flashinfer_autotune_cache")}
"""Of directories that hold other things too: what counts."""
_PASSING = re.compile(r"(^|/)(\.(?!ninja_)[^/]*|locks|tmp|__pycache__|[^/]*\.(lock|tmp|pid|log)|tmp\.[^/]*)(/|$)")
"""Locks, and what is being written. What ninja notes is kept: without it, FlashInfer builds everything again. So are
Inductor's precompiled headers, though large: it makes them even where it finds all else."""
_USERS = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Variables with the user's name, in the order of ``getpass``, which torch asks."""
_LARGEST = 2 << 30


@dataclass(frozen=True)
class Place:
    """A directory of compiled files.

    Attributes:
        name: what an index calls it.
        root: where it is, absolute; it need not be there.
        within: directories below it that count; all where there is none.
    """

    name: str
    root: str
    within: tuple[str, ...] = ()

    def has(self, path: str) -> bool:
        """Whether a path below the root is of a file that counts."""
        inside = not self.within or path.partition("/")[0] in self.within
        return inside and _PASSING.search(path) is None


def places(environ: Mapping[str, str] = os.environ) -> list[Place]:
    """The places of a process with these variables, each directory once."""
    home = environ.get("HOME") or os.path.expanduser("~")
    usual = {
        "home": home,
        "cache": environ.get("XDG_CACHE_HOME") or f"{home}/.cache",
        "tmp": tempfile.gettempdir(),
        "triton": environ.get("TRITON_HOME") or home,
        "user": re.sub(r"[\\/:*?\"<>|]", "_", next(filter(None, map(environ.get, _USERS)), None) or _user()),
    }
    found: dict[str, Place] = {}
    for name, variable, below, otherwise in _PLACES:
        moved = environ.get(variable)
        root = os.path.abspath(os.path.expanduser(moved) + below if moved else otherwise.format(**usual))
        found.setdefault(root, Place(name, root, _WITHIN.get(name, ())))
    return list(found.values())


Stamp = tuple[int, int, int]
"""Size, modification time (ns) and inode of a file."""


def looked_at(of: list[Place]) -> dict[tuple[str, str], Stamp]:
    """The files in the places that count: their stamps by the name of the place and the path below it."""
    found = {}
    for place in of:
        for path, status in _files(place):
            found[place.name, path] = status.st_size, status.st_mtime_ns, status.st_ino
    return found


def _files(place: Place) -> Iterator[tuple[str, os.stat_result]]:
    left = list(place.within) or [""]
    while left:
        folder = left.pop()
        try:
            with os.scandir(os.path.join(place.root, folder)) as entries:
                for entry in entries:
                    path = f"{folder}/{entry.name}" if folder else entry.name
                    if not place.has(path):
                        continue
                    with suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(status.st_mode):
                            left.append(path)
                        elif stat.S_ISREG(status.st_mode) and 0 < status.st_size <= _LARGEST:
                            yield path, status
        except OSError:
            continue


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid_{os.getuid()}"
