"""What benchmarks share: data that is not zeros, caches that are provably cold or warm, and a note of the machine.

Every measurement runs in a process of its own (``measure``), so that no loader inherits another's warm memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

GB = 1e9


def llama_shapes(layers: int, hidden: int, intermediate: int, vocabulary: int, kv: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama: a few large ones, many middling ones, many tiny norms."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (hidden, hidden),
            f"{at}.self_attn.k_proj.weight": (kv, hidden),
            f"{at}.self_attn.v_proj.weight": (kv, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
            f"{at}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{at}.mlp.up_proj.weight": (intermediate, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, intermediate),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def write_checkpoint(path: Path, shapes: dict[str, tuple[int, ...]], seed: int = 0) -> None:
    """Writes a BF16 safetensors file of pseudo-random bytes, without holding it in memory."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = np.random.Generator(np.random.SFC64(seed))
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = end
        while left:
            step = min(left, 64 << 20)
            # Any bit pattern is a BF16; those of NaNs compare unequal, so the comparison below is of bytes.
            file.write(generator.integers(0, 256, step, dtype=np.uint8).tobytes())
            left -= step
        os.fsync(file.fileno())
    partial.rename(path)


class _CachestatRange(ctypes.Structure):
    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recent"))


def cached_bytes(path: Path) -> int:
    """Bytes of the file that are in the page cache, as ``cachestat(2)`` says (Linux 6.5)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file:
        asked = _CachestatRange(0, path.stat().st_size)
        answer = _Cachestat()
        if libc.syscall(451, file.fileno(), ctypes.byref(asked), ctypes.byref(answer), 0):
            raise OSError(ctypes.get_errno(), "cachestat")
    return int(answer.cache) * 4096


def set_cache(paths: list[Path], state: str) -> None:
    """Makes files ``"cold"`` (not in the page cache), ``"half"`` or ``"warm"``, and proves that they are."""
    for path in paths:
        size = path.stat().st_size
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            end = {"cold": 0, "half": size // 2, "warm": size}[state]
            buffer = bytearray(8 << 20)
            at = 0
            while at < end:
                at += os.preadv(fd, [memoryview(buffer)[: min(len(buffer), end - at)]], at)
        finally:
            os.close(fd)
        cached = cached_bytes(path)
        low, high = {"cold": (0, 0.01), "half": (0.49, 0.55), "warm": (0.99, 1.1)}[state]
        if not low * size <= cached <= high * size + 4096:
            raise RuntimeError(f"{path} should be {state}, but {cached} of {size} bytes are cached")


def settle_memory(nbytes: int) -> None:
    """Touches and frees ``nbytes`` in another process, so that the measured one gets memory that really exists.

    A virtual machine's host often backs a page only when the guest first touches it, and takes free pages back after a
    while. Without this, what is measured is the hypervisor: 3 s instead of 0.3 s for 2 GiB, whatever the loader.
    """
    touch = (
        "import mmap, sys\n"
        "m = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "m.madvise(mmap.MADV_HUGEPAGE)\n"
        "for at in range(0, len(m), 4096): m[at] = 1\n"
    )
    subprocess.run([sys.executable, "-S", "-c", touch, str(nbytes)], check=True)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    versions = {}
    for module in ("torch", "safetensors", "penstock", "numpy"):
        command = [sys.executable, "-c", f"import {module}; print({module}.__version__)"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        versions[module] = found.stdout.strip() or None
    cpu = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def measure(script: Path, *arguments: str) -> dict[str, Any]:
    """Runs ``script`` in a fresh process; its last line of output is its result as JSON."""
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{script.name} {' '.join(arguments)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
