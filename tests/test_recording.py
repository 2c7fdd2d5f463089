"""Lazy tensors: whatever loading code does with them, memory ends up as with ordinary tensors, and less is read."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from conftest import Raw, as_bytes, raw_bytes, write_raw

torch = pytest.importorskip("torch")

from penstock.recording import Recorder
from penstock.recording.geometry import View, packed_strides, reading
from penstock.recording.sources import DeferredOp
from penstock.strides import Strided, are_disjoint

Loads = Callable[[dict[str, Any], Iterator[tuple[str, Any]]], None]
"""A model's loading code: fills the memory of its first argument from the pairs of its second."""

SHAPES = {"a": (24, 36), "b": (8, 6, 10), "norm": (36,), "scalar": (), "experts": (4, 12, 8), "unused": (100, 100)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> penstock.Checkpoint:
    tensors = {n: Raw("F32", s, raw_bytes("F32", s, i)) for i, (n, s) in enumerate(SHAPES.items())}
    tensors["half"] = Raw("BF16", (16, 16), raw_bytes("BF16", (16, 16), 9))
    tensors["bytes"] = Raw("U8", (16, 16), raw_bytes("U8", (16, 16), 10))
    return penstock.open(write_raw(tmp_path / "x.safetensors", tensors))


def compare(checkpoint: penstock.Checkpoint, memory: dict[str, Any], loads: Loads) -> Any:
    """Runs loading code with ordinary tensors and with lazy ones; the memory must be the same, bit by bit."""
    ordinary = {name: tensor.clone() for name, tensor in memory.items()}
    loads(ordinary, iter(sorted(checkpoint.load().items())))
    with Recorder() as recorder, torch.no_grad():
        loads(memory, recorder.weights(checkpoint, sorted(checkpoint)))
    for name, tensor in memory.items():
        assert as_bytes(tensor) == as_bytes(ordinary[name]), name
    return recorder.statistics


def test_a_shard_is_read_straight_into_its_parameters_and_nothing_else_is_read(checkpoint: penstock.Checkpoint) -> None:
    def loads(memory: dict[str, Any], weights: Iterator[tuple[str, Any]]) -> None:
        for name, weight in weights:
            if name == "a":
                memory["rows"].data.copy_(weight.narrow(0, 12, 12))
                memory["columns"].copy_(weight.chunk(2, dim=1)[1])
            elif name == "norm":
                memory["fused"].narrow(0, 36, 36).copy_(weight)
            elif name == "experts":
                memory["experts"][1].copy_(weight[3, 4:8])

    sizes = {"rows": (12, 36), "columns": (24, 18), "fused": (72,), "experts": (2, 4, 8)}
    memory = {name: torch.zeros(shape) for name, shape in sizes.items()}
    statistics = compare(checkpoint, memory, loads)
    assert (statistics.in_place, statistics.converted, statistics.eager, statistics.plans) == (4, 0, {}, 1)
    assert statistics.bytes == 4 * (12 * 36 + 24 * 18 + 36 + 4 * 8)
    assert statistics.available_bytes == checkpoint.nbytes


def test_what_cannot_be_read_in_place_is_converted_from_its_part_alone(checkpoint: penstock.Checkpoint) -> None:
    def loads(memory: dict[str, Any], weights: Iterator[tuple[str, Any]]) -> None:
        for name, weight in weights:
            if name == "a":
                memory["transposed"].copy_(weight[:, :10].t())
                memory["strided"][:, 3:9].copy_(weight[:, 30:])
                memory["half"].copy_(weight[4:8])
                memory["cast"].copy_(weight[:2].to(torch.float16).to(torch.bfloat16).view(36, 2))
            elif name == "norm":
                memory["broadcast"].copy_(weight)
                memory["packed"].copy_(weight.view(6, 6).t().contiguous().view(4, 9)[1:3])
            elif name == "scalar":
                memory["scalars"][2] = weight
            elif name == "bytes":
                memory["fp8"].copy_(weight.view(torch.float8_e4m3fn)[:8])

    memory = {
        "transposed": torch.zeros(10, 24),
        "strided": torch.zeros(24, 12),
        "half": torch.zeros(4, 36, dtype=torch.bfloat16),
        "cast": torch.zeros(36, 2),
        "broadcast": torch.zeros(5, 36),
        "packed": torch.zeros(2, 9),
        "scalars": torch.zeros(4),
        "fp8": torch.zeros(8, 16, dtype=torch.float8_e4m3fn),
    }
    statistics = compare(checkpoint, memory, loads)
    assert (statistics.in_place, statistics.converted) == (2, 6), "the scalar and the bytes go as they are"
    assert statistics.eager == {}
    assert statistics.bytes < 4 * (24 * 10 + 24 * 6 + 6 * 36 + 2 * 36 + 1) + 8 * 16 + 1


@pytest.mark.parametrize(("small", "plans"), [(8, 2), (1 << 18, 0)], ids=["large", "small"])
def test_reading_what_is_still_to_be_read_makes_it_be_read_first(
    checkpoint: penstock.Checkpoint, monkeypatch: pytest.MonkeyPatch, small: int, plans: int
) -> None:
    monkeypatch.setattr("penstock.recording.eager_reader.SMALL_BYTES", small)

    def loads(memory: dict[str, Any], weights: Iterator[tuple[str, Any]]) -> None:
        for name, weight in weights:
            if name == "a":
                memory["w"].copy_(weight)
            elif name == "b":
                memory["w"].copy_(torch.exp(-memory["w"].clamp(-3, 3)))
            elif name == "norm":
                memory["norm"][:36].copy_(weight)
                memory["norm"][36:].fill_(7)
            elif name == "scalar":
                memory["array"].copy_(torch.from_numpy(memory["norm"].numpy() * 2))

    memory = {"w": torch.zeros(24, 36), "norm": torch.zeros(40), "array": torch.zeros(40)}
    assert compare(checkpoint, memory, loads).plans == plans


@pytest.mark.parametrize(("small", "plans"), [(8, 3), (1 << 18, 1)], ids=["large", "small"])
def test_the_last_of_two_copies_to_one_place_wins(
    checkpoint: penstock.Checkpoint, monkeypatch: pytest.MonkeyPatch, small: int, plans: int
) -> None:
    monkeypatch.setattr("penstock.recording.eager_reader.SMALL_BYTES", small)

    def loads(memory: dict[str, Any], weights: Iterator[tuple[str, Any]]) -> None:
        for name, weight in weights:
            if name == "a":
                memory["w"].copy_(weight)
                memory["w"][2:4].copy_(weight[10:12])
                memory["w"].view(-1)[60:96].copy_(weight[20])

    assert compare(checkpoint, {"w": torch.zeros(24, 36)}, loads).plans == plans


def test_what_is_written_again_in_the_same_place_is_not_read_for_the_first(checkpoint: penstock.Checkpoint) -> None:
    def loads(memory: dict[str, Any], weights: Iterator[tuple[str, Any]]) -> None:
        for name, weight in weights:
            if name == "a":
                for part in weight.split(8):
                    memory["rows"].copy_(part)  # straight there, and then replaced
                memory["columns"].copy_(weight[:8].double())
                memory["columns"].copy_(weight[8:16])
                memory["columns"].copy_(weight[16:24].double())

    memory = {"rows": torch.zeros(8, 36), "columns": torch.zeros(8, 36, dtype=torch.float64)}
    statistics = compare(checkpoint, memory, loads)
    assert (statistics.plans, statistics.in_place, statistics.converted) == (1, 1, 1)
    assert statistics.bytes == 8 * 36 * 4 * 2


def test_columns_of_one_matrix_do_not_hinder_each_other(checkpoint: penstock.Checkpoint) -> None:
    def loads(memory: dict[str, Any], weights: Iterator[tuple[str, Any]]) -> None:
        for name, weight in weights:
            if name == "a":
                for index, part in enumerate(weight.split(12, dim=1)):
                    memory["fused"].narrow(1, 12 * (2 - index), 12).copy_(part)

    statistics = compare(checkpoint, {"fused": torch.zeros(24, 36)}, loads)
    assert (statistics.plans, statistics.converted) == (1, 3)


def test_what_is_not_understood_is_done_with_real_tensors_and_named(checkpoint: penstock.Checkpoint) -> None:
    def loads(memory: dict[str, Any], weights: Iterator[tuple[str, Any]]) -> None:
        kept = {}
        for name, weight in weights:
            kept[name] = weight
            if name == "norm":
                memory["sum"].copy_(torch.cat([weight, kept["a"][0]]))
                memory["sum"][0] = weight.max().item()
                memory["sum"][1:3] = weight[weight > 0][:2]
                if weight.abs().sum() > 0:
                    memory["flag"].fill_(1)

    statistics = compare(checkpoint, {"sum": torch.zeros(72), "flag": torch.zeros(1)}, loads)
    assert statistics.eager == {"norm": "cat", "a": "cat"}


def test_what_is_worked_out_of_one_weight_is_worked_out_when_that_is_read(checkpoint: penstock.Checkpoint) -> None:
    order, padding = torch.tensor([3, 1, 1, 0]), torch.zeros(2, 36)

    def loads(memory: dict[str, Any], weights: Iterator[tuple[str, Any]]) -> None:
        for name, weight in weights:
            if name == "a":
                memory["decay"].copy_(-torch.exp(weight.float() * 0.01)[4:8])
                memory["fused"].copy_(torch.cat([weight[12:], weight[:12]], dim=0)[6:18].t())
                memory["woven"].copy_(torch.stack([weight[0::2], weight[1::2]], dim=1).reshape(24, 36)[::2])
                memory["padded"].copy_(torch.cat([weight[20:], padding]))
                padding.fill_(5)  # after it was used
                padding.zero_()
                memory["chosen"].copy_(weight[order])
                memory["repeated"].copy_((1 + weight[:2]).repeat_interleave(2, dim=0).to(torch.bfloat16))
            elif name == "b":
                memory["heads"].copy_(weight.transpose(0, 1).reshape(6, 80))
                memory["transposed"].copy_(torch.exp(weight.permute(2, 0, 1).clone() * 0.001)[3:5])
                memory["local"].copy_(weight.transpose(1, 2)[[5, 6, 4]])
                for row, rest in enumerate(weight):
                    memory["rows"][row].copy_(rest)
            elif name == "half":
                memory["none"].copy_(torch.zeros_like(weight[:2]).to(torch.float32))

    sizes = {
        "decay": (4, 36), "fused": (36, 12), "woven": (12, 36), "padded": (6, 36), "chosen": (4, 36), "heads": (6, 80),
        "rows": (8, 6, 10), "transposed": (2, 8, 6), "local": (3, 10, 6),
    }  # fmt: skip
    memory = {name: torch.zeros(shape) for name, shape in sizes.items()}
    memory["repeated"] = torch.zeros(4, 36, dtype=torch.bfloat16)
    memory["none"] = torch.ones(2, 16)
    statistics = compare(checkpoint, memory, loads)
    assert (statistics.eager, statistics.plans, statistics.fallback) == ({}, 1, 0)


def test_of_rows_that_are_chosen_by_number_no_others_are_read(tmp_path: Path) -> None:
    experts = Raw("F32", (64, 32, 48), raw_bytes("F32", (64, 32, 48), 0))
    checkpoint = penstock.open(write_raw(tmp_path / "x.safetensors", {"experts": experts}))
    memory = torch.zeros(32, 48, 32)
    with Recorder() as recorder:
        for _, weight in recorder.weights(checkpoint):
            memory.copy_(weight.transpose(1, 2)[torch.arange(32, 64)])
    assert as_bytes(memory) == as_bytes(checkpoint.load()["experts"].transpose(1, 2)[32:])
    assert (recorder.statistics.eager, recorder.statistics.bytes) == ({}, checkpoint.nbytes // 2)


def test_a_value_whose_parts_go_to_many_places_is_read_and_worked_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = Raw("F32", (64, 32, 48), raw_bytes("F32", (64, 32, 48), 0))
    checkpoint = penstock.open(write_raw(tmp_path / "x.safetensors", {"experts": experts}))
    made = []
    of_values = DeferredOp.of_values

    def counting(self: Any, values: Any) -> Any:
        made.extend([] if values[0].is_meta else [self.func])
        return of_values(self, values)

    monkeypatch.setattr(DeferredOp, "of_values", counting)
    memory = torch.zeros(64, 24, 32)
    with Recorder() as recorder:
        for _, weight in recorder.weights(checkpoint):
            turned = weight.transpose(1, 2).contiguous()
            for expert in (*range(64), 0):  # the first once more
                memory[expert].copy_(turned[expert, 24:])
    assert as_bytes(memory) == as_bytes(checkpoint.load()["experts"].transpose(1, 2)[:, 24:])
    assert (len(made), recorder.statistics.converted, recorder.statistics.plans) == (1, 64, 1)
    assert recorder.statistics.bytes == checkpoint.nbytes


def test_a_result_may_be_written_to_by_who_made_it_unless_there_are_views_of_it(
    checkpoint: penstock.Checkpoint,
) -> None:
    def loads(memory: dict[str, Any], weights: Iterator[tuple[str, Any]]) -> None:
        for name, weight in weights:
            if name == "a":
                more = weight + 1
                memory["before"].copy_(more)
                more.mul_(2)
                more[3] = 7
                memory["after"].copy_(more)
            elif name == "norm":
                memory["norm"][0].copy_(weight)
                weight.add_(1)
                memory["norm"][1].copy_(weight)
            elif name == "b":
                for copy in (weight.clone(), weight.to(torch.float64)):
                    copy.add_(1)
                    memory["b"].copy_(weight)
                    memory["b more"].copy_(copy)
            elif name == "experts":
                # Of what only the first rank adds, the others make zeros.
                weight.zero_()
                memory["experts"].copy_(weight.narrow(1, 0, 6))

    sizes = {"before": (24, 36), "after": (24, 36), "norm": (2, 36), "experts": (4, 6, 8)}
    sizes |= {"b": SHAPES["b"], "b more": SHAPES["b"]}
    statistics = compare(checkpoint, {name: torch.ones(size) for name, size in sizes.items()}, loads)
    assert statistics.eager == {"a": "mul_", "norm": "add_", "b": "add_"}, "what is overwritten is not read"


@pytest.mark.parametrize("size", [64, 1000], ids=["small", "large"])
def test_code_that_works_on_a_parameter_once_it_is_copied_makes_no_plan_for_each_that_is_small(
    tmp_path: Path, size: int
) -> None:
    tensors = {f"{i:02}": Raw("F32", (size, size), raw_bytes("F32", (size, size), i)) for i in range(8)}
    checkpoint = penstock.open(write_raw(tmp_path / "x.safetensors", tensors))
    parameters = {f"{i:02}": torch.zeros(size, size) for i in range(8)}

    def loads(memory: dict[str, Any], weights: Iterator[tuple[str, Any]]) -> None:
        for name, weight in weights:
            memory[name].copy_(weight)
            memory[name].copy_(memory[name].abs())

    statistics = compare(checkpoint, parameters, loads)
    if size == 64:
        assert (statistics.plans, len(statistics.eager), len(statistics.loads)) == (0, 8, 1)
    else:
        assert (statistics.plans, statistics.eager) == (8, {})


def test_what_is_written_to_a_weight_is_seen_by_all_its_views(checkpoint: penstock.Checkpoint) -> None:
    def aliases(weight: Any) -> None:
        torch.as_strided(weight, (3,), (1,)).zero_()

    for write in (lambda w: w.mul_(2), lambda w: w.__setitem__(0, 1.0), lambda w: torch.exp(w, out=w), aliases):

        def loads(memory: dict[str, Any], weights: Iterator[tuple[str, Any]], write: Any = write) -> None:
            kept = dict(weights)
            weight = kept["norm"]
            before, more = weight[:4], weight + 1
            memory["first"].copy_(weight)
            write(weight)
            memory["again"].copy_(weight)
            memory["view"].copy_(before)
            memory["more"].copy_(more)

        memory = {"first": torch.zeros(36), "again": torch.zeros(36), "view": torch.zeros(4), "more": torch.zeros(36)}
        compare(checkpoint, memory, loads)


def test_a_view_that_was_made_before_its_weight_was_written_to_sees_it(checkpoint: penstock.Checkpoint) -> None:
    def loads(memory: dict[str, Any], weights: Iterator[tuple[str, Any]]) -> None:
        kept = dict(weights)
        view = kept["norm"][:4]
        kept["norm"].max()
        kept["norm"][:2].mul_(2)
        memory["view"].copy_(view)

    compare(checkpoint, {"view": torch.zeros(4)}, loads)


def test_parameters_are_destinations_like_any_tensor(checkpoint: penstock.Checkpoint) -> None:
    class Special(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    parameters = [torch.nn.Parameter(torch.zeros(24, 36)), Special(torch.zeros(24, 36), requires_grad=False)]
    with Recorder() as recorder:
        for name, weight in recorder.weights(checkpoint):
            if name == "a":
                parameters[0].data.copy_(weight)
                parameters[1].data.copy_(weight)
    wanted = as_bytes(checkpoint.load(["a"])["a"])
    assert all(as_bytes(parameter) == wanted for parameter in parameters)
    assert recorder.statistics.in_place == 2


def test_a_model_that_needs_every_tensor_at_once_gets_ordinary_ones(tmp_path: Path) -> None:
    tensors = {f"w{i:02}": Raw("F32", (300, 300), raw_bytes("F32", (300, 300), i)) for i in range(30)}
    checkpoint = penstock.open(write_raw(tmp_path / "x.safetensors", tensors))
    memory = {name: torch.zeros(300, 300) for name in tensors}
    with Recorder() as recorder:
        for name, weight in recorder.weights(checkpoint):
            memory[name].copy_(torch.atleast_2d(weight))
    assert {name: as_bytes(tensor) for name, tensor in memory.items()} == {n: r.data for n, r in tensors.items()}
    assert (len(recorder.statistics.eager), recorder.statistics.fallback) == (16, 14)
    assert "eager" in recorder.statistics.all_notes()[0]


def test_small_tensors_that_are_needed_at_once_are_read_together(tmp_path: Path) -> None:
    tensors = {f"s{i:03}": Raw("F32", (), raw_bytes("F32", (), i)) for i in range(300)}
    checkpoint = penstock.open(write_raw(tmp_path / "x.safetensors", tensors))
    with Recorder() as recorder:
        values = {name: weight.item() for name, weight in recorder.weights(checkpoint)}
    assert torch.tensor(list(values.values())).numpy().tobytes() == b"".join(tensors[n].data for n in values)
    assert len(recorder.statistics.loads) == 1


def test_scales_that_are_compared_with_those_of_other_tensors_are_read_together_and_make_no_plans(
    tmp_path: Path,
) -> None:
    """Experts in FP8: what is left of one tensor is looked at when the next arrives, large ones in between."""
    tensors: dict[str, Raw] = {}
    for expert in range(12):
        for part in ("w1", "w2", "w3"):
            scale = Raw("F32", (), raw_bytes("F32", (), 5))
            weight = Raw("F32", (640, 1000), raw_bytes("F32", (640, 1000), expert))
            tensors |= {f"experts.{expert:02}.{part}.scale": scale, f"experts.{expert:02}.{part}.weight": weight}
    checkpoint = penstock.open(write_raw(tmp_path / "x.safetensors", tensors))

    def loads(memory: dict[str, Any], weights: Iterator[tuple[str, Any]]) -> None:
        for name, weight in weights:
            _, number, part, what = name.split(".")
            if what == "weight":
                memory["weights"][int(number)].copy_(weight)
            elif part != "w2":
                scale = memory["scales"][int(number)]
                if part == "w3" and (scale - weight).abs() > 1e-5:
                    raise ValueError("scales differ")
                scale.copy_(weight)

    memory = {"weights": torch.zeros(12, 640, 1000), "scales": torch.ones(12)}
    statistics = compare(checkpoint, memory, loads)
    assert statistics.plans == 1
    assert len(statistics.loads) <= 4, "each kind once, and the plan"


def test_a_lazy_tensor_outlives_its_recorder(checkpoint: penstock.Checkpoint) -> None:
    with Recorder() as recorder:
        kept = dict(recorder.weights(checkpoint))
    memory = torch.zeros(24, 36)
    memory.copy_(kept["a"])
    assert as_bytes(memory) == as_bytes(checkpoint.load(["a"])["a"])


# Views as numbers

VIEWS: list[Callable[[Any, random.Random], Any]] = [
    lambda t, r: t.narrow(d := r.randrange(t.dim()), s := r.randrange(t.shape[d]), r.randint(1, t.shape[d] - s)),
    lambda t, r: t.transpose(r.randrange(t.dim()), r.randrange(t.dim())),
    lambda t, r: t.select(r.randrange(t.dim()), 0) if t.dim() > 1 else t,
    lambda t, r: t.unsqueeze(r.randint(0, t.dim())),
    lambda t, r: t[(slice(r.randrange(2), None, r.randint(1, 3)),)],
    lambda t, r: t.flatten() if t.is_contiguous() else t,
    lambda t, r: t.unflatten(0, (2, -1)) if t.shape[0] % 2 == 0 else t,
    lambda t, r: t.chunk(2, dim=r.randrange(t.dim()))[-1],
    lambda t, r: t.expand(3, *t.shape),
]


@settings(max_examples=400, deadline=None)
@given(shape=st.lists(st.integers(1, 7), min_size=1, max_size=4), seed=st.integers(0, 2**32), steps=st.integers(0, 6))
def test_what_is_read_for_a_view_makes_the_view(shape: list[int], seed: int, steps: int) -> None:
    chance = random.Random(seed)
    stored = torch.arange(torch.Size(shape).numel()).reshape(shape)
    view = stored
    for _ in range(steps):
        if view.numel():
            view = chance.choice(VIEWS)(view, chance)
    found = reading(shape, View(tuple(view.shape), view.stride(), int(view.storage_offset())))
    box = stored[tuple(slice(*item) for item in found.ranges)].clone(memory_format=torch.contiguous_format)
    made = torch.as_strided(box, found.view.sizes, found.view.strides, found.view.offset)
    assert torch.equal(made, view)


STEPS: list[Callable[[Any, random.Random], Any]] = [
    *VIEWS,
    lambda t, _: -t + 3,
    lambda t, r: t.contiguous().roll(r.randrange(5), dims=0),
    lambda t, _: t.reshape(-1),
    lambda t, r: torch.cat([t.narrow(0, s := r.randrange(t.shape[0]), t.shape[0] - s), t.narrow(0, 0, s)]),
    lambda t, r: torch.stack([t, t.flip(0)], dim=r.randrange(t.dim())),
    lambda t, r: t[torch.tensor([r.randrange(t.shape[0]) for _ in range(3)])],
    lambda t, r: t[[r.randrange(t.shape[0]) for _ in range(2)]],
    lambda t, _: t.clone() * 3,
    lambda t, _: t.to(torch.int16).to(torch.int32),
    lambda t, _: t.contiguous().view(torch.int16) if t.stride(-1) == 1 else t,
    lambda t, _: t.contiguous().to(torch.int32),
]


@settings(max_examples=200, deadline=None)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3), seed=st.integers(0, 2**32), steps=st.integers(0, 7))
def test_whatever_is_worked_out_of_a_weight_is_what_torch_makes_of_it(shape: list[int], seed: int, steps: int) -> None:
    raw = Raw("I32", tuple(shape), raw_bytes("I32", tuple(shape), seed % 100))
    with tempfile.TemporaryDirectory() as home:
        checkpoint = penstock.open(write_raw(Path(home) / "x.safetensors", {"w": raw}))
        made = []
        for lazily in (False, True):
            chance = random.Random(seed)
            with Recorder() as recorder:
                value = dict(recorder.weights(checkpoint))["w"] if lazily else checkpoint.load()["w"]
                for _ in range(steps):
                    step = chance.choice(STEPS)
                    if value.numel() and value.dim():
                        value = step(value, chance)
                places = [torch.zeros(value.shape, dtype=value.dtype)]
                places[0].copy_(value)
                if value.dim():
                    places += [torch.zeros(row.shape, dtype=row.dtype) for row in value]
                    for place, row in zip(places[1:], value, strict=True):
                        place.copy_(row)
            made.append(places)
        assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


@settings(max_examples=400, deadline=None)
@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), seed=st.integers(0, 2**32))
def test_views_that_are_called_disjoint_share_nothing(shape: list[int], seed: int) -> None:
    chance = random.Random(seed)
    stored = torch.arange(torch.Size(shape).numel()).reshape(shape)
    views = []
    for _ in range(2):
        view = stored
        for _ in range(3):
            view = chance.choice(VIEWS[:5])(view, chance) if view.numel() else view
        views.append(view)
    if all(view.numel() for view in views):
        one, other = (
            Strided(8 * v.storage_offset(), tuple(v.shape), [8 * stride for stride in v.stride()], 8) for v in views
        )
        shared = set(views[0].flatten().tolist()) & set(views[1].flatten().tolist())
        assert are_disjoint(one, other) == (not shared)


