"""What ``load_into`` promises of destinations: the result of ``copy_``, or a refusal before anything is written."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from conftest import Raw, as_bytes, raw_bytes, write_raw

torch = pytest.importorskip("torch")
nn = torch.nn

from penstock import destinations as planning
from penstock.frameworks.torch import DTYPES

FLOATS = sorted(name for name, dtype in DTYPES.items() if dtype.is_floating_point)
INTEGERS = ["BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"]


def one(tmp_path: Path, dtype: str, shape: tuple[int, ...], seed: int = 0) -> penstock.Checkpoint:
    path = tmp_path / f"{dtype}-{seed}.safetensors"
    return penstock.open(write_raw(path, {"w": Raw(dtype, shape, raw_bytes(dtype, shape, seed))}))


# Dtypes


@pytest.mark.parametrize("source", FLOATS)
def test_floating_point_numbers_are_converted_as_copy_does(tmp_path: Path, source: str) -> None:
    ckpt = one(tmp_path, source, (37, 64))
    loaded = ckpt.load()["w"]
    for name in FLOATS:
        into = torch.ones(loaded.shape).to(DTYPES[name]) if name != "F4" else torch.empty(37, 32, dtype=DTYPES["F4"])
        expected = torch.empty_like(into)
        try:
            expected.copy_(loaded)
        except (RuntimeError, NotImplementedError):
            before = as_bytes(into)
            with pytest.raises(penstock.DestinationError, match=rf"{source}.*{name}.*torch cannot do it") as raised:
                ckpt.load_into({"w": into})
            assert raised.value.tensor == "w"
            assert as_bytes(into) == before
            continue
        ckpt.load_into({"w": into})
        assert as_bytes(into) == as_bytes(expected), name


def test_no_number_is_cut_off(tmp_path: Path) -> None:
    """What is not rounded keeps its value: all values of small dtypes, and the ends of the others."""
    for source, target in itertools.product([*INTEGERS, "F16", "F32", "C64"], [*INTEGERS, *FLOATS, "C64"]):
        if (source not in INTEGERS and target not in INTEGERS) or "F4" in {source, target}:
            continue
        kept = planning.keeps_values(source, target)
        if source in INTEGERS and target != "F8_E8M0":
            dtype, other = DTYPES[source], DTYPES[target]
            bits = 1 if source == "BOOL" else torch.iinfo(dtype).bits
            ends = [0, 1] if source == "BOOL" else [torch.iinfo(dtype).min, torch.iinfo(dtype).max]
            if bits <= 8 and source != "BOOL":
                values = list(range(ends[0], ends[1] + 1))
            else:
                values = sorted({*ends, *(v for v in (ends[0] + 1, ends[1] - 1, ends[1] // 3) if v >= ends[0])})
            there = [torch.tensor([v], dtype=dtype).to(other) for v in values]
            same = all(
                (int(t.to(torch.complex128).real.item()) if target == "C64" else t.double().item() if target in FLOATS
                 else t.item()) == v
                for t, v in zip(there, values, strict=True)
            )  # fmt: skip
            assert not kept or same, (source, target)
        elif source not in INTEGERS and target in INTEGERS:
            assert not kept
    ckpt = one(tmp_path, "I64", (5,))
    for dtype in (torch.int32, torch.float64, torch.bool):
        with pytest.raises(penstock.DestinationError, match=r"I64.*cut off.*ckpt\.load") as raised:
            ckpt.load_into({"w": torch.zeros(5, dtype=dtype)})
        assert "convert it as you see fit" in (raised.value.remedy or "")


def test_another_dtype_can_be_refused(tmp_path: Path) -> None:
    ckpt = one(tmp_path, "BF16", (4, 4))
    into = torch.zeros(4, 4)
    with pytest.raises(penstock.DestinationError, match=r"BF16, the destination's F32\. Build.*dtype_mismatch"):
        ckpt.load_into({"w": into}, dtype_mismatch="error")
    assert not into.any()
    same = torch.zeros(4, 4, dtype=torch.bfloat16).t()
    ckpt.load_into({"w": same}, dtype_mismatch="error")
    assert torch.equal(same.view(torch.int16), ckpt.load()["w"].view(torch.int16))
    with pytest.raises(penstock.ConfigError, match="neither"):
        ckpt.load_into({"w": into}, dtype_mismatch="no")  # type: ignore[arg-type]


def test_numpy_arrays_are_converted_and_need_not_be_contiguous(tmp_path: Path) -> None:
    ckpt = one(tmp_path, "F64", (6, 8))
    loaded = ckpt.load(framework="np")["w"]
    into = np.zeros((8, 6), "f4").T
    with np.errstate(all="ignore"):
        expected = loaded.astype("f4")
    ckpt.load_into({"w": into})
    assert as_bytes(into) == as_bytes(expected)
    backwards = np.zeros((6, 8))
    ckpt.load_into({"w": backwards[::-1, ::-2].repeat(2, 1)[:, ::-1]})
    assert not backwards.any()
    ckpt.load_into({"w": backwards[::-1, ::-1]})
    assert as_bytes(np.ascontiguousarray(backwards[::-1, ::-1])) == as_bytes(loaded)
    with pytest.raises(penstock.DestinationError, match="cut off"):
        ckpt.load_into({"w": np.zeros((6, 8), "i8")})


def test_converting_takes_little_memory_besides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "PIECE_BYTES", 1 << 20)
    ckpt = one(tmp_path, "F32", (4, 512, 4096))
    into = torch.zeros(4, 512, 4096, dtype=torch.bfloat16)
    now = most = 0

    from penstock.frameworks.torch import Torch

    empties, put = Torch.empties, Torch.put

    def made(self: Any, *args: Any) -> Any:
        nonlocal now, most
        tensors, addresses = empties(self, *args)
        now += sum(tensor.nbytes for tensor in tensors)
        most = max(most, now)
        return tensors, addresses

    def taken(self: Any, memory: Any, value: Any) -> None:
        nonlocal now
        put(self, memory, value)
        now -= value.nbytes

    monkeypatch.setattr(Torch, "empties", made)
    monkeypatch.setattr(Torch, "put", taken)
    ckpt.load_into({"w": into}, options=penstock.LoadOptions(window_bytes=4 << 20, block_bytes=1 << 18))
    assert now == 0
    assert 0 < most <= 6 << 20, f"{most} bytes of a tensor of 32 MiB"
    assert as_bytes(into) == as_bytes(ckpt.load(dtype=torch.bfloat16)["w"])


def test_load_converts_floating_point_numbers_to_such_only(tmp_path: Path) -> None:
    ckpt = one(tmp_path, "F32", (3,))
    for dtype in (torch.int8, torch.bool, "I64"):
        for call in (ckpt.load, ckpt.stream):
            with pytest.raises(penstock.SelectionError, match="truncate"):
                call(dtype=dtype)
    with pytest.raises(penstock.SelectionError, match="truncate"):
        ckpt.load(dtype="int8", framework="np")
    if "F4" in DTYPES:
        with pytest.raises(penstock.SelectionError, match="F4 cannot be converted"):
            one(tmp_path, "F4", (4, 4)).load(dtype=torch.float32)


# Autograd


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_would_be_wrong_raise_as_after_copy(tmp_path: Path, dtype: torch.dtype) -> None:
    ckpt = one(tmp_path, "F32", (3,))
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    y = (weight * weight).sum()
    version = weight._version
    ckpt.load_into({"w": weight})
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.grad_fn is None


def test_a_view_of_a_parameter_bumps_the_parameter_and_a_failed_load_does_too(tmp_path: Path) -> None:
    ckpt = one(tmp_path, "F32", (3, 4))
    base = torch.zeros(6, 4)
    ckpt.load_into({"w": base[2:5]})
    assert base._version > 0
    ckpt = penstock.open(one(tmp_path, "F32", (600, 4000), 1).files[0][0])
    into, before = torch.zeros(600, 4000), 0

    def fail(done: int, total: int) -> None:
        raise KeyError(done)

    with pytest.raises(KeyError):
        ckpt.load_into({"w": into}, progress=fail)
    assert into._version > before


def test_tensors_of_inference_mode_are_filled(tmp_path: Path) -> None:
    with torch.inference_mode():
        into, other = torch.zeros(4), torch.zeros(4, dtype=torch.float64)
    ckpt = one(tmp_path, "F32", (4,))
    ckpt.load_into({"w": into})
    ckpt.load_into({"w": other})
    assert as_bytes(into) == as_bytes(ckpt.load()["w"])
    assert torch.equal(other.nan_to_num(), ckpt.load()["w"].double().nan_to_num())


# Tied and overlapping


@pytest.fixture
def two(tmp_path: Path) -> penstock.Checkpoint:
    raw = {name: Raw("F32", (8, 4), raw_bytes("F32", (8, 4), seed)) for seed, name in enumerate("ab")}
    return penstock.open(write_raw(tmp_path / "two.safetensors", raw))


def test_tied_destinations_get_what_the_last_name_has_as_with_load_state_dict(two: penstock.Checkpoint) -> None:
    loaded = two.load()
    for order in ("ab", "ba"):
        into = torch.zeros(8, 4)
        two.load_into(dict.fromkeys(order, into))
        assert as_bytes(into) == as_bytes(loaded[order[-1]])
        assert two.stats is not None
        assert two.stats.bytes == into.nbytes, "read once"
        into = torch.zeros(8, 4)
        two.load_into({order[0]: into, order[1]: into[:]})
        assert as_bytes(into) == as_bytes(loaded[order[-1]])


OVERLAPS: dict[str, Any] = {
    "a part": lambda m: (m[:8], m[4:12]),
    "another dtype": lambda m: (m[:8], m[:8].view(torch.int32)),
    "another shape": lambda m: (m[:8], m[:8].t()),
    "strided": lambda m: (m[0:16:2], m[:8]),
    "columns": lambda m: (m.view(8, 16)[:, 0:4], m.view(8, 16)[:, 3:7]),
}
APART: dict[str, Any] = {
    "neighbours": lambda m: (m[:8], m[8:16]),
    "rows by turns": lambda m: (m[0:16:2], m[1:16:2]),
    "columns": lambda m: (m.view(8, 16)[:, 0:4], m.view(8, 16)[:, 4:8]),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_destinations_that_overlap_are_refused(tmp_path: Path, case: str) -> None:
    memory = torch.zeros(32, 4)
    pair = OVERLAPS[case](memory)
    names = {torch.int32: "I32", torch.float32: "F32"}
    raw = {
        name: Raw(names[t.dtype], tuple(t.shape), raw_bytes("F32", tuple(t.shape), 3))
        for name, t in zip("ab", pair, strict=True)
    }
    ckpt = penstock.open(write_raw(tmp_path / "x.safetensors", raw))
    with pytest.raises(penstock.DestinationError, match=r"overlaps that of '[ab]'"):
        ckpt.load_into(dict(zip("ab", pair, strict=True)))
    assert not memory.any()


@pytest.mark.parametrize("case", APART)
def test_destinations_that_lie_between_each_other_are_filled(two: penstock.Checkpoint, case: str) -> None:
    memory = torch.zeros(32, 4)
    pair = dict(zip("ab", APART[case](memory), strict=True))
    two.load_into(pair)
    for name, tensor in two.load().items():
        assert as_bytes(pair[name]) == as_bytes(tensor)


def test_overlapping_arrays_are_refused(two: penstock.Checkpoint) -> None:
    memory = np.zeros((16, 4), "f4")
    with pytest.raises(penstock.DestinationError, match="overlaps"):
        two.load_into({"a": memory[:8], "b": memory[7:15]})
    with pytest.raises(penstock.DestinationError, match="overlaps"):
        two.load_into({"a": memory[:8], "b": memory[7::-1]})
    two.load_into({"a": memory[7::-1], "b": memory[8:]})
    assert memory.any()


# Others at the same time


def test_an_array_cannot_be_resized_while_it_is_filled(two: penstock.Checkpoint) -> None:
    arrays = {name: np.zeros((8, 4), "f4") for name in "ab"}
    owner = np.zeros((8, 8), "f4")
    arrays["b"] = owner.reshape(-1)[:32].reshape(8, 4)
    refused = []

    def resize(done: int, total: int) -> None:
        for array in (arrays["a"], owner):
            try:
                array.resize(1_000_000, refcheck=False)
            except ValueError:  # noqa: PERF203
                refused.append(done)

    two.load_into(arrays, progress=resize)
    assert len(refused) >= 2
    assert all(as_bytes(arrays[name]) == as_bytes(tensor) for name, tensor in two.load().items())
    arrays["a"].resize(10, refcheck=False)  # and can be afterwards


def test_a_tensor_whose_data_is_replaced_meanwhile_is_not_pulled_away(tmp_path: Path) -> None:
    ckpt = one(tmp_path, "F32", (1024, 4096))
    weight = nn.Parameter(torch.zeros(1024, 4096))
    before = weight.detach()
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            weight.data = torch.zeros(1)
            gc.collect(0)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(3):
            ckpt.load_into({"w": before})
            try:
                ckpt.load_into({"w": weight})
            except penstock.DestinationError as error:
                assert "shape" in str(error)  # noqa: PT017
    finally:
        stop.set()
        thread.join()
    assert as_bytes(before) == as_bytes(ckpt.load()["w"])


def test_a_storage_that_was_resized_before_its_turn_is_not_written_to(tmp_path: Path) -> None:
    raw = {f"w{i}": Raw("F32", (1000,), raw_bytes("F32", (1000,), i)) for i in range(3)}
    ckpt = penstock.open(write_raw(tmp_path / "x.safetensors", raw))
    into = {name: torch.zeros(1000) for name in raw}
    from penstock.parts import PartDestinations

    attach = PartDestinations.attach

    def attaching(self: Any, begin: int, end: int) -> None:
        into["w1"].untyped_storage().resize_(0)
        attach(self, begin, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartDestinations, "attach", attaching)
        with pytest.raises(penstock.DestinationError, match="'w1': its destination was resized"):
            ckpt.load_into(into)


# Modules


class Packed(nn.Module):
    """Its state_dict is a copy of what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight * 2


