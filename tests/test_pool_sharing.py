"""What modules of a pool share, and what becomes of writes to it: equal bytes, leases, writes outside of these."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

import penstock
from penstock.pool import ModelPool
from pool_books import check_books, settle

WIDTH = 64


def layer() -> torch.nn.Module:
    return torch.nn.Linear(WIDTH, WIDTH)


NBYTES = 4 * (WIDTH * WIDTH + WIDTH)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two with the same bytes, the second with other metadata, and one with others."""
    torch.manual_seed(0)
    state, other = layer().state_dict(), layer().state_dict()
    made = [tmp_path / f"{name}.safetensors" for name in ("one", "same", "other")]
    safetensors_torch.save_file(state, made[0])
    safetensors_torch.save_file(state, made[1], metadata={"from": "elsewhere"})
    safetensors_torch.save_file(other, made[2])
    return made


@pytest.fixture
def pool() -> Iterator[ModelPool]:
    with ModelPool("cpu", host_budget=1 << 24, device_budget=1 << 24) as made:
        yield made
        check_books(made)


def register(pool: ModelPool, name: str, file: Path) -> None:
    pool.register(name, {"net": file}, build={"net": layer})


def weight(lease: Any) -> torch.Tensor:
    return next(iter(lease.values())).weight


def stored(file: Path) -> torch.Tensor:
    return safetensors_torch.load_file(file)["weight"]


def test_files_with_the_same_bytes_at_other_places_become_one(pool: ModelPool, files: list[Path]) -> None:
    for name, file in zip(("a", "b", "c"), files, strict=True):
        register(pool, name, file)
    with pool.use("a") as a, pool.use("b") as b, pool.use("c") as c:
        assert torch.equal(weight(a), weight(b))
        assert not torch.equal(weight(a), weight(c))
        assert weight(a).data_ptr() != weight(b).data_ptr(), "in use, neither is taken away"
    settle(pool)
    assert pool.stats().host_bytes == pool.stats().device_bytes == 2 * NBYTES
    assert pool.explain("a").components[0].used_by == ("a", "b")
    check_books(pool)
    with pool.use("a") as a, pool.use("b") as b:
        assert weight(a).data_ptr() == weight(b).data_ptr()
    pool.unload("a")
    pool.sleep("b", level=2)
    files[0].unlink()  # It is b's source now too, as its bytes are what is known to be equal.
    files[1].rename(files[0])
    with pool.use("c") as c:
        assert torch.equal(weight(c), stored(files[2]))


def test_fetched_without_a_use_equal_masters_become_one_at_once(pool: ModelPool, files: list[Path]) -> None:
    for name, file in zip(("a", "b"), files[:2], strict=True):
        register(pool, name, file)
        pool.prefetch(name, to="host").result(10)
    check_books(pool)
    assert pool.stats().host_bytes == NBYTES


def test_one_bit_of_difference_is_a_difference(pool: ModelPool, files: list[Path], tmp_path: Path) -> None:
    state = safetensors_torch.load_file(files[0])
    state["bias"][-1] = -state["bias"][-1]
    safetensors_torch.save_file(state, tmp_path / "near.safetensors")
    register(pool, "a", files[0])
    register(pool, "b", tmp_path / "near.safetensors")
    for name in ("a", "b"):
        pool.prefetch(name, to="host").result(10)
    check_books(pool)
    assert pool.stats().host_bytes == 2 * NBYTES


def test_an_adopted_module_joins_equal_bytes(pool: ModelPool, files: list[Path]) -> None:
    register(pool, "a", files[0])
    pool.prefetch("a", to="host").result(10)
    modules = [penstock.load_model(layer, files[0]) for _ in range(2)]
    for number, module in enumerate(modules):
        pool.adopt(f"adopted {number}", module)
    assert pool.stats().host_bytes == NBYTES
    check_books(pool)
    pool.unload("a")
    pool.resize(host=0)
    assert pool.stats().host_bytes == NBYTES, "nothing could bring back what was adopted"
    pool.unload("adopted 0")
    with pool.use("adopted 1") as lease:
        assert torch.equal(weight(lease), stored(files[0]))


