"""Making programs, running each with ordinary and with lazy tensors, and making those that differ small."""

from __future__ import annotations

import json
import random
import re
import struct
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import penstock
from penstock.recording import NotRecordableError, Recorder, eager_reader

from . import language
from .language import DESTINATIONS, DTYPES, OPERATIONS, SHAPES, WEIGHTS, Program, State

_OFTEN = {
    "weight": 6,
    "view": 8,
    "copy": 9,
    "write": 7,
    "computed": 4,
    "copied": 3,
    "gather": 3,
    "set_data": 2,
    "read": 2,
}
_ONLY_EAGER = (
    re.compile("A view was created in "),
    re.compile(".*Inference tensors do not track version counter", re.DOTALL),
    re.compile(r"Only Tensors created explicitly by the user \(graph leaves\)"),
    re.compile(".*a leaf Variable that requires grad", re.DOTALL),
    re.compile(r"Output \d+ of \w+ is a view|.*\bview was created in (no_grad|inference) mode"),
    re.compile("cannot resize variables that require grad"),
    re.compile("Autograd not support dtype"),
    re.compile(r"Can't call numpy\(\) on Tensor that requires grad"),
    re.compile("you can only change requires_grad flags of leaf variables"),
    re.compile(r"\w+\(\): functions with out=... arguments don't support automatic differentiation"),
)
"""Messages of errors that only the eager load need raise.

All are of autograd's own bookkeeping, not of the bits: in which mode a view was made whose memory is now written to
with gradients, whether a tensor that was given the memory of another by ``.data`` has a version counter, and whether
a weight itself, or what was written to it, requires gradients. Lazy tensors are no views and no leaves to autograd,
and under modes of torch an inference tensor's version is not asked for. A load that raises neither eagerly is compared
in full; one that does never ended with a model that a recorded load could differ from. The other direction, an error
that only the recorded load raises, is always a difference.
"""
_NAMES = list(OPERATIONS)
_CHANCES = [_OFTEN.get(name, 1) for name in _NAMES]


def make(seed: int) -> Program:
    """The program of a seed."""
    chance = random.Random(seed)
    specs = [
        [chance.choice(DESTINATIONS), chance.randrange(len(SHAPES)), chance.randrange(len(DTYPES))]
        for _ in range(chance.randint(1, 4))
    ]
    names = [["weight"], *([name] for name in chance.choices(_NAMES, _CHANCES, k=chance.randint(3, 18)))]
    grad = chance.random() < 0.2
    inference = chance.random() < 0.05
    # Inference mode is a thread's own; tensors of one are not for others to write to.
    threads = not inference and chance.random() < 0.3

    def where() -> str:
        return chance.choice(["thread", "pool"]) if threads and chance.random() < 0.3 else ""

    operations = [[name, *(chance.randrange(1000) for _ in range(3)), where(), grad] for [name] in names]
    return {
        "seed": seed,
        "order": chance.sample(sorted(WEIGHTS), len(WEIGHTS)),
        "destinations": specs,
        "operations": operations,
        "keep": chance.choice(["lazy", "eager"]),
        "small": chance.choice([8, 1 << 18]),
        "inference": inference,
    }


