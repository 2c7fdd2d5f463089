"""Random loads, compared bit for bit with plain torch copies of what safetensors reads.

    python tests/programs/loads.py --programs 1000000 --seed 0

A program is a checkpoint of a few tensors and a load of it: ``load``, ``stream`` or ``load_into``, of names and with a
filter, of slices, to a dtype, in small blocks, with few or many readers, with a small window. Destinations are new or
views of larger memory, contiguous or not, of another dtype, tied, leaves that require gradients, numpy arrays; some
overlap, or have another shape, and must be refused with nothing written. The number that is printed when a program
fails makes the same program again: ``--seed SEED --first NUMBER --programs 1``.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch

import penstock
from penstock import destinations

DTYPES = [
    torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool,
]  # fmt: skip
FLOATS = [dtype for dtype in dict.fromkeys(DTYPES) if dtype.is_floating_point]
NUMPY = {torch.float32: "f4", torch.float16: "f2", torch.float64: "f8", torch.int64: "i8", torch.uint8: "u1"}
PIECE_BYTES = destinations.PIECE_BYTES
MARK = 0xA5
"""What memory holds where nothing may be written."""


def without_payload(tensor: torch.Tensor) -> bytes:
    """The bits, but for the sign and payload of a NaN: torch's vector and scalar instructions differ in them.

    As bfloat16, a float32 NaN becomes 0xFFFF with vector instructions and 0x7FC0 with scalar ones. Which ones convert
    an element depends on strides and on where a piece ends. Every other value is the same.
    """
    if not tensor.dtype.is_floating_point or not tensor.numel():
        return bits(tensor)
    each = np.frombuffer(bits(tensor), np.uint8).reshape(tensor.numel(), -1).copy()
    each[tensor.detach().flatten().double().isnan().numpy()] = 0xFF
    return each.tobytes()


class DifferenceError(AssertionError):
    """A program's result differs."""


