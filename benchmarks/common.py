"""What benchmarks share: data that is not zeros, caches that are provably cold or warm, and a note of the machine.

Every measurement runs in a process of its own (``measure``), so that no loader inherits another's warm memory.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import math
import mmap
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

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
    """Writes a BF16 safetensors file of random-looking numbers, several GB/s of them, without holding it in memory."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    random = Random64(seed)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(text)
        file.flush()
        file.truncate(len(text) + end)

        def write(chunk: int) -> None:
            at = chunk * random.chunk_bytes
            data = random.chunk(chunk)[: min(random.chunk_bytes, end - at)]
            while data:
                written = os.pwrite(file.fileno(), data, len(text) + at)
                at, data = at + written, data[written:]

        in_threads(write, range(-(-end // random.chunk_bytes)))
        os.fsync(file.fileno())
    partial.rename(path)


class Random64:
    """Chunks of random-looking numbers at memory speed: parts of one random pool, each chunk's under a key of its own.

    No two chunks hold the same words at the same place, so bytes that a loader puts in the wrong place are found. As
    BF16 they are numbers of 2**-15 to 2**-7 and either sign, with which a model computes something.
    """

    chunk_bytes = 8 << 20
    random_bits = np.uint64(0x83FF83FF83FF83FF)
    fixed_bits = np.uint64(0x3800380038003800)

    def __init__(self, seed: int) -> None:
        words = self.chunk_bytes // 8
        generator = np.random.Generator(np.random.SFC64(seed))
        self._seed = seed
        self._pool = generator.integers(0, 2**64, 2 * words, dtype=np.uint64)

    def chunk(self, number: int) -> memoryview:
        start, key = np.random.SeedSequence((self._seed, number)).generate_state(2, np.uint64)
        words = self.chunk_bytes // 8
        start = int(start) % words
        random = np.bitwise_xor(self._pool[start : start + words], key) & self.random_bits
        return memoryview(random | self.fixed_bits).cast("B")


def in_threads(work: Callable[[Any], object], items: Iterable[Any], threads: int | None = None) -> None:
    """Calls ``work`` with every item; raises what the first failing call raised."""
    with ThreadPoolExecutor(threads or min(16, len(os.sched_getaffinity(0)) + 2)) as pool:
        for _ in pool.map(work, items):
            pass


# ---- the page cache

PAGE = mmap.PAGESIZE
PIECE = 64 << 20


class StateError(RuntimeError):
    """The page cache could not be brought to the state that was to be measured."""


def resident_pages(path: Path) -> npt.NDArray[np.bool_]:
    """Whether each page of the file is in the page cache, as ``mincore(2)`` says.

    Not ``cachestat(2)``: on an overlay file system that looks at the overlay's own, empty, mapping.
    """
    size = path.stat().st_size
    pages = np.zeros(-(-size // PAGE), dtype=np.uint8)
    if size:
        libc = ctypes.CDLL(None, use_errno=True)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = np.frombuffer(mapped, dtype=np.uint8)
            address, vector = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(pages.ctypes.data)
            failed = libc.mincore(address, ctypes.c_size_t(size), vector)
            del view
            if failed:
                raise OSError(ctypes.get_errno(), "mincore", str(path))
    return (pages & 1).astype(bool)


def cached_share(paths: list[Path]) -> float:
    """The share of the files' pages that is in the page cache."""
    pages = np.concatenate([resident_pages(path) for path in paths])
    return float(pages.mean()) if len(pages) else 0.0


def set_cache(paths: list[Path], state: str) -> float:
    """Makes files ``"cold"`` (not in the page cache), ``"half"`` (every other 64 MiB) or ``"warm"``, and proves it.

    Returns the share of pages that is cached. At most 1 % may differ from the state, else ``StateError`` is raised.
    """
    for path in paths:
        size = path.stat().st_size
        # A small file is cut smaller, so that half of it can be cached too.
        piece = min(PIECE, -(-size // 16 // PAGE) * PAGE or PAGE)
        pieces = [
            (at, min(at + piece, size), state == "warm" or (state == "half" and number % 2 == 0))
            for number, at in enumerate(range(0, size, piece))
        ]
        for attempt in range(4):
            have = resident_pages(path)
            wrong = [
                part for part in pieces if abs(have[part[0] // PAGE : -(-part[1] // PAGE)].mean() - part[2]) > 0.01
            ]
            if not wrong:
                break
            # A folio may reach over pieces and then cannot be dropped with one of them: start again from nothing.
            _bring(path, wrong if attempt == 0 else [(0, size, False), *(part for part in pieces if part[2])])
        else:
            share = resident_pages(path).mean()
            raise StateError(f"{path.name} should be {state}, but {share:.1%} of it are in the page cache")
    return cached_share(paths)


def drop_page_cache() -> None:
    """Drops the page cache of the whole machine: interpreters and libraries are cold too, as after pulling an image.

    Raises ``StateError`` where this process may not.
    """
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError as error:
        raise StateError(f"the page cache cannot be dropped: {error}") from error


def _bring(path: Path, pieces: list[tuple[int, int, bool]]) -> None:
    """Drops pieces of a file from the page cache, then reads others into it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        for start, end, cached in pieces:
            if not cached:
                os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)
        # Otherwise reading ahead brings what is not wanted.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

        def read(piece: tuple[int, int, bool]) -> None:
            at, end, _ = piece
            buffer = memoryview(bytearray(min(8 << 20, end - at)))
            while at < end:
                at += os.preadv(fd, [buffer[: end - at]], at)

        in_threads(read, [piece for piece in pieces if piece[2]], threads=8)
    finally:
        os.close(fd)


def touch(tensors: dict[str, Any]) -> int:
    """Reads one byte of every page of tensors in host memory, as first use would."""
    import torch

    return sum(int(t.detach().flatten().view(torch.uint8)[::PAGE].sum()) for t in tensors.values())


def enough_memory(nbytes: int) -> int:
    """The bytes of host memory that a load of so many may need, as far as the machine can spare them."""
    return min(nbytes * 5 // 4, available_memory() // 2)


def settle_memory(nbytes: int) -> None:
    """Touches and frees ``nbytes`` in another process, so that the measured one gets memory that really exists.

    A virtual machine's host often backs a page only when the guest first touches it, and takes free pages back after a
    while. Without this, what is measured is the hypervisor: 3 s instead of 0.3 s for 2 GiB, whatever the loader.
    """
    touch = (
        "import mmap, sys\n"
        "m = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "m.madvise(mmap.MADV_HUGEPAGE)\n"
        "try: m.madvise(23)\n"  # MADV_POPULATE_WRITE, Linux 5.14
        "except OSError:\n"
        "    for at in range(0, len(m), 4096): m[at] = 1\n"
    )
    subprocess.run([sys.executable, "-S", "-c", touch, str(nbytes)], check=True)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    versions = {name: version_of(name) for name in ("torch", "safetensors", "penstock", "numpy")}
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


def shares_of_rounds(rounds: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """Of each name, its rates over the mean of all in the same round, which a disk that wanders does not move."""
    shares: dict[str, list[float]] = {}
    for rates in rounds:
        mean = statistics.mean(rates.values())
        for name, rate in rates.items():
            shares.setdefault(name, []).append(rate / mean)
    return shares


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of these values; zero for a single one."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
