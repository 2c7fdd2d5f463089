"""Components of a pool whose linear layers have float8 weights: converted while they are loaded, shared, written."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

import penstock
from penstock.errors import ConfigError, DestinationError, TensorNotFoundError
from penstock.fp8 import Float8Linear, Fp8, convert, save
from penstock.pool import ModelPool
from pool_books import check_books

WIDTH = 256


class Net(torch.nn.Module):
    """Two linear layers, of which one has a bias, a norm, and a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.second = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("factor", torch.full((64,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))) * self.factor[0].to(x.dtype)


SMALL = 4 * 512 + 256
"""Bytes of what is not converted: biases and norms of bfloat16, and the buffer."""
PLAIN = 2 * 2 * WIDTH**2 + 3 * 512 + 256
FLOAT8 = 2 * WIDTH**2 + 3 * 512 + 2 * 4 * WIDTH + 256


def saved(path: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: torch.Tensor) -> Path:
    torch.manual_seed(seed)
    tensors = {name: tensor.to(dtype) for name, tensor in Net().state_dict().items()}
    safetensors_torch.save_file(tensors | changes, path)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return saved(tmp_path / "net.safetensors")


@pytest.fixture
def pool() -> Iterator[ModelPool]:
    with ModelPool("cpu", host_budget=1 << 24, device_budget=1 << 24) as made:
        yield made
        check_books(made)


def add(pool: ModelPool, name: str, file: Path, **settings: object) -> None:
    pool.register(name, {"net": file}, build={"net": Net}, **{"quantize": "fp8"} | settings)


X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).bfloat16()


