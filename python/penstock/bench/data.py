"""Checkpoint files of random-looking numbers, written at memory speed: bytes in a wrong place are found."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
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
