"""The operations that programs are made of, and one run of a program.

Operands are numbers. A number picks a tensor among those that fit, at the time of the run, so a program stays a program
when operations are taken out of it. Every operation may fail; what it raises is part of what is compared.
"""

from __future__ import annotations

import copy
import ctypes
import io
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

warnings.filterwarnings("ignore")

Pairs = Iterator[tuple[str, torch.Tensor]]
Program = dict[str, Any]
OPERATIONS: dict[str, Callable[..., Any]] = {}
WEIGHTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "a": ("F32", (4, 6)), "b": ("F32", (6, 4)), "c": ("F32", (6,)), "d": ("F32", ()), "e": ("F32", (2, 4, 6)),
    "f": ("BF16", (4, 6)), "g": ("I32", (4, 6)), "h": ("U8", (4, 24)), "i": ("F32", (4, 6)), "j": ("F32", (4, 1)),
    "k": ("BF16", (8, 3)), "l": ("I32", (6,)), "m": ("F32", (0, 6)),
}  # fmt: skip
SHAPES = [(4, 6), (4, 6), (4, 6), (6, 4), (6,), (), (2, 4, 6), (8, 6), (4, 12), (24,), (8, 3), (4, 24), (3, 4, 6)]
DTYPES = [torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.float64]
DESTINATIONS = ["plain", "plain", "parameter", "frozen", "numpy", "overlap", "viewed", "tied", "inside", "transposed"]


def needs_grad(tensor: torch.Tensor) -> bool:
    """Whether a parameter is one that requires gradients. What autograd keeps of other tensors is not compared."""
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