def test_writes_to_what_adopted_models_share_are_the_writers_own(pool: ModelPool, files: list[Path]) -> None:
    modules = [penstock.load_model(layer, files[0]) for _ in range(2)]
    for number, module in enumerate(modules):
        pool.adopt(str(number), module)
    with pool.use("0") as lease, torch.no_grad():
        weight(lease).fill_(3)
    check_books(pool)
    for _ in range(2):
        with pool.use("0") as zero, pool.use("1") as one:
            assert (weight(zero) == 3).all()
            assert torch.equal(weight(one), stored(files[0]))
        pool.resize(device=0)
        pool.resize(device=1 << 24)
    pool.unload("1")
    pool.resize(host=0)
    check_books(pool)
    pool.resize(host=1 << 24)
    with pool.use("0") as zero:
        assert (weight(zero) == 3).all()
        assert torch.equal(next(iter(zero.values())).bias, safetensors_torch.load_file(files[0])["bias"])
    pool.unload("0")
    assert pool.stats().host_bytes == 0


# Outside of leases


def test_a_module_has_the_devices_memory_within_a_lease_only(pool: ModelPool, files: list[Path]) -> None:
    register(pool, "a", files[0])
    with pool.use("a") as lease:
        inside = weight(lease).data_ptr()
        net = lease["net"]
    settle(pool)
    assert pool.explain("a").components[0].on_device
    assert net.weight.data_ptr() != inside
    assert torch.equal(net.weight, stored(files[0]))


@pytest.mark.parametrize("on_device", [False, True])
def test_writes_outside_of_a_lease_are_the_models(pool: ModelPool, files: list[Path], on_device: bool) -> None:
    register(pool, "a", files[0])
    with pool.use("a") as lease:
        net = lease["net"]
    if not on_device:
        pool.sleep("a")
    with torch.no_grad():
        net.weight.fill_(5)
    with pool.use("a") as lease:
        assert (weight(lease) == 5).all()
    pool.sleep("a", level=2)
    with pool.use("a") as lease:
        assert (weight(lease) == 5).all()


@pytest.mark.parametrize("on_device", [False, True])
def test_writes_outside_of_a_lease_to_what_is_shared(pool: ModelPool, files: list[Path], on_device: bool) -> None:
    for name in ("a", "b"):
        register(pool, name, files[0])
    with pool.use("a") as lease:
        net = lease["net"]
    if not on_device:
        pool.sleep("a")
    with torch.no_grad():
        net.weight.fill_(5)
    with pool.use("a") as a, pool.use("b") as b:
        assert (weight(a) == 5).all()
        assert torch.equal(weight(b), stored(files[0]))


def test_the_write_is_the_writers_who_never_leased_the_model(pool: ModelPool, files: list[Path]) -> None:
    nets = {}
    for name in ("a", "b"):
        pool.register(name, {"net": files[0]}, build={"net": lambda name=name: nets.setdefault(name + "!", layer())})
    pool.prefetch("a", to="host").result(10)
    with torch.no_grad():
        nets["b!"].weight.fill_(5)
    with pool.use("a") as a, pool.use("b") as b:
        assert torch.equal(weight(a), stored(files[0]))
        assert (weight(b) == 5).all()
        assert list(b["net"].state_dict()) == ["weight", "bias"]
    assert list(pool._models["b"].components[0].kept) == [0], "only what was written to"


def test_tensors_that_a_module_replaces_are_kept_too(pool: ModelPool, files: list[Path]) -> None:
    register(pool, "a", files[0])
    with pool.use("a") as lease:
        net = lease["net"]
        net.weight = torch.nn.Parameter(torch.full_like(net.weight, 7.0))
        net.bias = None
    pool.resize(device=0)
    pool.resize(device=1 << 24)
    with pool.use("a") as lease:
        assert (lease["net"].weight == 7).all()
        assert lease["net"].bias is None


def test_another_shape_is_the_modules_own_business(pool: ModelPool, files: list[Path]) -> None:
    register(pool, "a", files[0])
    with pool.use("a") as lease:
        lease["net"].bias = torch.nn.Parameter(torch.ones(1))
    with pool.use("a") as lease:
        assert lease["net"].bias.shape == (1,)
        assert torch.equal(weight(lease), stored(files[0]))