def answer(module: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return module(X).clone()


def used(pool: ModelPool, name: str) -> torch.Tensor:
    with pool.use(name) as lease:
        return answer(*lease.values())


def expected(file: Path, quantize: object = "fp8", dtype: torch.dtype | None = None) -> torch.Tensor:
    """Of a module that is loaded, and converted then."""
    module = penstock.load_model(Net, file)
    module = module if dtype is None else module.to(dtype)
    module.factor = Net().factor
    convert(module, quantize)
    return answer(module)


@pytest.mark.parametrize("to", ["host", "device"])
@pytest.mark.parametrize("quantize", ["fp8", Fp8("tensor"), Fp8(compute="fp8"), Fp8(skip=("second",))])
def test_a_registered_model_computes_what_a_loaded_and_converted_one_does(
    pool: ModelPool, file: Path, to: str, quantize: object
) -> None:
    add(pool, "a", file, quantize={"net": quantize})
    pool.prefetch("a", to=to).result()
    assert torch.equal(used(pool, "a"), expected(file, quantize))


def test_masters_and_copies_have_half_the_bytes_and_nothing_is_converted_again(pool: ModelPool, file: Path) -> None:
    add(pool, "a", file)
    pool.prefetch("a", to="host").result()
    assert pool.explain("a").components[0].nbytes == FLOAT8 < 0.52 * PLAIN
    assert pool.stats().host_bytes == FLOAT8
    pool.switch("a")
    assert pool.stats().device_bytes == pool.stats().copied_bytes == FLOAT8
    pool.sleep("a")
    assert torch.equal(used(pool, "a"), expected(file))
    assert pool.stats().fetched == 1


def test_what_comes_back_after_its_master_went_is_the_same(pool: ModelPool, file: Path) -> None:
    add(pool, "a", file)
    first = used(pool, "a")
    pool.sleep("a", level=2)
    assert pool.stats().host_bytes == pool.stats().device_bytes == 0
    assert torch.equal(used(pool, "a"), first)
    assert pool.stats().fetched == 2


def test_a_part_that_left_the_device_without_a_master_comes_back(tmp_path: Path) -> None:
    files = [saved(tmp_path / f"{seed}.safetensors", seed) for seed in range(2)]
    with ModelPool("cpu", host_budget=0, device_budget=FLOAT8 * 3 // 2) as pool:
        for name, file in zip("ab", files, strict=True):
            add(pool, name, file)
        for name, file in zip("abab", files * 2, strict=True):
            assert torch.equal(used(pool, name), expected(file))
        assert ", its first" in str(pool.explain("a")), "only a part of it left"
        check_books(pool)


def test_float16_and_float32_with_a_dtype_are_converted_from_that(pool: ModelPool, tmp_path: Path) -> None:
    halves = saved(tmp_path / "halves.safetensors", dtype=torch.float16)
    floats = saved(tmp_path / "floats.safetensors", dtype=torch.float32)
    add(pool, "cast", floats, dtype=torch.bfloat16)
    assert torch.equal(used(pool, "cast"), expected(floats, dtype=torch.bfloat16))
    add(pool, "halves", halves)
    with pool.use("halves") as lease:
        assert lease["net"].first.weight.dtype == torch.float16
    with pytest.raises(ConfigError, match=r"dtype=torch\.bfloat16"):
        add(pool, "floats", floats)
    assert list(pool) == ["cast", "halves"]


# What is shared


def test_the_same_files_are_one_where_they_are_converted_alike(pool: ModelPool, file: Path) -> None:
    settings = {
        "a": "fp8",
        "b": Fp8(compute="fp8"),
        "tensor": Fp8("tensor"),
        "skip": Fp8(skip=("second",)),
        "plain": None,
    }
    for name, quantize in settings.items():
        add(pool, name, file, quantize=quantize)
        used(pool, name)
    users = {name: pool.explain(name).components[0].used_by for name in settings}
    assert users == {"a": ("a", "b"), "b": ("a", "b"), "tensor": ("tensor",), "skip": ("skip",), "plain": ("plain",)}
    assert torch.equal(used(pool, "plain"), answer(penstock.load_model(Net, file)))


def test_what_was_converted_elsewhere_becomes_one_with_what_is_converted_here(
    pool: ModelPool, file: Path, tmp_path: Path
) -> None:
    module = penstock.load_model(Net, file)
    convert(module)
    save(module, tmp_path / "fp8.safetensors")
    add(pool, "converted", file)
    add(pool, "stored", tmp_path / "fp8.safetensors", quantize=None)
    pool.adopt("adopted", module)
    for name in ("converted", "stored", "adopted"):
        pool.prefetch(name, to="host").result()
        assert torch.equal(used(pool, name), expected(file))
    for _ in range(2):
        # They become one when nobody uses them.
        for name in pool:
            used(pool, name)
    assert len(pool._movement.states) == 1
    assert pool.stats().host_bytes == FLOAT8
    pool.unload("adopted")
    pool.unload("converted")
    assert torch.equal(used(pool, "stored"), expected(file))


def test_writes_to_a_shared_component_are_a_models_own(pool: ModelPool, file: Path) -> None:
    add(pool, "a", file)
    add(pool, "b", file)
    with pool.use("a") as lease:
        lease["net"].first._buffers["weight_scale"].mul_(2)
    pool.sleep("a")
    assert not torch.equal(used(pool, "a"), expected(file))
    assert torch.equal(used(pool, "b"), expected(file))
    assert len(pool._movement.states) == 2


def test_a_weight_that_is_rounded_anew_stays_a_models_own(pool: ModelPool, file: Path) -> None:
    add(pool, "a", file)
    add(pool, "b", file)
    with pool.use("a") as lease:
        layer = lease["net"].second
        layer.requantise(layer.weight + 1)
        changed = answer(lease["net"])
    pool.sleep("a")
    assert torch.equal(used(pool, "a"), changed)
    assert not torch.equal(changed, expected(file))
    assert torch.equal(used(pool, "b"), expected(file))


# Files


def test_a_component_that_is_written_within_a_lease_is_taken_back(pool: ModelPool, file: Path, tmp_path: Path) -> None:
    add(pool, "a", file)
    with pool.use("a") as lease:
        save(lease["net"], tmp_path / "fp8.safetensors")
    add(pool, "b", tmp_path / "fp8.safetensors", quantize=None)
    assert torch.equal(used(pool, "b"), expected(file))
    with pool.use("b") as lease:
        assert lease["net"].first.weight.dtype == torch.bfloat16
    assert penstock.open(tmp_path / "fp8.safetensors").nbytes == FLOAT8 - 256, "less the buffer"


def test_a_file_of_float8_whose_other_layers_are_to_be_converted_too(
    pool: ModelPool, file: Path, tmp_path: Path
) -> None:
    module = penstock.load_model(Net, file)
    convert(module, Fp8(skip=("second",)))
    save(module, tmp_path / "half.safetensors")
    add(pool, "a", tmp_path / "half.safetensors")
    assert torch.equal(used(pool, "a"), expected(file))
    assert pool.explain("a").components[0].float8 == 2


def test_scales_that_a_file_has_in_another_dtype_are_used_as_float32(
    pool: ModelPool, file: Path, tmp_path: Path
) -> None:
    module = penstock.load_model(Net, file)
    convert(module, Fp8("tensor"))
    tensors = module.state_dict()
    for name in ("first.weight_scale", "second.weight_scale"):
        tensors[name] = tensors[name].bfloat16()[0].clone()
    safetensors_torch.save_file(tensors, tmp_path / "others.safetensors")
    add(pool, "a", tmp_path / "others.safetensors", quantize={"net": Fp8(compute="fp8")})
    with pool.use("a") as lease:
        layer = lease["net"].second
        assert layer._buffers["weight_scale"].dtype == torch.float32
        assert layer._buffers["weight_scale"].shape == ()
        assert answer(layer).isfinite().all()


def test_float8_without_scales_stays_what_it_is(pool: ModelPool, tmp_path: Path) -> None:
    layer = torch.nn.Linear(WIDTH, WIDTH, bias=False).bfloat16()
    stored = {"weight": layer.weight.detach().to(torch.float8_e4m3fn)}
    safetensors_torch.save_file(stored, tmp_path / "unscaled.safetensors")
    build = {"net": lambda: torch.nn.Linear(WIDTH, WIDTH, bias=False)}
    pool.register("a", {"net": tmp_path / "unscaled.safetensors"}, build=build, dtype=torch.bfloat16)
    with pool.use("a") as lease:
        assert torch.equal(lease["net"].weight, stored["weight"].bfloat16())


# What is told


def test_the_error_of_each_weight_is_told(pool: ModelPool, file: Path) -> None:
    add(pool, "a", file)
    assert pool.explain("a").components[0].errors == {}
    assert "float8 weights of 2 layers" in str(pool.explain("a"))
    used(pool, "a")
    module = penstock.load_model(Net, file)
    found = pool.explain("a").components[0]
    assert found.errors == convert(module)
    assert found.errors.keys() == {"first.weight", "second.weight"}
    worst = max(error.relative for error in found.errors.values())
    assert f"at most {worst:.2%} from the checkpoint's" in str(pool.explain("a"))


def test_numbers_that_are_not_finite_are_nan_and_told(
    pool: ModelPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.ones(WIDTH, WIDTH).bfloat16()
    weight[0, :2] = torch.tensor([float("inf"), float("nan")])
    add(pool, "a", saved(tmp_path / "net.safetensors", **{"second.weight": weight}))
    with caplog.at_level(logging.WARNING, "penstock.pool.quantised"), pool.use("a") as lease:
        back = lease["net"].second.weight
    assert back[0, :2].isnan().all()
    assert torch.equal(back[1:], weight[1:])
    assert pool.explain("a").components[0].errors["second.weight"].not_finite == 2
    assert "net.safetensors: tensor 'second.weight': 2 of its numbers are not finite" in caplog.text


# What is refused, and what is not


def conv() -> torch.nn.Module:
    return torch.nn.Conv2d(3, 3, 3)


def test_components_without_linear_layers_stay_as_they_are_unless_they_are_named(
    pool: ModelPool, file: Path, tmp_path: Path
) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in conv().state_dict().items()}
    safetensors_torch.save_file(tensors, tmp_path / "vae.safetensors")
    both = {"net": file, "vae": tmp_path / "vae.safetensors"}
    build = {"net": Net, "vae": conv}
    pool.register("a", both, build=build, quantize="fp8")
    assert [one.float8 for one in pool.explain("a").components] == [2, 0]
    pool.register("net only", both, build=build, quantize={"net": "fp8", "vae": None})
    with pytest.raises(ConfigError, match=r"'vae'.*no torch\.nn\.Linear"):
        pool.register("b", both, build=build, quantize={"vae": "fp8"})
    with pytest.raises(ConfigError, match=r"no torch\.nn\.Linear"):
        pool.register("c", {"vae": both["vae"]}, build={"vae": conv}, quantize="fp8")
    assert list(pool) == ["a", "net only"]


@pytest.mark.parametrize(
    ("quantize", "says"),
    [("int4", "int4"), ({"nets": "fp8"}, "'nets'"), ({"net": "nf4"}, "nf4"), (8, "quantize=8")],
)
def test_ways_to_quantise_that_there_are_not_are_refused(
    pool: ModelPool, file: Path, quantize: object, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        add(pool, "a", file, quantize=quantize)
    assert list(pool) == []


def test_a_checkpoint_that_does_not_fit_is_refused_as_without_float8(pool: ModelPool, tmp_path: Path) -> None:
    extra = saved(tmp_path / "extra.safetensors", **{"third.weight": torch.zeros(1)})
    with pytest.raises(TensorNotFoundError, match=r"third\.weight"):
        add(pool, "a", extra)
    short = saved(tmp_path / "short.safetensors", **{"second.weight": torch.zeros(2, WIDTH).bfloat16()})
    with pytest.raises(DestinationError, match="size mismatch"):
        add(pool, "a", short)
    stored = {"first.weight": torch.zeros(WIDTH, WIDTH).to(torch.float8_e4m3fn), "first.weight_scale": torch.ones(7)}
    with pytest.raises(DestinationError, match=r"first\.weight_scale.*\[7\]"):
        add(pool, "a", saved(tmp_path / "scales.safetensors", **stored))
    assert list(pool) == []


def test_a_load_that_fails_leaves_exact_books_and_is_tried_again(pool: ModelPool, file: Path) -> None:
    add(pool, "a", file)
    content = file.read_bytes()
    file.write_bytes(content[:-1000])
    with pytest.raises(penstock.PenstockError), pool.use("a") as lease:
        lease["net"]
    check_books(pool)
    assert pool.stats().device_bytes == pool.stats().host_bytes == 0


def test_modules_that_are_tied_within_a_component_stay_so(pool: ModelPool, tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(WIDTH, WIDTH)
            self.first, self.second = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
            self.lm_head = torch.nn.Linear(WIDTH, WIDTH, bias=False)
            self.second.weight = self.first.weight
            self.lm_head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lm_head(self.second(self.first(x)))

    tensors = {"embedding.weight": torch.randn(WIDTH, WIDTH).bfloat16(), "second.weight": torch.eye(WIDTH).bfloat16()}
    safetensors_torch.save_file(tensors, tmp_path / "tied.safetensors")
    for name, skip in (("a", ()), ("b", ("lm_head",))):
        pool.register(name, {"net": tmp_path / "tied.safetensors"}, build={"net": Tied}, quantize=Fp8(skip=skip))
        assert pool.explain(name).components[0].nbytes == WIDTH**2 * 3 + 4 * WIDTH
    with pool.use("a") as lease:
        module = lease["net"]
        assert isinstance(module.second, Float8Linear)
        assert module.second._buffers["weight"].data_ptr() == module.first._buffers["weight"].data_ptr()
        assert torch.equal(module.lm_head.weight, tensors["embedding.weight"])
        assert torch.equal(answer(module), torch.nn.functional.linear(X, tensors["embedding.weight"]))
