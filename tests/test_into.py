"""Filling existing tensors and models in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import penstock
from conftest import Raw, as_bytes, assert_bits, drop_cache, raw_bytes, write_raw

torch = pytest.importorskip("torch")
nn = torch.nn


def zeros(tensors: dict[str, Raw]) -> dict[str, torch.Tensor]:
    from penstock.frameworks.torch import dtype_of

    return {name: torch.zeros(raw.shape, dtype=dtype_of(raw.dtype)) for name, raw in tensors.items()}


@pytest.mark.parametrize("cache", ["auto", "bypass"])
@pytest.mark.parametrize("block_bytes", [4096, 2 << 20])
def test_a_mapping_is_filled_in_place(mixed, cache: str, block_bytes: int) -> None:
    path, tensors = mixed
    drop_cache(path)
    destinations = zeros(tensors)
    addresses = {name: tensor.data_ptr() for name, tensor in destinations.items()}
    keys = penstock.open(path, options=penstock.LoadOptions(cache=cache, block_bytes=block_bytes)).load_into(
        destinations
    )
    assert keys == ([], [])
    assert_bits(destinations, tensors)
    assert addresses == {name: tensor.data_ptr() for name, tensor in destinations.items()}


def test_numpy_arrays_are_filled_in_place(mixed) -> None:
    path, tensors = mixed
    names = [name for name, raw in tensors.items() if raw.dtype in {"F32", "I64"}]
    arrays = {n: np.zeros(tensors[n].shape, {"F32": "f4", "I64": "i8"}[tensors[n].dtype]) for n in names}
    penstock.open(path).load_into(arrays, names=names)
    assert all(arrays[name].tobytes() == tensors[name].data for name in names)


def test_destinations_at_any_address_are_filled_with_their_bytes_only(tmp_path: Path) -> None:
    tensors = {
        f"w{i}": Raw("U8", (n,), raw_bytes("U8", (n,), i)) for i, n in enumerate([1, 5000, 300_001, 4096, 70_000])
    }
    path = write_raw(tmp_path / "x.safetensors", tensors)
    for cache in ("use", "bypass"):
        memory = torch.full((1_000_000,), 255, dtype=torch.uint8)
        untouched = memory.clone()
        destinations, at = {}, 3
        for name, raw in tensors.items():
            destinations[name] = memory[at : at + len(raw.data)]
            untouched[at : at + len(raw.data)] = torch.frombuffer(bytearray(raw.data), dtype=torch.uint8)
            at += len(raw.data) + 17
        penstock.open(path, options=penstock.LoadOptions(cache=cache)).load_into(destinations)
        assert torch.equal(memory, untouched)


def freed() -> torch.Tensor:
    tensor = torch.zeros(2, 3)
    tensor.untyped_storage().resize_(0)
    return tensor


def wrapped() -> torch.Tensor:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.zeros(2, 3), torch.zeros(2, 3))


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(2, 3)


WRONG = {
    "shape": (lambda: torch.zeros(3, 2), "shape is .2, 3., the destination's .3, 2.. Build"),
    "dtype": (lambda: torch.zeros(2, 3, dtype=torch.int32), "no others are cut off. Load it with"),
    "expanded": (lambda: torch.zeros(3).expand(2, 3), "share memory"),
    "a wrapper subclass": (wrapped, r"TwoTensor, a tensor without memory of its own\. Load first"),
    "a fake tensor": (fake, "FakeTensor, a tensor without memory"),
    "a tensor of zeros without storage": (lambda: torch._efficientzerotensor(2, 3), "no memory"),
    "freed": (freed, "no memory"),
    "sparse": (lambda: torch.zeros(2, 3).to_sparse(), "not contiguous"),
    "meta": (lambda: torch.zeros(2, 3, device="meta"), "meta"),
    "no tensor": (lambda: [[0.0] * 3] * 2, "list"),
    "a quantised dtype": (lambda: torch.quantize_per_tensor(torch.zeros(2, 3), 1.0, 0, torch.qint8), "dtype"),
    "another framework": (lambda: np.zeros((2, 3), "f4"), "numpy|ndarray"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("case", WRONG)
def test_a_destination_that_does_not_fit_is_named_and_nothing_was_written(tmp_path: Path, case: str) -> None:
    make, words = WRONG[case]
    data = raw_bytes("F32", (2, 3))
    path = write_raw(tmp_path / "x.safetensors", {"good": Raw("F32", (2, 3), data), "w": Raw("F32", (2, 3), data)})
    good = torch.zeros(2, 3)
    with pytest.raises(penstock.DestinationError, match=words) as raised:
        penstock.open(path).load_into({"good": good, "w": make()})
    assert raised.value.tensor == "w"
    assert raised.value.location == str(path)
    assert not good.any()
    assert good._version == 0


def test_read_only_arrays_are_refused(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"w": Raw("F32", (2,), raw_bytes("F32", (2,)))})
    array = np.zeros(2, "f4")
    array.flags.writeable = False
    with pytest.raises(penstock.DestinationError, match="read-only") as raised:
        penstock.open(path).load_into({"w": array})
    assert "array.copy()" in (raised.value.remedy or "")
    with pytest.raises(penstock.DestinationError, match="neither"):
        penstock.open(path).load_into(42)


def test_an_optimizer_is_refused_with_what_is_accepted(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"w": Raw("F32", (2,), raw_bytes("F32", (2,)))})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    for given in (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), None, [torch.zeros(2)]):
        with pytest.raises(penstock.DestinationError, match=r"neither a torch\.nn\.Module nor a mapping") as raised:
            penstock.open(path).load_into(given)
        assert "Give the module, or a mapping" in (raised.value.remedy or "")
        assert type(given).__name__ in str(raised.value)


def test_a_device_without_memory_says_nothing_of_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"w": Raw("F16", (2,), raw_bytes("F16", (2,)))})
    full = True

    def empty(*arguments: object, **keywords: object) -> torch.Tensor:
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 bytes")
        return make(*arguments, **keywords)

    make = torch.empty
    from penstock.frameworks.torch import copy_refused

    copy_refused.cache_clear()
    destination = torch.zeros(2, dtype=torch.float64)
    monkeypatch.setattr(torch, "empty", empty)
    for _ in range(2):
        with pytest.raises(penstock.InsufficientMemoryError, match="Free memory"):
            penstock.open(path).load_into({"w": destination})
    full = False
    penstock.open(path).load_into({"w": destination})
    monkeypatch.undo()
    expected = torch.from_numpy(np.frombuffer(raw_bytes("F16", (2,)), "f2").astype("f8"))
    assert torch.equal(destination.isnan(), expected.isnan())
    assert torch.equal(destination.nan_to_num(), expected.nan_to_num())


def test_missing_and_unexpected_names_are_told_as_torch_does(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"a": Raw("U8", (1,), b"1"), "b": Raw("U8", (1,), b"2")})
    destinations = {"a": torch.zeros(1, dtype=torch.uint8), "c": torch.zeros(1)}
    with pytest.raises(penstock.TensorNotFoundError, match=r'Missing key.*"c".*\n.*Unexpected key.*"b"'):
        penstock.open(path).load_into(destinations)
    keys = penstock.open(path).load_into(destinations, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["c"], ["b"])
    assert destinations["a"].item() == ord("1")
    assert penstock.open(path).load_into(destinations, names=["a"]) == ([], [])


def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    shapes = {"a": (2,), "b": (3,), "c": (4,)}
    raws = {name: Raw("F32", shape, raw_bytes("F32", shape)) for name, shape in shapes.items()}
    path = write_raw(tmp_path / "x.safetensors", raws)
    destinations = {"a": torch.zeros(5), "b": torch.zeros(3, dtype=torch.float64), "c": torch.zeros(2, 2)}
    with pytest.raises(penstock.DestinationError) as raised:
        penstock.open(path).load_into(destinations, dtype_mismatch="error")
    error = raised.value
    assert (error.tensor, error.location, error.code) == ("a", str(path), "destination")
    for words in (
        "size mismatch for a: the checkpoint's shape is [2], the destination's [5].",
        "dtype mismatch for b: the checkpoint's dtype is F32, the destination's F64.",
        "size mismatch for c: the checkpoint's shape is [4], the destination's [2, 2].",
        "Build the destination with that shape",
        'dtype_mismatch="convert"',
    ):
        assert words in str(error)
    assert not any(tensor.any() for tensor in destinations.values())
    # Of one, as ever.
    with pytest.raises(
        penstock.DestinationError, match=r"x\.safetensors: tensor 'c': size mismatch: the check"
    ) as raised:
        penstock.open(path).load_into(destinations, names=["c"])
    assert raised.value.tensor == "c"


def test_missing_names_and_wrong_shapes_are_told_together(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"a": Raw("F32", (2,), raw_bytes("F32", (2,)))})
    destinations = {"a": torch.zeros(3), "b": torch.zeros(1)}
    with pytest.raises(
        penstock.TensorNotFoundError, match=r'Missing key.*"b".*\n\tsize mismatch for a: .*\[3\]'
    ) as raised:
        penstock.open(path).load_into(destinations)
    assert (raised.value.tensor, raised.value.code) == ("b", "tensor_not_found")
    with pytest.raises(penstock.DestinationError, match=r"tensor 'a': size mismatch"):
        penstock.open(path).load_into(destinations, strict=False)


def test_of_many_that_do_not_fit_the_first_ten_are_listed(tmp_path: Path) -> None:
    names = [f"w{at:02}" for at in range(25)]
    path = write_raw(tmp_path / "x.safetensors", {name: Raw("U8", (1,), b"1") for name in names})
    model = nn.Module()
    for name in names:
        model.register_buffer(name, torch.zeros(2, dtype=torch.uint8))
    for load in (
        lambda: penstock.open(path).load_into(model),
        lambda: penstock.load_model(lambda: model, path),
    ):
        with pytest.raises(penstock.DestinationError, match=r"and 15 more\.\n") as raised:
            load()
        assert str(raised.value).count("size mismatch for") == 10
        assert raised.value.tensor == "w00"


def test_a_class_is_no_destination(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"a": Raw("F32", (2,), raw_bytes("F32", (2,)))})
    with pytest.raises(penstock.DestinationError, match="the class Linear is neither"):
        penstock.open(path).load_into(nn.Linear)


class Tied(nn.Module):
    """What trips loaders: tied weights, buffers that no checkpoint holds, buffers that it does, a shared module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.shared = nn.Linear(16, 16)
        self.again = self.shared
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", torch.arange(16) * 0.5, persistent=False)
        self.scale = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.again(self.embed(ids)) + self.frequencies)) * self.scale.sum()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Tied]:
    torch.manual_seed(1)
    model = Tied().eval()
    with torch.no_grad():
        model.norm.running_mean.normal_()
    # As safetensors wants it: one name for tensors that share memory.
    seen: dict[int, str] = {}
    state = {name: t for name, t in model.state_dict().items() if seen.setdefault(t.data_ptr(), name) == name}
    penstock.save_file(state, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors", model


def test_a_module_is_filled_in_place_ties_and_all(saved) -> None:
    path, model = saved
    other = Tied().eval()
    weight = other.embed.weight
    assert penstock.open(path).load_into(other) == ([], [])
    assert other.embed.weight is weight
    assert other.head.weight is weight
    ids = torch.arange(12)
    assert torch.equal(other(ids), model(ids))


def test_a_model_is_built_without_initialisation_and_computes_the_same(saved) -> None:
    path, model = saved
    made = penstock.load_model(Tied, path).eval()
    assert made.head.weight is made.embed.weight
    assert made.again is made.shared
    assert torch.equal(made.frequencies, model.frequencies)
    assert not any(t.is_meta for t in [*made.parameters(), *made.buffers()])
    assert (made.scale.requires_grad, made.embed.weight.requires_grad) == (False, True)
    ids = torch.arange(12)
    assert torch.equal(made(ids), model(ids))
    made(ids).sum().backward()


def test_building_initialises_nothing() -> None:
    from penstock.model import no_init

    class Loud(nn.Linear):
        def reset_parameters(self) -> None:
            assert self.weight.is_meta
            super().reset_parameters()

    with no_init():
        assert Loud(4, 4).weight.is_meta
    assert not nn.Linear(4, 4).weight.is_meta


def test_the_checkpoints_dtype_wins_unless_another_is_asked_for(saved, tmp_path: Path) -> None:
    path, _ = saved
    half = {name: tensor.half() for name, tensor in penstock.load_file(path).items() if tensor.is_floating_point()}
    half["norm.num_batches_tracked"] = torch.tensor(3)
    penstock.save_file(half, tmp_path / "half.safetensors")
    made = penstock.load_model(Tied, tmp_path / "half.safetensors")
    assert (made.embed.weight.dtype, made.norm.num_batches_tracked.dtype) == (torch.float16, torch.int64)
    made = penstock.load_model(Tied, tmp_path / "half.safetensors", dtype=torch.bfloat16)
    assert (made.embed.weight.dtype, made.norm.num_batches_tracked.item()) == (torch.bfloat16, 3)


def test_a_model_that_does_not_fit_is_told_as_torch_does(saved, tmp_path: Path, caplog) -> None:
    path, _ = saved
    state = penstock.load_file(path)
    state["stray"] = torch.zeros(1)
    del state["shared.weight"], state["shared.bias"], state["scale"]
    penstock.save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(penstock.TensorNotFoundError) as raised:
        penstock.load_model(Tied, tmp_path / "other.safetensors")
    for name in ("shared.weight", "shared.bias", "scale", "stray"):
        assert name in str(raised.value)
    assert "head.weight" not in str(raised.value)  # tied to one that is there
    made = penstock.load_model(Tied, tmp_path / "other.safetensors", strict=False)
    assert made.again is made.shared
    assert made.shared.weight.any()
    assert not made.scale.any()
    assert "initialised by reset_parameters: shared.weight, shared.bias" in caplog.text


def test_a_model_of_another_shape_is_refused_before_anything_is_read(saved) -> None:
    path, _ = saved

    class Wide(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(4))

    with pytest.raises(penstock.DestinationError, match=r"\[3\].*\[4\]") as raised:
        penstock.load_model(Wide, path)
    assert raised.value.tensor == "scale"


def test_all_tensors_have_the_bits_of_the_file(saved) -> None:
    path, model = saved
    made = penstock.load_model(Tied, path)
    for name, tensor in made.state_dict().items():
        assert as_bytes(tensor) == as_bytes(model.state_dict()[name]), name


# ---- models built elsewhere


class Rotary(nn.Module):
    """A buffer that no checkpoint holds, as rotary embeddings have it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10 ** torch.arange(0, 1, 0.25), persistent=False)
        self.linear = nn.Linear(4, 4)


def test_what_a_module_keeps_besides_tensors_is_no_matter_of_the_checkpoint(tmp_path: Path) -> None:
    class Counts(torch.nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: object) -> None:
            raise AssertionError

    made = Counts(2, 3)
    assert "_extra_state" in made.state_dict()
    path = tmp_path / "x.safetensors"
    penstock.save_file({"weight": made.weight.detach(), "bias": made.bias.detach()}, path)
    built = penstock.load_model(lambda: Counts(2, 3), path)
    filled = Counts(2, 3)
    assert penstock.open(path).load_into(filled) == ([], [])
    for other in (built, filled):
        assert torch.equal(other.weight, made.weight)
        assert torch.equal(other.bias, made.bias)


def test_a_lazy_module_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    penstock.save_file({"0.weight": torch.ones(3, 4), "0.bias": torch.ones(3)}, path)

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.LazyLinear(3))

    for load in (lambda: penstock.load_model(build, path), lambda: penstock.open(path).load_into(build())):
        with pytest.raises(penstock.DestinationError, match=r"'0\.weight': it has no shape .* Build the module with"):
            load()


def test_buffers_without_memory_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    penstock.save_file(Rotary().state_dict(), tmp_path / "m.safetensors")

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Rotary()

    with pytest.raises(penstock.DestinationError, match=r"inv_freq.*without torch\.device") as raised:
        penstock.load_model(on_meta, tmp_path / "m.safetensors")
    assert raised.value.tensor == "inv_freq"
    made = penstock.load_model(Rotary, tmp_path / "m.safetensors")
    assert torch.equal(made.inv_freq, Rotary().inv_freq)


def test_a_model_that_accelerate_built_empty_gets_its_tensors(saved) -> None:
    accelerate = pytest.importorskip("accelerate")
    path, model = saved
    with accelerate.init_empty_weights():
        empty = Tied()
    # accelerate unties what it empties: who uses it ties again (transformers: model.tie_weights()).
    with pytest.raises(penstock.TensorNotFoundError, match=r"head\.weight"):
        penstock.load_model(lambda: empty, path)
    empty.head.weight = empty.embed.weight
    made = penstock.load_model(lambda: empty, path).eval()
    assert made is empty
    assert made.head.weight is made.embed.weight
    ids = torch.arange(12)
    assert torch.equal(made(ids), model(ids))
    assert torch.equal(made.frequencies, model.frequencies)


def test_threads_that_build_at_once_do_not_disturb_each_other(saved) -> None:
    import threading

    path, _ = saved
    register = nn.Module.register_parameter
    wrong: list[str] = []

    def load() -> None:
        for _ in range(10):
            wrong.extend("loaded" for p in penstock.load_model(Tied, path).parameters() if p.is_meta)

    def build() -> None:
        for _ in range(30):
            wrong.extend("built" for p in nn.Linear(3, 3).parameters() if p.is_meta)

    threads = [threading.Thread(target=act) for act in (load, build, load, build, load)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert nn.Module.register_parameter is register