class State:
    """What a running program has."""

    def __init__(self, weights: Pairs, pool: ThreadPoolExecutor) -> None:
        self.weights = weights
        self.pool = pool
        self.tensors: list[torch.Tensor] = []
        self.arrays: list[Any] = []
        self.pointers: list[tuple[torch.Tensor, int, int]] = []
        self.module = nn.Module()
        self.log: list[Any] = []
        self.messages: dict[int, str] = {}
        """By places in the log, what the errors there say."""

    def get(self, number: int) -> torch.Tensor:
        return self.tensors[number % len(self.tensors)]

    def like(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """A tensor of the same shape."""
        fitting = [other for other in self.tensors if other.shape == tensor.shape]
        return fitting[number % len(fitting)]

    def add(self, tensor: Any) -> Any:
        for item in tensor if isinstance(tensor, (list, tuple)) else [tensor]:
            if isinstance(item, torch.Tensor) and item.numel() < 500:
                self.tensors.append(item)
        return tensor


def operation(function: Callable[..., Any]) -> Callable[..., Any]:
    OPERATIONS[function.__name__.rstrip("_")] = function
    return function


def destinations(state: State, specs: list[list[Any]]) -> None:
    """Makes the destinations: ``[kind, shape, dtype]`` each, of known content."""
    for number, (kind, shape, dtype) in enumerate(specs):
        count = int(np.prod(SHAPES[shape], dtype=int))
        base = (torch.arange(count, dtype=torch.float32) + number).to(DTYPES[dtype])
        made = base.reshape(SHAPES[shape])
        if kind == "parameter" and made.is_floating_point():
            made = nn.Parameter(made)
            state.module.register_parameter(f"p{number}", made)
        elif kind == "frozen":
            made = nn.Parameter(made, requires_grad=False)
            state.module.register_parameter(f"p{number}", made)
        elif kind == "viewed" and DTYPES[dtype] != torch.bfloat16:
            state.arrays.append(made.detach().numpy())
        elif kind in {"numpy", "overlap"}:
            array = np.arange(count + 2, dtype=np.float32)
            state.tensors.append(torch.from_numpy(array[:count]).reshape(SHAPES[shape]))
            made = torch.from_numpy(array[2:]).reshape(SHAPES[shape]) if kind == "overlap" else state.tensors.pop()
            state.arrays.append(array)
        elif kind == "tied" and state.tensors:
            made = state.tensors[-1]
        elif kind == "inside" and state.tensors:
            made = state.tensors[-1].detach().reshape(-1)[1:]
        elif kind == "transposed" and made.dim() > 1:
            made = made.transpose(0, 1)
        state.tensors.append(made)


# Weights


@operation
def weight(s: State, x: int, y: int, z: int) -> Any:
    return s.add(next(s.weights)[1])


# Views, and what may be one

_VIEWS: list[Callable[[Any, int, int], Any]] = [
    lambda t, y, z: t.narrow(d := y % t.dim(), at := z % t.shape[d], 1 + z % (t.shape[d] - at)),
    lambda t, y, z: t[y % t.shape[0]],
    lambda t, y, z: t[y % 3 :: 1 + z % 3],
    lambda t, y, z: t[..., y % 2 : 5 - z % 2],
    lambda t, y, z: t.chunk(1 + y % 3, dim=z % t.dim()),
    lambda t, y, z: t.split(1 + y % 3, dim=z % t.dim())[0],
    lambda t, y, z: t.t(),
    lambda t, y, z: t.transpose(y % t.dim(), z % t.dim()),
    lambda t, y, z: t.permute(*reversed(range(t.dim()))),
    lambda t, y, z: t.reshape(-1),
    lambda t, y, z: torch.flatten(t),
    lambda t, y, z: t.flatten(y % 2),
    lambda t, y, z: t.view(-1),
    lambda t, y, z: t.reshape(t.numel() // (1 + y % 4), 1 + y % 4),
    lambda t, y, z: t.reshape_as(torch.empty(t.numel() // 2, 2)),
    lambda t, y, z: t.unsqueeze(y % 2),
    lambda t, y, z: t.squeeze(),
    lambda t, y, z: t.expand(1 + y % 3, *t.shape),
    lambda t, y, z: t.select(y % t.dim(), z % t.shape[y % t.dim()]),
    lambda t, y, z: t.unbind(y % t.dim())[0],
    lambda t, y, z: t.detach(),
    lambda t, y, z: t.data,
    lambda t, y, z: t.contiguous(),
    lambda t, y, z: t.as_strided((2, 2), (1, 2), y % 4),
    lambda t, y, z: t.unflatten(0, (2, -1)),
    lambda t, y, z: t.diagonal(),
    lambda t, y, z: t.unfold(0, 2, 1 + y % 2),
    lambda t, y, z: t.view([torch.int32, torch.int16, torch.uint8, torch.float32, torch.int64][y % 5]),
    lambda t, y, z: t.view_as(t),
    lambda t, y, z: t.mT,
    lambda t, y, z: t.tensor_split(torch.tensor([1, 2]), 0),
    lambda t, y, z: next(iter(t)),
    lambda t, y, z: t.swapaxes(0, y % t.dim()).flatten(),
]  # fmt: skip


@operation
def view(s: State, x: int, y: int, z: int) -> Any:
    return s.add(_VIEWS[y % len(_VIEWS)](s.get(x), z // 7, z))


@operation
def gather(s: State, x: int, y: int, z: int) -> Any:
    t = s.get(x)
    rows = t.shape[0]
    index: Any = [
        [z % rows, y % rows, 0],
        torch.tensor([z % rows, y % rows]),
        torch.tensor([number % (2 + z % 2) == 0 for number in range(rows)]),
        [-1, z % rows],
        (slice(None), [0, z % 3]),
        torch.tensor(z % rows),
        torch.randperm(rows, generator=torch.Generator().manual_seed(z)),
        None,
        (t.detach() > 3),
    ][y % 9]
    return s.add(t[index])


# Conversions and copies

_COPIES: list[Callable[[Any, int], Any]] = [
    lambda t, z: t.clone(),
    lambda t, z: t.to(DTYPES[z % len(DTYPES)]),
    lambda t, z: t.to(DTYPES[z % len(DTYPES)], copy=True),
    lambda t, z: t.to("cpu", torch.float32, False, z % 2 == 0),
    lambda t, z: t.float(),
    lambda t, z: t.bfloat16(),
    lambda t, z: t.cpu(),
    lambda t, z: t.type(torch.float64),
    lambda t, z: t.type_as(torch.empty(1, dtype=torch.float32)),
    lambda t, z: copy.deepcopy(t),
    lambda t, z: torch.clone(t, memory_format=torch.contiguous_format),
    lambda t, z: t.to(torch.empty(0, dtype=DTYPES[z % len(DTYPES)])),
    lambda t, z: torch.as_tensor(t),
    lambda t, z: torch.tensor(t),
    lambda t, z: torch.empty_like(t).copy_(t),
    lambda t, z: torch.zeros_like(t),
    lambda t, z: t.new_zeros(3),
    lambda t, z: torch.Tensor(t),
]  # fmt: skip


@operation
def saved(s: State, x: int, y: int, z: int) -> Any:
    return s.add(_saved(s.get(x)))


def _saved(tensor: Any) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


@operation
def copied(s: State, x: int, y: int, z: int) -> Any:
    return s.add(_COPIES[y % len(_COPIES)](s.get(x), z))


_COMPUTES: list[Callable[[Any, Any, int], Any]] = [
    lambda t, o, z: -t,
    lambda t, o, z: t + z % 5,
    lambda t, o, z: 3 - t,
    lambda t, o, z: t * 2,
    lambda t, o, z: t / 2,
    lambda t, o, z: t.abs(),
    lambda t, o, z: torch.exp(t.float() * 0.01),
    lambda t, o, z: t + o,
    lambda t, o, z: t * o,
    lambda t, o, z: torch.cat([t, o]),
    lambda t, o, z: torch.cat([t[1:], t[:1]], dim=0),
    lambda t, o, z: torch.stack([t, o]),
    lambda t, o, z: torch.stack([t, t], dim=z % 2),
    lambda t, o, z: t.flip(0),
    lambda t, o, z: t.roll(z % 3, dims=0),
    lambda t, o, z: t.repeat_interleave(2, dim=0),
    lambda t, o, z: torch.where(t > 3, t, o),
    lambda t, o, z: t.clamp(-2, z % 6),
    lambda t, o, z: t.index_select(0, torch.tensor([z % t.shape[0], 0])),
    lambda t, o, z: t.sum(),
    lambda t, o, z: t.max(),
    lambda t, o, z: torch.atleast_2d(t),
    lambda t, o, z: nn.functional.pad(t, (0, z % 3)),
    lambda t, o, z: t.float() @ o.float().t(),
    lambda t, o, z: torch.square(t),
    lambda t, o, z: t & 15,
    lambda t, o, z: t >> 2,
    lambda t, o, z: t.tile(2),
    lambda t, o, z: t.sort(dim=0)[0],
    lambda t, o, z: torch.vmap(lambda row: row * 2)(t),
    lambda t, o, z: torch.outer(t, t),
]  # fmt: skip


@operation
def computed(s: State, x: int, y: int, z: int) -> Any:
    t = s.get(x)
    return s.add(_COMPUTES[y % len(_COMPUTES)](t, s.like(t, z), z))


# Writes


@operation
def copy_(s: State, x: int, y: int, z: int) -> Any:
    t = s.get(x)
    return (t.data if z % 2 else t).copy_(s.like(t, y))


@operation
def copy_broadcast(s: State, x: int, y: int, z: int) -> Any:
    return s.get(x).data.copy_(s.get(y))


def _set(t: Any, index: Any, value: Any) -> Any:
    t[index] = value
    return t


_WRITES: list[Callable[[Any, Any, int], Any]] = [
    lambda t, o, z: t.fill_(z % 7),
    lambda t, o, z: t.zero_(),
    lambda t, o, z: t.add_(1),
    lambda t, o, z: t.mul_(2),
    lambda t, o, z: t.add_(o),
    lambda t, o, z: t.sub_(o),
    lambda t, o, z: t.__iadd__(o),
    lambda t, o, z: t.clamp_(-3, 3),
    lambda t, o, z: _set(t, z % t.shape[0], o[0]),
    lambda t, o, z: _set(t, slice(z % 2, None), o[z % 2 :]),
    lambda t, o, z: _set(t, ..., o),
    lambda t, o, z: _set(t, [0, z % t.shape[0]], o[:2]),
    lambda t, o, z: _set(t, t > 3, 1),
    lambda t, o, z: _set(t, (slice(None), slice(0, 2)), o[:, :2]),
    lambda t, o, z: t.copy_(t.flip(0)),
    lambda t, o, z: t.copy_(t[torch.randperm(t.shape[0], generator=torch.Generator().manual_seed(z))]),
    lambda t, o, z: t.copy_(o.t().reshape(t.shape)),
    lambda t, o, z: t.index_copy_(0, torch.tensor([0, z % t.shape[0]]), o[:2]),
    lambda t, o, z: torch.add(t, 1, out=t),
    lambda t, o, z: torch.add(o, 1, out=t),
    lambda t, o, z: torch.mul(o, 1, out=torch.empty_like(t)),
    lambda t, o, z: t.masked_fill_(o > 2, 0),
    lambda t, o, z: t.t_(),
    lambda t, o, z: t.unsqueeze_(0),
    lambda t, o, z: t.set_(o),
    lambda t, o, z: t.resize_(min(t.numel(), 2)) if t.is_contiguous() else None,  # else it may grow, by anything
    lambda t, o, z: t.requires_grad_(z % 2 == 0),
    lambda t, o, z: t.view(-1)[1:].copy_(o.reshape(-1)[:-1]),
    lambda t, o, z: torch.exp(t, out=t),
    lambda t, o, z: nn.init.constant_(t, z % 5),
    lambda t, o, z: torch._foreach_add_([t], 1),
    lambda t, o, z: torch._foreach_copy_([t], [o]),
    lambda t, o, z: t.detach().apply_(lambda value: value + 1) if t.is_contiguous() and t.dtype.itemsize == 4 else None,
]  # fmt: skip


@operation
def write(s: State, x: int, y: int, z: int) -> Any:
    t = s.get(x)
    return _WRITES[y % len(_WRITES)](t if z % 3 else t.data, s.like(t, z // 3), z)


# Parameters, modules, setters


@operation
def set_data(s: State, x: int, y: int, z: int) -> Any:
    t = s.get(x)
    t.data = s.like(t, y) if z % 4 else s.get(y)


@operation
def set_grad(s: State, x: int, y: int, z: int) -> Any:
    t = s.get(x)
    t.grad = s.like(t, y)
    s.add(t.grad)


@operation
def set_real(s: State, x: int, y: int, z: int) -> Any:
    t = s.get(x)
    t.real = s.like(t, y)


@operation
def parameter(s: State, x: int, y: int, z: int) -> Any:
    made = nn.Parameter(s.get(x), requires_grad=y % 2 == 0) if y % 3 else nn.Parameter(s.get(x))
    s.module.register_parameter(f"p{z % 4}", made)
    return s.add(made)


@operation
def buffer(s: State, x: int, y: int, z: int) -> Any:
    made = nn.Buffer(s.get(x)) if y % 2 else s.get(x)
    s.module.register_buffer(f"b{z % 4}", made)
    return s.add(made)


@operation
def attribute(s: State, x: int, y: int, z: int) -> Any:
    setattr(s.module, f"{'pb'[y % 2]}{z % 4}", s.get(x))


@operation
def from_module(s: State, x: int, y: int, z: int) -> Any:
    found = [*s.module.parameters(), *s.module.buffers()]
    return s.add(found[x % len(found)])


@operation
def state_dict(s: State, x: int, y: int, z: int) -> Any:
    state = s.module.state_dict()
    name = sorted(state)[x % len(state)]
    return str(s.module.load_state_dict({name: s.like(state[name], y)}, strict=False, assign=z % 3 == 0))


@operation
def half(s: State, x: int, y: int, z: int) -> Any:
    s.module.to(torch.bfloat16) if z % 2 else s.module.float()


# NumPy and addresses


@operation
def to_numpy(s: State, x: int, y: int, z: int) -> Any:
    t = s.get(x)
    # Of an alias: an array of the tensor itself would dangle once that is given other memory.
    s.arrays.append(t.detach().numpy() if y % 2 else np.asarray(t.detach()))


@operation
def from_numpy(s: State, x: int, y: int, z: int) -> Any:
    return s.add(torch.from_numpy(s.arrays[x % len(s.arrays)].reshape(-1)[y % 3 :]))


@operation
def read_array(s: State, x: int, y: int, z: int) -> Any:
    s.log.append(repr(s.arrays[x % len(s.arrays)].tolist()))


@operation
def write_array(s: State, x: int, y: int, z: int) -> Any:
    s.arrays[x % len(s.arrays)].reshape(-1)[y % 3 :: 2] = z % 9


@operation
def address(s: State, x: int, y: int, z: int) -> Any:
    t = s.get(x)
    if t.is_contiguous() and t.numel():
        s.pointers.append((t.detach(), t.data_ptr(), t.numel() * t.element_size()))


@operation
def read_address(s: State, x: int, y: int, z: int) -> Any:
    _, at, nbytes = s.pointers[x % len(s.pointers)]
    s.log.append(ctypes.string_at(at, nbytes))


@operation
def dlpack(s: State, x: int, y: int, z: int) -> Any:
    t = s.get(x).detach()
    if y % 3 == 0:
        return s.add(torch.from_dlpack(t))
    capsule = t.__dlpack__()
    return s.add(torch.from_dlpack(capsule)) if y % 3 == 1 else s.arrays.append(np.from_dlpack(Capsule(capsule)))


class Capsule:
    """What NumPy takes a capsule from."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __dlpack__(self, **_: Any) -> Any:
        return self._made

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


# Reading

_READS: list[Callable[[Any], Any]] = [
    lambda t: t.sum().item(),
    lambda t: t.tolist(),
    lambda t: bool((t > 2).any()),
    lambda t: (tuple(t.shape), strides(t), t.dtype, str(t.device), t.is_contiguous(), needs_grad(t)),
    lambda t: torch.equal(t, t.clone()),
    lambda t: (t.storage_offset(), t.is_cpu, t.is_meta, t.is_cuda, t.get_device(), t.dim(), t.numel(), t.nbytes),
    lambda t: float(t.reshape(-1)[0]),
    lambda t: t.untyped_storage().tolist()[:8],
    lambda t: t.grad is None,
    lambda t: len(t.shape and t),
    lambda t: bytes(np.array(t)),
    lambda t: isinstance(t, nn.Parameter),
    lambda t: t.float().numpy().tolist(),
]  # fmt: skip


@operation
def read(s: State, x: int, y: int, z: int) -> Any:
    # As text: a NaN is not equal to another.
    s.log.append(repr(_READS[y % len(_READS)](s.get(x))))


# jit and threads

_SCRIPTS: list[Any] = []


def _scripts() -> list[Any]:
    if not _SCRIPTS:
        torch._C._jit_set_profiling_executor(False)
        lines = [
            "def f(x: Tensor, y: Tensor) -> Tensor:\n    return x * 2 + 1\n",
            "def f(x: Tensor, y: Tensor) -> Tensor:\n    return x.add_(1)\n",
            "def f(x: Tensor, y: Tensor) -> Tensor:\n    return x.copy_(y)\n",
            "def f(x: Tensor, y: Tensor) -> Tensor:\n    return x[1:]\n",
            "def f(x: Tensor, y: Tensor) -> Tensor:\n    return x.t().reshape(-1) + y.sum()\n",
        ]
        _SCRIPTS.extend(torch.jit.CompilationUnit(line).f for line in lines)
    return _SCRIPTS


@operation
def script(s: State, x: int, y: int, z: int) -> Any:
    t = s.get(x)
    scripts = _scripts()
    return s.add(scripts[y % len(scripts)](t.data if z % 2 else t, s.like(t, z)))


@operation
def drop(s: State, x: int, y: int, z: int) -> Any:
    if len(s.tensors) > 2:
        del s.tensors[x % len(s.tensors)]


def step(state: State, operation: list[Any]) -> None:
    """Does one operation ``[name, x, y, z, where, grad]``, and logs what it raised."""
    name, x, y, z, where, grad = operation
    raised: list[tuple[str, str]] = []

    def do() -> None:
        try:
            with torch.no_grad() if not grad else nullcontext():
                OPERATIONS[name](state, x, y, z)
        except Exception as error:  # noqa: BLE001 - what is raised is compared
            # Not the error itself, which would keep tensors of its frames.
            raised.append((type(error).__name__, str(error)))

    if where == "thread":
        thread = threading.Thread(target=do)
        thread.start()
        thread.join()
    elif where == "pool":
        state.pool.submit(do).result()
    else:
        do()
    what, message = raised[0] if raised else (None, "")
    if raised:
        state.messages[len(state.log)] = message
    state.log.append((name, what, len(state.tensors)))


def run(program: Program, state: State) -> None:
    """Runs a program; its destinations are there already."""
    with torch.inference_mode() if program["inference"] else nullcontext():
        for operation in program["operations"]:
            step(state, operation)


def seen(state: State) -> list[Any]:
    """What can be seen of the state in the end."""
    named = [*state.module.named_parameters(), *state.module.named_buffers()]
    tensors = [*state.tensors, *(tensor for _, tensor in named)]
    return [
        state.log,
        [name for name, _ in named],
        [_seen(tensor) for tensor in tensors],
        [array.tobytes() for array in state.arrays],
        [ctypes.string_at(at, nbytes) for _, at, nbytes in state.pointers],
    ]


def _seen(tensor: torch.Tensor) -> Any:
    # Of views, torch knows whether they may be differentiated; it is not part of what a load leaves in memory.
    is_parameter = isinstance(tensor, nn.Parameter)
    about = tuple(tensor.shape), strides(tensor), tensor.dtype, is_parameter, needs_grad(tensor)
    grad = tensor.grad if is_parameter else None
    return about, _bytes(tensor), None if grad is None else _bytes(grad)


def strides(tensor: torch.Tensor) -> tuple[int | None, ...]:
    """A tensor's strides, but of dimensions of size one and of empty tensors, which reach no element.

    Of these torch promises nothing: ``t() + 1`` of a tensor of 4 rows and 1 column has the strides (1, 1) on the CPU
    and (4, 1) on the meta device, and ``t().abs()`` has (4, 1) on both. Nor does it look at them, but for the last of
    a tensor that is viewed as elements of another size: that works or is an error.
    """
    matters = tensor.numel() > 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(step if matters and size != 1 else None for size, step in sizes)


def _bytes(tensor: torch.Tensor) -> bytes:
    packed = tensor.data.clone(memory_format=torch.contiguous_format).reshape(-1)
    return packed.view(torch.uint8).numpy().tobytes() if packed.numel() else b""