def test_a_write_while_the_model_is_leased_twice_is_kept_at_the_end(pool: ModelPool, files: list[Path]) -> None:
    for name in ("a", "b"):
        register(pool, name, files[0])
    outer = pool.use("a")
    with pool.use("a") as inner, torch.no_grad():
        weight(inner).fill_(2)
    assert (weight(outer) == 2).all()
    outer.close()
    with pool.use("a") as a, pool.use("b") as b:
        assert (weight(a) == 2).all()
        assert torch.equal(weight(b), stored(files[0]))


def test_under_inference_mode_all_goes_on_as_without(pool: ModelPool, files: list[Path]) -> None:
    with torch.inference_mode():
        module = penstock.load_model(layer, files[2])
        pool.adopt("adopted", module)
        register(pool, "a", files[0])
        with pool.use("a") as lease, pool.use("adopted"):
            weight(lease).mul_(2)
        pool.sleep("a")
        pool.sleep("adopted")
    for name, value in (("a", 2 * stored(files[0])), ("adopted", stored(files[2]))):
        with pool.use(name) as lease:
            assert torch.equal(weight(lease), value)
            (next(iter(lease.values()))(torch.ones(WIDTH)).sum()).backward()


# What cannot be shared, and odd tensors


def test_a_module_is_adopted_once(pool: ModelPool) -> None:
    module = layer()
    pool.adopt("a", module)
    with pytest.raises(penstock.ConfigError, match="a too"):
        pool.adopt("b", module)
    with ModelPool("cpu", host_budget="1MiB", device_budget="1MiB") as other:
        with pytest.raises(penstock.ConfigError, match="a too"):
            other.adopt("b", torch.nn.Sequential(module))
        check_books(other)
    assert "b" not in pool
    pool.unload("a")


class Pipeline:
    def __init__(self, **components: Any) -> None:
        self.components = components


def test_one_module_may_be_two_components_but_not_a_part_of_another(pool: ModelPool) -> None:
    module = layer()
    pool.adopt("both", Pipeline(one=module, two=module, scheduler=object()))
    with pool.use("both") as lease:
        assert lease["one"] is lease["two"] is module
    assert pool.stats().host_bytes == NBYTES
    inner = layer()
    with pytest.raises(penstock.ConfigError, match="already"):
        pool.adopt("odd", Pipeline(whole=torch.nn.Sequential(inner), part=inner))
    pool.adopt("whole", torch.nn.Sequential(inner))


def dtypes() -> list[torch.dtype]:
    names = ["bool", "uint8", "int8", "int64", "float16", "bfloat16", "complex64", "complex128", "float8_e4m3fn"]
    return [getattr(torch, name) for name in names if hasattr(torch, name)]