class _Functions(TorchFunctionMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Sees functions of torch, and changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Sees operators, and changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return func(*args, **(kwargs or {}))


class Runner:
    """Runs programs against one checkpoint of tiny tensors."""

    def __init__(self, home: Path) -> None:
        self._checkpoint = penstock.open(_checkpoint(home / "tiny.safetensors"))
        self._weights = self._checkpoint.load()
        # Its threads exist before any recorder does.
        self._pool = ThreadPoolExecutor(1)
        self._pool.submit(int).result()

    def warm(self) -> None:
        """Has torch imported what it imports late."""
        for seed in range(150):
            self.difference({**make(seed), "keep": "lazy"})

    def close(self) -> None:
        self._pool.shutdown()

    def eager(self, program: Program, *, under_modes: bool = False) -> State:
        state = State(self._cloned(program["order"]), self._pool)
        language.destinations(state, program["destinations"])
        with ExitStack() as modes:
            if under_modes:
                modes.enter_context(_Functions())  # type: ignore[no-untyped-call, unused-ignore]
                modes.enter_context(_Operators())  # type: ignore[no-untyped-call, unused-ignore]
            language.run(program, state)
        return state

    def _cloned(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            # As tensors that are not made under inference mode are: whoever has them may write to them.
            with torch.inference_mode(mode=False):
                weight = self._weights[name].clone()
            yield name, weight

    def recorded(self, program: Program) -> State:
        eager_reader.SMALL_BYTES = program["small"]
        recorder = Recorder(keep=program["keep"])
        state = State(recorder.weights(self._checkpoint, program["order"]), self._pool)
        language.destinations(state, program["destinations"])
        with recorder:
            language.run(program, state)
        return state

    def difference(self, program: Program) -> str | None:
        """What differs, or None."""
        eager = self.eager(program)
        wanted = language.seen(eager)
        try:
            recorded = self.recorded(program)
            got = language.seen(recorded)
        except NotRecordableError:
            return None
        except Exception as error:  # noqa: BLE001 - a finding like any other
            return f"recorded: {type(error).__name__}: {error}"
        for what, one, other in zip(("log", "names", "tensors", "arrays", "addresses"), wanted, got, strict=True):
            if one != other:
                at = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), "length")
                if what == "log" and isinstance(at, int) and _only_eager_raises(eager, recorded, at):
                    return None
                if language.seen(self.eager(program, under_modes=True)) == got:
                    # Torch itself differs under modes that do nothing.
                    return None
                details = f"\n  eager:    {one[at]}\n  recorded: {other[at]}" if isinstance(at, int) else ""
                return f"{what} {at}{details}"
        return None

    def shrunk(self, program: Program) -> Program:
        """The program without all that it can do without and still differ."""
        again = True
        while again:
            again = False
            for part in ("operations", "destinations"):
                for at in reversed(range(len(program[part]))):
                    smaller = {**program, part: program[part][:at] + program[part][at + 1 :]}
                    if (part == "operations" or smaller[part]) and self.difference(smaller) is not None:
                        program, again = smaller, True
            for at in range(len(program["operations"])):
                for field, plain in ((4, ""), (5, False)):
                    operations = [list(operation) for operation in program["operations"]]
                    if operations[at][field] != plain:
                        operations[at][field] = plain
                        smaller = {**program, "operations": operations}
                        if self.difference(smaller) is not None:
                            program, again = smaller, True
        return program


def _only_eager_raises(eager: State, recorded: State, at: int) -> bool:
    """Whether an operation failed in the eager load, and in no other, with an error that it need not share."""
    message = eager.messages.get(at, "")
    return at not in recorded.messages and any(only.match(message) for only in _ONLY_EAGER)


def check(seeds: range, home: Path) -> Iterator[tuple[int, str]]:
    """Yields the seeds of programs that differ, and what to print."""
    torch.set_num_threads(1)
    runner = Runner(home)
    runner.warm()
    try:
        for seed in seeds:
            program = make(seed)
            if runner.difference(program) is not None:
                yield seed, described(runner, program)
    finally:
        runner.close()


def described(runner: Runner, program: Program) -> str:
    small = runner.shrunk(program)
    lines = "\n".join(f"    {operation}" for operation in small["operations"])
    return (
        f"{runner.difference(small)}\n  destinations {small['destinations']}\n{lines}\n  --replay '{json.dumps(small)}'"
    )


def _checkpoint(path: Path) -> Path:
    sizes = {"F32": 4, "BF16": 2, "I32": 4, "U8": 1}
    header: dict[str, Any] = {}
    data = b""
    for number, (name, (dtype, shape)) in enumerate(WEIGHTS.items()):
        count = 1
        for size in shape:
            count *= size
        values = [(index * 7 + number * 3) % 41 - 20 for index in range(count)]
        floats = b"".join(struct.pack("<f", value / 4) for value in values)
        packed = {
            "F32": floats,
            "BF16": b"".join(floats[at + 2 : at + 4] for at in range(0, len(floats), 4)),
            "I32": b"".join(struct.pack("<i", value) for value in values),
            "U8": bytes(value % 256 for value in values),
        }[dtype]
        assert len(packed) == count * sizes[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def checked(first: int, count: int) -> list[tuple[int, str]]:
    """The seeds of programs that differ, and what to print, of ``count`` from ``first`` on."""
    with temporary() as home:
        return list(check(range(first, first + count), Path(home)))


def temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="programs-")