def test_halves_of_a_matrix_are_known_to_be_disjoint() -> None:
    strides = packed_strides((10, 8))
    left, right = Strided(0, (10, 4), strides, 1), Strided(4, (10, 4), strides, 1)
    assert are_disjoint(left, right)
    assert not are_disjoint(left, Strided(3, (10, 5), strides, 1))
    assert not are_disjoint(left, Strided(3, (4, 10), (1, 8), 1))


def test_code_that_takes_an_address_behind_torchs_back_gets_an_error_and_no_crash(
    checkpoint: penstock.Checkpoint,
) -> None:
    with Recorder() as recorder, torch.no_grad():
        weights = dict(recorder.weights(checkpoint, ["a", "norm"]))
        # As a module has it that imported the function by name before.
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch._C._to_dlpack(weights["a"])
        part = weights["a"][1:3]
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch._C._to_dlpack(part)
        # What is recorded of it besides is as ever, and so is what torch sees.
        memory = torch.zeros(2, 36)
        memory.copy_(part)
        seen = torch.from_dlpack(torch.utils.dlpack.to_dlpack(weights["norm"])).clone()
    whole = checkpoint.load(["a", "norm"])
    assert as_bytes(memory) == as_bytes(whole["a"][1:3].contiguous())
    assert as_bytes(seen) == as_bytes(whole["norm"])


def test_what_is_computed_of_a_weight_that_requires_grad_leads_back_to_it(checkpoint: penstock.Checkpoint) -> None:
    def gradients(weights: dict[str, Any]) -> list[Any]:
        weight, other = weights["a"].requires_grad_(True), torch.nn.Parameter(weights["norm"])
        copied = torch.zeros(48, 36)
        copied.copy_(torch.cat([weight, torch.exp(weight * 1e-3)]))
        part = weight.narrow(0, 2, 4).t().contiguous()
        made = [copied, part, weight.float() * other]
        sum(one.double().nansum() for one in made).backward()
        return [*made, weight.grad, other.grad]

    wanted = gradients(checkpoint.load(["a", "norm"]))
    with Recorder() as recorder:
        found = gradients(dict(recorder.weights(checkpoint, ["a", "norm"])))
    assert all(one.grad_fn is not None for one in wanted[:3])
    for ours, theirs in zip(found, wanted, strict=True):
        assert type(ours.grad_fn) is type(theirs.grad_fn)
        assert ours.requires_grad == theirs.requires_grad
        assert as_bytes(ours.detach()) == as_bytes(theirs.detach())