class Odd(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for dtype in dtypes():
            value = torch.randint(0, 2, (3, 5)).to(dtype)
            self.register_buffer(str(dtype).replace(".", "_"), value, persistent=False)
        self.register_buffer("expanded", torch.arange(7).expand(4, 7), persistent=False)
        self.register_buffer("transposed", torch.randn(6, 4).t())
        self.register_buffer("gaps", torch.randn(6, 4)[:, ::2])
        self.register_buffer("scalar", torch.tensor(3.0))
        self.register_buffer("inside", torch.randn(64)[3:17])
        self.empty = torch.nn.Parameter(torch.empty(0, 4))
        self.whole = torch.nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
        self.phase = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.linear = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
        self.nothing = torch.nn.Identity()


def test_every_kind_of_plain_tensor_survives_a_switch(pool: ModelPool) -> None:
    module = Odd()
    before = {name: tensor.clone() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    strides = {name: tensor.stride() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    x = torch.randn(2, 4)
    expected = module.linear(x)
    pool.adopt("odd", module)
    for _ in range(2):
        with pool.use("odd") as lease:
            assert lease.wait() is module
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                assert tensor.dtype == before[name].dtype, name
                assert tensor.stride() == strides[name], name
                assert torch.equal(
                    tensor.view(torch.uint8) if "float8" in name else tensor,
                    before[name].view(torch.uint8) if "float8" in name else before[name],
                ), name
            assert torch.equal(module.linear(x), expected)
            assert module.phase.requires_grad
            assert not module.whole.requires_grad
        pool.sleep("odd")


def test_modules_without_tensors_have_a_place_too(pool: ModelPool) -> None:
    pool.adopt("nothing", torch.nn.Identity())
    for _ in range(2):
        with pool.use("nothing") as lease:
            assert torch.equal(lease["model"](torch.ones(2)), torch.ones(2))
        pool.sleep("nothing")


@pytest.mark.parametrize("kind", ["sparse", "quantised", "meta", "lazy"])
def test_tensors_without_plain_memory_are_refused(pool: ModelPool, kind: str) -> None:
    module = torch.nn.Module()
    if kind == "sparse":
        module.register_buffer("odd", torch.eye(3).to_sparse())
    elif kind == "quantised":
        with warnings.catch_warnings(action="ignore"):
            module.register_buffer("odd", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    elif kind == "meta":
        module.register_buffer("odd", torch.empty(3, device="meta"))
    else:
        module = torch.nn.LazyLinear(3)
    with pytest.raises(penstock.DestinationError):
        pool.adopt("odd", module)
    assert "odd" not in pool


# Why


def test_a_line_says_why_something_is_loaded_again(files: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    with ModelPool("cpu", host_budget=NBYTES, device_budget=NBYTES) as pool, caplog.at_level(logging.INFO, "penstock"):
        register(pool, "a", files[0])
        register(pool, "c", files[2])
        for name in ("a", "c"):
            with pool.use(name) as lease:
                lease.wait()
        assert not caplog.records
        with pool.use("a") as lease:
            lease.wait()
        said = [record.getMessage() for record in caplog.records]
        assert said == ["net, 16.6 kB, is fetched for a again: it had left host memory: made room for net"]
        pool.resize(host=2 * NBYTES)
        with pool.use("c") as lease:
            lease.wait()
        with pool.use("a") as lease:
            lease.wait()
        assert (
            caplog.records[-1].getMessage()
            == "net, 16.6 kB, is copied to cpu for a again: it had left: made room for c"
        )


def test_a_pinned_models_change_of_its_own_has_to_fit_beside_what_the_pin_keeps(files: list[Path]) -> None:
    with ModelPool("cpu", host_budget=0, device_budget=2 * NBYTES - 1) as pool:
        register(pool, "a", files[0])
        register(pool, "b", files[0])
        pool.pin("a")
        with pool.use("a") as lease:
            net = lease["net"]
        with torch.no_grad():
            net.weight.fill_(5)
        with pytest.raises(penstock.InsufficientMemoryError, match="pinned"):
            pool.use("a")
        # What the pin keeps stays as long as it does, also when no model has it any more.
        pool.unload("b")
        check_books(pool)
        assert pool.stats().device_bytes == NBYTES
        pool.unpin("a")
        check_books(pool)
        assert pool.stats().device_bytes == 0
        with pool.use("a") as lease:
            assert (weight(lease) == 5).all()
        check_books(pool)


@pytest.mark.parametrize("on_device", [False, True])
def test_two_models_that_write_to_one_master_before_anyone_asks_both_have_their_writes(
    pool: ModelPool, files: list[Path], on_device: bool
) -> None:
    nets = {}
    for name in "abc":
        register(pool, name, files[0])
        with pool.use(name) as lease:
            nets[name] = lease["net"]
    settle(pool)
    if not on_device:
        for name in "abc":
            pool.sleep(name)
    with torch.no_grad():
        nets["a"].weight.fill_(5)
        nets["b"].weight.fill_(7)
        nets["b"].bias.fill_(3)
    bias = safetensors_torch.load_file(files[0])["bias"]
    expected = {"a": (7.0, bias), "b": (7.0, torch.full_like(bias, 3.0)), "c": (stored(files[0]), bias)}
    for name in "cab":
        with pool.use(name) as lease:
            assert torch.equal(weight(lease), torch.ones_like(weight(lease)) * expected[name][0]), name
            assert torch.equal(lease["net"].bias, expected[name][1]), name
    check_books(pool)


def test_what_is_on_the_device_is_not_refused_for_a_master_that_had_no_room(files: list[Path]) -> None:
    with ModelPool("cpu", host_budget=2 * NBYTES - 1, device_budget=1 << 24) as pool:
        pool.adopt("lasting", layer())
        register(pool, "a", files[0])
        with pool.use("a"):
            settle(pool)
            with pytest.raises(penstock.InsufficientMemoryError):
                pool.prefetch("a", to="host").result(10)
            pool.prefetch("a").result(10)
        check_books(pool)