def test_a_state_dict_of_copies_is_refused(tmp_path: Path) -> None:
    ckpt = one(tmp_path, "F32", (4,))
    with pytest.raises(penstock.DestinationError, match="gives a copy of it"):
        ckpt.load_into(nn.ModuleDict({"m": Packed()}), strict=False)


def test_views_that_a_hook_gives_of_a_parameter_are_filled(two: penstock.Checkpoint) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fused = nn.Parameter(torch.zeros(16, 4))

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[prefix + "a"], destination[prefix + "b"] = self.fused[:8], self.fused[8:]

    module = Fused()
    two.load_into(module)
    assert as_bytes(module.fused) == b"".join(as_bytes(tensor) for tensor in two.load().values())


# Progress and statistics


class Bars:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import tqdm.auto

        self.open: list[Any] = []
        outer = self

        class Bar:
            def __init__(self, **_: Any) -> None:
                outer.open.append(self)

            def update(self, _: int) -> None:
                pass

            def close(self) -> None:
                if self in outer.open:
                    outer.open.remove(self)

        monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)


def test_no_bar_is_left_open(two: penstock.Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    bars = Bars(monkeypatch)
    stream = two.stream(progress=True)
    assert not bars.open
    next(stream)
    assert bars.open
    stream.close()
    assert not bars.open
    two.stream(progress=True)
    two.load_into({}, strict=False, progress=True)
    two.load_into({"a": torch.zeros(8, 4), "b": torch.zeros(8, 4)}, progress=True)
    assert not bars.open
    path = Path(two.files[0][0])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(penstock.LocationChangedError):
        two.load_into({"a": torch.zeros(8, 4), "b": torch.zeros(8, 4)}, progress=True)
    assert not bars.open


def test_a_thread_sees_the_figures_of_its_own_load(tmp_path: Path) -> None:
    raw = {f"w{n}": Raw("U8", (n,), raw_bytes("U8", (n,))) for n in range(1, 5)}
    ckpt = penstock.open(write_raw(tmp_path / "x.safetensors", raw))
    wrong: list[Any] = []
    end = time.monotonic() + 1

    def load(n: int) -> None:
        while time.monotonic() < end:
            ckpt.load([f"w{n}"])
            if ckpt.stats is None or ckpt.stats.bytes != n:
                wrong.append(n)

    threads = [threading.Thread(target=load, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert ckpt.stats is not None, "a thread that has loaded nothing sees the last of any"


# Models built without memory


def test_parameters_stay_tied_however_they_were_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            w = nn.Parameter(torch.randn(10, 4))
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.embed.weight = w
            self.head.weight = w
            p = nn.Parameter(torch.zeros(3))
            self.list = nn.ParameterList([p, p])
            self.dict = nn.ParameterDict({"p": p})
            b = torch.arange(4.0)
            self.register_buffer("one", b)
            self.register_buffer("two", b, persistent=False)

    eager = Tied()
    state = {"embed.weight": eager.embed.weight.detach(), "list.0": torch.ones(3), "one": torch.ones(4)}
    path = tmp_path / "m.safetensors"
    penstock.save_file(state, path)
    made = penstock.load_model(Tied, path)
    assert made.embed.weight is made.head.weight
    assert made.list[0] is made.list[1]
    assert made.list[0] is made.dict["p"]
    assert made.one is made.two
    assert torch.equal(made.head.weight, eager.embed.weight)
    assert torch.equal(made.two, torch.ones(4))


def test_no_init_holds_no_memory_of_parameters_that_are_gone() -> None:
    import weakref

    from penstock.model import no_init

    with no_init():
        module = nn.Module()
        real = nn.Parameter(torch.zeros(5))
        gone = weakref.ref(real.untyped_storage())
        module.weight = real
        del real
        gc.collect()
        assert gone() is None
        assert module.weight.is_meta


def test_a_parameter_that_a_hook_leaves_out_is_named(tmp_path: Path) -> None:
    class Hidden(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self._register_state_dict_hook(self._leave_out)

        @staticmethod
        def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            del state[prefix + "bias"]

    path = tmp_path / "m.safetensors"
    penstock.save_file({"weight": torch.ones(2, 2)}, path)
    with pytest.raises(penstock.DestinationError, match="'bias': a hook of the module") as raised:
        penstock.load_model(Hidden, path)
    assert raised.value.tensor == "bias"
    made = penstock.load_model(Hidden, path, strict=False)
    assert not made.bias.is_meta
    existing = Hidden()
    bias = existing.bias.detach().clone()
    penstock.open(path).load_into(existing)
    assert torch.equal(existing.bias, bias)