def bits(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.detach().flatten())
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def values(chance: random.Random, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bits: infinities, NaNs, subnormal numbers."""
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.frombuffer(chance.randbytes(count * dtype.itemsize), np.uint8).copy()
    if dtype == torch.bool:
        raw &= 1
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def a_shape(chance: random.Random) -> tuple[int, ...]:
    if chance.random() < 0.1:
        return (chance.choice([20_000, 70_001, 131_072]),)
    return tuple(chance.choice([0, 1, 1, 2, 3, 5, 8, 17, 64]) for _ in range(chance.randint(0, 4)))


class Memory(NamedTuple):
    """A destination: the tensor or array that is given, as a tensor, and the memory that it is a view of."""

    given: Any
    tensor: torch.Tensor
    whole: torch.Tensor


def a_memory(chance: random.Random, dtype: torch.dtype, shape: tuple[int, ...], numpy: bool) -> Memory:
    """Memory for a tensor: of its own, or a view of more, strided, transposed, between others."""
    kind = chance.choice(["own", "own", "slice", "steps", "transposed", "columns", "offset"])
    margin = chance.randint(1, 9)
    if kind == "steps" and shape:
        whole = torch.empty((*shape[:-1], shape[-1] * 2 + margin), dtype=dtype)
        view = whole[..., margin : margin + shape[-1] * 2 : 2]
    elif kind == "transposed" and len(shape) > 1:
        order = list(range(len(shape)))
        chance.shuffle(order)
        whole = torch.empty([shape[at] for at in order], dtype=dtype)
        view = whole.permute([order.index(at) for at in range(len(shape))])
    elif kind == "columns" and shape:
        whole = torch.empty((*shape[:-1], shape[-1] + margin), dtype=dtype)
        view = whole[..., margin // 2 : margin // 2 + shape[-1]]
    elif kind == "slice" and shape:
        whole = torch.empty((shape[0] + margin, *shape[1:]), dtype=dtype)
        view = whole[margin // 2 : margin // 2 + shape[0]]
    elif kind == "offset":
        whole = torch.empty(int(np.prod(shape, dtype=np.int64)) + margin, dtype=dtype)
        view = whole[margin:].reshape(shape)
    else:
        whole = view = torch.empty(shape, dtype=dtype)
    if whole.numel():
        # Over its storage, whatever its strides.
        torch.as_strided(whole, (whole.numel(),), (1,), 0).view(torch.uint8).fill_(
            MARK % 2 if dtype == torch.bool else MARK
        )
    if numpy:
        return Memory(view.numpy(), view, whole)
    if chance.random() < 0.3 and dtype.is_floating_point:
        if view is whole:
            return Memory(torch.nn.Parameter(view), view, whole)
        return Memory(torch.nn.Parameter(view.detach()), view, whole)
    return Memory(view, view, whole)


def a_config(chance: random.Random) -> penstock.LoadOptions:
    return penstock.LoadOptions(
        readers=chance.choice([None, 1, 2, 4]),
        block_bytes=chance.choice([None, 4096, 16384, 65536]),
        read_ahead_bytes=chance.choice([None, 1, 1000, 100_000]),
        cache=chance.choice([None, None, "use", "bypass"]),
    )


def a_slice(chance: random.Random, shape: tuple[int, ...]) -> tuple[Any, ...]:
    def item(size: int) -> Any:
        kind = chance.random()
        if kind < 0.2 and size:
            return chance.randrange(-size, size)
        start, end = chance.randint(-2, size + 1), chance.randint(-2, size + 1)
        return slice(start, end, chance.choice([None, 1, 2, 3])) if kind < 0.8 else slice(None)

    items = [item(size) for size in shape[: chance.randint(0, len(shape))]]
    if chance.random() < 0.2:
        items.append(...)
    return tuple(items)


class Program:
    """One program. ``run`` raises DifferenceError where Penstock and torch differ."""

    def __init__(self, chance: random.Random, folder: Path) -> None:
        self.chance = chance
        self.stored: dict[str, torch.Tensor] = {}
        for number in range(chance.choice([1, 2, 3, 6, 12])):
            self.stored[f"t{number}"] = values(chance, chance.choice(DTYPES), a_shape(chance))
        names = list(self.stored)
        chance.shuffle(names)
        cut = chance.choice([len(names), chance.randint(0, len(names))])
        self.paths = []
        for at, some in enumerate((names[:cut], names[cut:])):
            if some:
                self.paths.append(folder / f"{at}.safetensors")
                safetensors.torch.save_file({name: self.stored[name] for name in some}, self.paths[-1])
        self.ckpt = penstock.open(self.paths, options=a_config(chance))
        read: dict[str, torch.Tensor] = {}
        for path in self.paths:
            read.update(safetensors.torch.load_file(path))
        self.stored = read
        self.names = [name for name in read if chance.random() < 0.7]

    def run(self) -> str:
        """Runs it; what it was, in a word."""
        kind = self.chance.choice(["load", "stream", "load_into", "load_into", "load_into", "refused", "overlap"])
        getattr(self, kind)()
        return kind

    def same(self, what: str, got: torch.Tensor, wanted: torch.Tensor, of: Any = bits) -> None:
        if got.dtype != wanted.dtype or got.shape != wanted.shape or of(got) != of(wanted):
            raise DifferenceError(f"{what}: {got.dtype} {list(got.shape)} for {wanted.dtype} {list(wanted.shape)}")

    def _wanted(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Arguments of a load, and what it is to give."""
        chance, arguments = self.chance, {}
        names = list(self.stored)
        if chance.random() < 0.5:
            arguments["names"] = names = list(self.names)
        if chance.random() < 0.3:
            odd = chance.random() < 0.5
            arguments["filter"] = lambda name: int(name[1:]) % 2 == odd
            names = [name for name in names if int(name[1:]) % 2 == odd]
        wanted = {name: self.stored[name] for name in names}
        if chance.random() < 0.4:
            arguments["slices"] = {
                name: a_slice(chance, tuple(tensor.shape)) for name, tensor in wanted.items() if chance.random() < 0.5
            }
            # Contiguous, as a slice that was read is: torch converts some NaNs of a strided view to other NaNs.
            wanted = {
                n: t[arguments["slices"][n]].contiguous() if n in arguments["slices"] else t for n, t in wanted.items()
            }
        if chance.random() < 0.3:
            dtype = arguments["dtype"] = chance.choice(FLOATS)
            wanted = {name: t.to(dtype) if t.is_floating_point() else t for name, t in wanted.items()}
        if chance.random() < 0.5:
            arguments["options"] = a_config(chance)
        return arguments, wanted

    def load(self) -> None:
        arguments, wanted = self._wanted()
        loaded = self.ckpt.load(**arguments)
        if list(loaded) != list(wanted) and set(loaded) != set(wanted):
            raise DifferenceError(f"{list(loaded)} for {list(wanted)}")
        for name, tensor in wanted.items():
            self.same(name, loaded[name], tensor)

    def stream(self) -> None:
        arguments, wanted = self._wanted()
        left = dict(wanted)
        for name, tensor in self.ckpt.stream(**arguments):
            self.same(name, tensor, left.pop(name))
        if left:
            raise DifferenceError(f"{list(left)} did not come")

    def load_into(self) -> None:  # noqa: PLR0912
        chance = self.chance
        numpy = chance.random() < 0.2
        memories: dict[str, Memory] = {}
        for name, tensor in self.stored.items():
            dtype = tensor.dtype
            if dtype.is_floating_point and chance.random() < 0.4:
                dtype = chance.choice(FLOATS)
            if numpy and (dtype not in NUMPY or tensor.dtype not in NUMPY):
                continue
            like = [m for m in memories.values() if m.tensor.shape == tensor.shape and m.tensor.dtype == dtype]
            if like and chance.random() < 0.3:
                memories[name] = chance.choice(like)
            elif chance.random() < 0.9:
                memories[name] = a_memory(chance, dtype, tuple(tensor.shape), numpy)
        order = list(memories)
        chance.shuffle(order)
        given = {name: memories[name].given for name in order}
        names = [name for name in self.names if name in given] if chance.random() < 0.4 else list(given)
        wholes = {id(m.whole): m.whole for m in memories.values()}
        expected = {key: torch.as_strided(w, (w.numel(),), (1,), 0).clone() for key, w in wholes.items()}
        for name in order:
            if name in names:
                memory = memories[name]
                flat = expected[id(memory.whole)]
                view = torch.as_strided(
                    flat, memory.tensor.shape, memory.tensor.stride(), memory.tensor.storage_offset()
                )
                if numpy:
                    # What numpy and torch make of the bits of a NaN differs.
                    with np.errstate(all="ignore"):
                        view.numpy()[...] = self.stored[name].numpy()
                else:
                    view.copy_(self.stored[name])
        versions = {name: tensor._version for name, tensor in given.items() if isinstance(tensor, torch.Tensor)}
        # What is converted goes in pieces, small ones now and then.
        most = max(tensor.nbytes for tensor in self.stored.values())
        if chance.random() < 0.3:
            destinations.PIECE_BYTES = chance.choice([most // 100, most // 7, most // 2]) + 1
        of = bits if destinations.PIECE_BYTES == PIECE_BYTES else without_payload
        self.ckpt.load_into(given, names=names, options=a_config(chance))
        for key, whole in wholes.items():
            self.same("memory", torch.as_strided(whole, (whole.numel(),), (1,), 0), expected[key], of)
        for name, version in versions.items():
            if name in names and given[name].numel() and given[name]._version <= version:
                raise DifferenceError(f"{name} was written to without a word")

    def refused(self) -> None:
        """One destination does not fit: none may be written to."""
        chance = self.chance
        memories = {n: a_memory(chance, t.dtype, tuple(t.shape), False) for n, t in self.stored.items()}
        name = chance.choice(list(memories))
        tensor = self.stored[name]
        if chance.random() < 0.5 or not tensor.dtype.is_floating_point:
            bad = torch.empty((*tensor.shape, 2), dtype=tensor.dtype)
        else:
            bad = torch.empty(tensor.shape, dtype=torch.int64)
        self._refuses({**{n: m.given for n, m in memories.items()}, name: bad}, memories, name)

    def overlap(self) -> None:
        """Two destinations share some memory but are not the same."""
        chance = self.chance
        memories = {n: a_memory(chance, t.dtype, tuple(t.shape), False) for n, t in self.stored.items()}
        pairs = [
            (one, other)
            for one, first in self.stored.items()
            for other, second in self.stored.items()
            if one != other and first.nbytes and second.nbytes
        ]
        if not pairs:
            return
        names = chance.choice(pairs)
        one, other = (self.stored[name] for name in names)
        memory = torch.full((one.nbytes + other.nbytes + 16,), MARK, dtype=torch.uint8)
        at = chance.randrange(0, one.nbytes, 8) if one.nbytes > 8 else 0
        if at == 0 and one.shape == other.shape and one.dtype == other.dtype:
            return
        given = {n: m.given for n, m in memories.items()}
        given[names[0]] = memory[: one.nbytes].view(one.dtype).reshape(one.shape)
        given[names[1]] = memory[at : at + other.nbytes].view(other.dtype).reshape(other.shape)
        self._refuses(given, memories, names[0], names[1])
        if bool((memory != MARK).any()):
            raise DifferenceError("it was refused after something was written")

    def _refuses(self, given: dict[str, Any], memories: dict[str, Memory], *names: str) -> None:
        before = {name: torch.as_strided(m.whole, (m.whole.numel(),), (1,), 0).clone() for name, m in memories.items()}
        try:
            self.ckpt.load_into(given)
        except penstock.DestinationError as error:
            if error.tensor not in names:
                raise DifferenceError(f"{error.tensor} was blamed for {names}: {error}") from error
        else:
            raise DifferenceError(f"{names} were not refused")
        for name, memory in memories.items():
            self.same(name, torch.as_strided(memory.whole, (memory.whole.numel(),), (1,), 0), before[name])


def run(seed: int, first: int, programs: int, folder: Path, report: float = float("inf")) -> dict[str, int]:
    """Runs programs ``first`` to ``first + programs`` of a seed; how many there were of each kind.

    Raises:
        DifferenceError: naming the program.
    """
    counts: dict[str, int] = {}
    told = time.monotonic()
    for number in range(first, first + programs):
        try:
            kind = Program(random.Random(f"{seed}:{number}"), folder).run()
        except Exception as error:
            raise DifferenceError(
                f"--seed {seed} --first {number} --programs 1: {type(error).__name__}: {error}"
            ) from error
        finally:
            destinations.PIECE_BYTES = PIECE_BYTES
        counts[kind] = counts.get(kind, 0) + 1
        if time.monotonic() - told > report:
            told = time.monotonic()
            print(f"{number + 1 - first} of {programs}", file=sys.stderr, flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Random loads, compared bit for bit with plain torch copies.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--programs", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        counts = run(options.seed, options.first, options.programs, Path(folder), 30)
    print(f"{options.programs} programs of seed {options.seed}, no difference: {counts}")


if __name__ == "__main__":
    main()
