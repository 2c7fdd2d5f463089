"""Adapters of a pool's models: merged and as branches, exactly undone, in memory of their own."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

import penstock
from penstock.pool import ModelPool
from pool_adapters import SHAPES, Net, added, inputs, lora_file, matrices, net, net_file, peft_directory
from pool_books import check_books, settle

WEIGHTS = {f"{layer}.weight" for layer in SHAPES}


def pool_of(tmp_path: Path, dtype: Any = torch.float32, **settings: Any) -> ModelPool:
    """With a model ``m`` of one component, ``net``."""
    sizes = {"host_budget": "8MiB", "device_budget": "8MiB", **settings}
    pool = ModelPool("cpu", **sizes)
    pool.register("m", {"net": net_file(tmp_path / "net.safetensors", dtype)}, build={"net": Net})
    return pool


def state(pool: ModelPool, name: str = "m") -> dict[str, torch.Tensor]:
    """What a lease has."""
    with pool.use(name) as model:
        return {key: value.clone() for key, value in model["net"].state_dict().items()}


def outputs(pool: ModelPool, name: str = "m", dtype: Any = torch.float32) -> list[torch.Tensor]:
    with pool.use(name) as model, torch.no_grad():
        return [one.clone() for one in model["net"].eval()(*inputs(dtype))]


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.values(), other.values(), strict=True) if isinstance(one, dict) else zip(one, other, strict=True)
    return all(torch.equal(*pair) for pair in pairs)


def merged(dtype: Any, *adapters: tuple[int, float]) -> dict[str, torch.Tensor]:
    """What weights must be: ``(seed, factor)`` each."""
    found = net(dtype).state_dict()
    for seed, factor in adapters:
        for layer, pair in matrices(seed).items():
            found[f"{layer}.weight"] = added(found[f"{layer}.weight"], *pair, factor)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_merged_adapters_are_added_one_by_one_and_undone_to_the_bit(tmp_path: Path, dtype: Any) -> None:
    with pool_of(tmp_path, dtype) as pool:
        pristine = state(pool)
        for seed, name in enumerate("ab", start=1):
            pool.load_adapter("m", lora_file(tmp_path / f"{name}.safetensors", seed))
        assert same(state(pool), pristine), "loading alone changes nothing"
        pool.set_adapters("m", {"a": 0.5}, merge=True)
        assert same(state(pool), merged(dtype, (1, 0.5)))
        pool.set_adapters("m", {"a": 0.5, "b": -2}, merge=True)
        assert same(state(pool), merged(dtype, (1, 0.5), (2, -2)))
        check_books(pool)
        pool.set_adapters("m", {"b": 1}, merge=True)
        assert same(state(pool), merged(dtype, (2, 1)))
        pool.set_adapters("m", merge=True)
        assert same(state(pool), pristine)
        check_books(pool)
        assert pool._models["m"].components[0].overlay is None


def test_only_weights_that_change_are_sent_again_and_the_base_is_read_once(tmp_path: Path) -> None:
    with pool_of(tmp_path) as pool:
        pool.load_adapter("m", lora_file(tmp_path / "a.safetensors", 1, layers=["first"]))
        pool.load_adapter("m", lora_file(tmp_path / "b.safetensors", 2, layers=["blocks.2"]))
        pool.switch("m")
        before = pool.stats()
        pool.set_adapters("m", ["a"], merge=True)
        assert pool.stats().resent_bytes == 0, "what nothing was added to is right already"
        pool.set_adapters("m", {"a": 0.5, "b": 1}, merge=True)
        first, block = 4 * 16 * 24, 4 * 24 * 24
        assert pool.stats().resent_bytes == first
        pool.set_adapters("m", {"a": 0.5}, merge=True)
        assert pool.stats().resent_bytes == first + block
        after = pool.stats()
        assert (after.fetched, after.copied_bytes) == (before.fetched, before.copied_bytes)
        assert after.adapters_read == 2


def test_the_master_stays_as_it_is(tmp_path: Path) -> None:
    with pool_of(tmp_path) as pool:
        pool.load_adapter("m", lora_file(tmp_path / "a.safetensors"))
        pool.set_adapters("m", ["a"], merge=True)
        module = pool._models["m"].bounds["net"].module
        state(pool)
        assert same(module.state_dict(), net().state_dict()), "outside of a lease, parameters are the master's"
        pool.sleep("m")
        assert same(state(pool), merged(torch.float32, (1, 1)))
        assert same(module.state_dict(), net().state_dict())
        check_books(pool)


def test_a_model_that_left_comes_back_with_its_adapters(tmp_path: Path) -> None:
    with pool_of(tmp_path) as pool:
        pool.load_adapter("m", lora_file(tmp_path / "a.safetensors"))
        pool.set_adapters("m", ["a"], merge=True)
        for level in (1, 2, 1):
            assert same(state(pool), merged(torch.float32, (1, 1)))
            pool.sleep("m", level)
            check_books(pool)
        # Part of it leaves, from its end.
        state(pool)
        pool.resize(device=4096)
        pool.resize(device="8MiB")
        assert same(state(pool), merged(torch.float32, (1, 1)))
        check_books(pool)


def test_a_weight_of_which_a_part_left_is_right_when_it_returns(tmp_path: Path) -> None:
    value, down, up = torch.randn(64, 64), torch.randn(2, 64), torch.randn(64, 2)
    safetensors_torch.save_file({"weight": value}, tmp_path / "base.safetensors")
    lora = {"net.lora_A.weight": down, "net.lora_B.weight": up}
    safetensors_torch.save_file(lora, tmp_path / "a.safetensors")
    with ModelPool("cpu", host_budget="8MiB", device_budget="8MiB") as pool:
        build = {"net": lambda: torch.nn.Linear(64, 64, bias=False)}
        pool.register("m", {"net": tmp_path / "base.safetensors"}, build=build)
        pool.load_adapter("m", tmp_path / "a.safetensors")
        pool.set_adapters("m", ["a"], merge=True)
        for _ in range(2):
            assert torch.equal(state(pool)["weight"], added(value, down, up, 1))
            pool.resize(device=8192)
            assert pool.explain("m").components[0].device_bytes == 8192
            pool.resize(device="8MiB")
            check_books(pool)


def test_a_model_without_a_master_takes_the_weights_to_restore_from_storage(tmp_path: Path) -> None:
    with pool_of(tmp_path, host_budget=64, adapter_budget="1MiB") as pool:
        pristine = state(pool)
        pool.load_adapter("m", lora_file(tmp_path / "a.safetensors"))
        pool.set_adapters("m", ["a"], merge=True)
        assert same(state(pool), merged(torch.float32, (1, 1)))
        assert pool.stats().host_bytes == 0
        pool.set_adapters("m", {"a": 2}, merge=True)
        assert same(state(pool), merged(torch.float32, (1, 2)))
        pool.set_adapters("m")
        assert same(state(pool), pristine)
        check_books(pool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_branches_give_what_merged_weights_give(tmp_path: Path, dtype: Any) -> None:
    with pool_of(tmp_path, dtype) as pool:
        plain = outputs(pool, dtype=dtype)
        for seed, name in enumerate("ab", start=1):
            pool.load_adapter("m", lora_file(tmp_path / f"{name}.safetensors", seed))
        pool.set_adapters("m", {"a": 0.5, "b": -1})
        beside = outputs(pool, dtype=dtype)
        assert same(state(pool), net(dtype).state_dict()), "weights stay as they are"
        check_books(pool)
        pool.set_adapters("m", {"a": 0.5, "b": -1}, merge=True)
        # Rounded at other places: a few units in the last place of the dtype, of sums of tens of numbers.
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
        for one, other, without in zip(beside, outputs(pool, dtype=dtype), plain, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
            assert (one - without).abs().max() > 10 * tolerance
        pool.set_adapters("m")
        assert same(outputs(pool, dtype=dtype), plain)
        assert pool.stats().adapters_device_bytes > 0, "ready for the next time"
        check_books(pool)


def test_branches_do_nothing_outside_of_leases(tmp_path: Path) -> None:
    with pool_of(tmp_path) as pool:
        plain = outputs(pool)
        pool.load_adapter("m", lora_file(tmp_path / "a.safetensors"))
        pool.set_adapters("m", ["a"])
        assert not same(outputs(pool), plain)
        module = pool._models["m"].bounds["net"].module
        with torch.no_grad():
            assert same(module(*inputs()), plain)


def test_preloaded_adapters_change_within_a_lease_and_under_a_millisecond(tmp_path: Path) -> None:
    with pool_of(tmp_path) as pool:
        for seed, name in enumerate("ab", start=1):
            pool.load_adapter("m", lora_file(tmp_path / f"{name}.safetensors", seed))
        pool.set_adapters("m", {"a": 1, "b": 0})
        with pool.use("m") as model, torch.no_grad():
            module = model["net"].eval()
            first = module(*inputs())
            seconds = []
            for _ in range(50):
                for weights in ({"a": 0, "b": 1}, {"a": 1, "b": 0}):
                    began = time.perf_counter()
                    pool.set_adapters("m", weights)
                    seconds.append(time.perf_counter() - began)
            assert same(module(*inputs()), first)
            assert sorted(seconds)[len(seconds) // 2] < 1e-3
            pool.set_adapters("m", {"b": 1})
            assert not same(module(*inputs()), first)
            copied = pool.stats().adapters_copied_bytes
        assert copied == 2 * pool._models["m"].adapters.by_name["a"].nbytes
        check_books(pool)


def test_merged_adapters_change_within_a_lease(tmp_path: Path) -> None:
    with pool_of(tmp_path) as pool:
        pool.load_adapter("m", lora_file(tmp_path / "a.safetensors"))
        with pool.use("m") as model:
            module = model["net"]
            there = module.first.weight.data_ptr()
            pool.set_adapters("m", {"a": 2}, merge=True)
            assert model["net"] is module
            assert same(module.state_dict(), merged(torch.float32, (1, 2)))
            assert module.first.weight.data_ptr() == there, "compiled code and CUDA graphs go on"
            pool.set_adapters("m")
            assert same(module.state_dict(), net().state_dict())
        check_books(pool)


def test_a_model_that_another_thread_leases_keeps_its_adapters(tmp_path: Path) -> None:
    with pool_of(tmp_path) as pool:
        pool.load_adapter("m", lora_file(tmp_path / "a.safetensors"))
        pool.set_adapters("m", ["a"])
        raised: list[BaseException] = []

        def change(how: Any) -> None:
            try:
                how()
            except BaseException as error:  # noqa: BLE001
                raised.append(error)

        with pool.use("m") as model, torch.no_grad():
            before = model["net"].eval()(*inputs())
            for how in (
                lambda: pool.set_adapters("m"),
                lambda: pool.set_adapters("m", ["a"], merge=True),
                lambda: pool.unload_adapter("m", "a"),
            ):
                thread = threading.Thread(target=change, args=[how])
                thread.start()
                thread.join(10)
            assert same(model["net"](*inputs()), before)
            check_books(pool)
        assert [type(error) for error in raised] == [penstock.ConfigError] * 3
        assert "another thread" in str(raised[0])


def test_weights_that_models_share_have_branches_instead(tmp_path: Path) -> None:
    with pool_of(tmp_path) as pool:
        pool.register("n", {"net": tmp_path / "net.safetensors"}, build={"net": Net})
        plain = outputs(pool, "n")
        pool.load_adapter("m", lora_file(tmp_path / "a.safetensors"))
        pool.set_adapters("m", ["a"], merge=True)
        changed = outputs(pool, "m")
        assert not same(changed, plain)
        assert same(outputs(pool, "n"), plain)
        assert pool.stats().adapters_device_bytes > 0
        check_books(pool)


def test_a_model_of_the_same_files_does_not_get_what_is_merged(tmp_path: Path) -> None:
    with pool_of(tmp_path) as pool:
        plain = state(pool)
        pool.load_adapter("m", lora_file(tmp_path / "a.safetensors"))
        pool.set_adapters("m", ["a"], merge=True)
        state(pool)
        pool.register("n", {"net": tmp_path / "net.safetensors"}, build={"net": Net})
        pool.adopt("o", net())
        assert same(state(pool, "n"), plain)
        with pool.use("o") as model:
            assert same(model["model"].state_dict(), plain)
        assert same(state(pool), merged(torch.float32, (1, 1)))
        check_books(pool)


def test_adopted_and_pinned_models_have_adapters_too(tmp_path: Path) -> None:
    with ModelPool("cpu", host_budget="8MiB", device_budget="8MiB") as pool:
        pool.adopt("m", net())
        pool.pin("m")
        pool.load_adapter("m", lora_file(tmp_path / "a.safetensors", prefix="unet."))
        pool.set_adapters("m", ["a"], merge=True)
        with pool.use("m") as model:
            assert same(model["model"].state_dict(), merged(torch.float32, (1, 1)))
        check_books(pool)
        pool.unload_adapter("m", "a")
        with pool.use("m") as model:
            assert same(model["model"].state_dict(), net().state_dict())
        check_books(pool)


def test_what_is_written_to_merged_weights_stays_and_is_what_the_next_adapters_are_merged_into(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pool_of(tmp_path) as pool:
        pool.load_adapter("m", lora_file(tmp_path / "a.safetensors"))
        pool.set_adapters("m", ["a"], merge=True)
        with pool.use("m") as model, torch.no_grad():
            model["net"].first.weight.fill_(3)
        assert "they are part of its weights now" in caplog.text
        expected = merged(torch.float32, (1, 1))
        expected["first.weight"] = torch.full((24, 16), 3.0)
        for level in (1, 2):
            assert same(state(pool), expected)
            pool.sleep("m", level)
            check_books(pool)
        pool.set_adapters("m", {"a": 2}, merge=True)
        written = added(torch.full((24, 16), 3.0), *matrices(1)["first"], 2)
        assert torch.equal(state(pool)["first.weight"], written)
        pool.set_adapters("m")
        assert torch.equal(state(pool)["first.weight"], torch.full((24, 16), 3.0))
        # Outside of a lease it is the master that is written to.
        pool.set_adapters("m", ["a"], merge=True)
        state(pool)
        with torch.no_grad():
            pool._models["m"].bounds["net"].module.first.weight.fill_(5)
        assert torch.equal(state(pool)["first.weight"], added(torch.full((24, 16), 5.0), *matrices(1)["first"], 1))
        check_books(pool)


# Memory


def test_a_catalogue_costs_names_only_and_its_budget_is_its_own(tmp_path: Path) -> None:
    lora_file(tmp_path / "a.safetensors")
    nbytes = sum(half.nbytes for pair in matrices(1).values() for half in pair)
    with pool_of(tmp_path, adapter_budget=4 * nbytes + 4096) as pool:
        pool.switch("m")
        settle(pool)
        host = pool.stats().host_bytes
        for number in range(1000):
            assert pool.load_adapter("m", tmp_path / "a.safetensors", name=f"a{number}") == f"a{number}"
        assert pool.stats().adapters_read == pool.stats().adapters_bytes == 0
        assert len(pool.adapters("m")) == 1000
        for number in range(20):
            pool.set_adapters("m", [f"a{number}"], merge=number % 2 == 0)
            state(pool)
            check_books(pool)
        stats = pool.stats()
        assert stats.adapters_read == 20
        assert 2 * nbytes <= stats.adapters_bytes <= stats.adapters_budget
        assert stats.host_bytes == host, "no master went for an adapter"
        assert stats.fetched == 1


def test_an_adapter_is_read_again_after_others_took_its_room(tmp_path: Path) -> None:
    lora_file(tmp_path / "a.safetensors", 1)
    lora_file(tmp_path / "b.safetensors", 2)
    with pool_of(tmp_path, adapter_budget=8000) as pool:
        for name in "ab":
            pool.load_adapter("m", tmp_path / f"{name}.safetensors")
        pool.set_adapters("m", ["a", "b"], merge=True)
        assert same(state(pool), merged(torch.float32, (1, 1), (2, 1)))
        assert pool.stats().adapters_bytes < 8000
        check_books(pool)
        pool.resize(adapters=100)
        assert pool.stats().adapters_bytes == 0
        with pytest.raises(penstock.InsufficientMemoryError, match="host memory for adapters"):
            pool.set_adapters("m", {"a": 2}, merge=True)
        check_books(pool)
        pool.resize(adapters=8000)
        assert same(state(pool), merged(torch.float32, (1, 1), (2, 1))), "as before what failed"


def test_branches_of_idle_models_leave_the_device_for_a_model(tmp_path: Path) -> None:
    net_file(tmp_path / "other.safetensors", seed=9)
    with pool_of(tmp_path) as pool:
        pool.register("n", {"net": tmp_path / "other.safetensors"}, build={"net": Net})
        pool.load_adapter("m", lora_file(tmp_path / "a.safetensors"))
        pool.set_adapters("m", ["a"])
        changed = outputs(pool)
        adapter = pool._models["m"].adapters.by_name["a"]
        size = pool.explain("m").components[0].nbytes
        pool.resize(device=size + adapter.nbytes)
        assert same(outputs(pool), changed)
        pool.resize(device=size)
        assert same(state(pool, "n"), net(seed=9).state_dict())
        assert pool.stats().adapters_device_bytes == 0
        check_books(pool)
        with pytest.raises(penstock.InsufficientMemoryError, match="m with adapters needs"):
            pool.use("m")
        check_books(pool)
        pool.resize(device=size + adapter.nbytes)
        assert same(outputs(pool), changed)
        check_books(pool)


def test_a_model_that_has_no_room_for_its_adapters_any_more_is_refused_and_does_not_wait(tmp_path: Path) -> None:
    with pool_of(tmp_path) as pool:
        pool.load_adapter("m", lora_file(tmp_path / "a.safetensors"))
        pool.set_adapters("m", ["a"])
        outputs(pool)
        size, nbytes = pool.explain("m").components[0].nbytes, pool._models["m"].adapters.by_name["a"].nbytes
        # With its adapter on the device, which could go, and would be needed again.
        pool._movement.device.budget = size + nbytes // 2
        with pytest.raises(penstock.InsufficientMemoryError, match="m with adapters needs"):
            pool.use("m")
        check_books(pool)


def test_a_leased_model_changes_adapters_in_room_for_one(tmp_path: Path) -> None:
    with pool_of(tmp_path) as pool:
        for number in range(5):
            lora_file(tmp_path / f"{number}.safetensors", number)
            pool.load_adapter("m", tmp_path / f"{number}.safetensors")
        pool.set_adapters("m", ["0"])
        size, nbytes = pool.explain("m").components[0].nbytes, pool._models["m"].adapters.by_name["0"].nbytes
        pool.resize(device=size + nbytes)
        seen = []
        with pool.use("m") as model, torch.no_grad():
            for number in (0, 1, 2, 3, 4, 0):
                pool.set_adapters("m", [str(number)])
                seen.append(model["net"].eval()(*inputs()))
                assert pool.stats().adapters_device_bytes == nbytes
            with pytest.raises(penstock.InsufficientMemoryError):
                pool.set_adapters("m", ["1", "2"])
            assert same(seen[0], seen[-1])
            assert not same(seen[0], seen[1])
        check_books(pool)


# Bad input


def bad(tmp_path: Path, change: Any) -> Path:
    tensors = safetensors_torch.load_file(lora_file(tmp_path / "good.safetensors"))
    safetensors_torch.save_file(change(dict(tensors)), tmp_path / "bad.safetensors")
    return tmp_path / "bad.safetensors"


A, B = "net.first.lora_A.weight", "net.first.lora_B.weight"
BAD: dict[str, tuple[Any, str]] = {
    "another architecture": (
        lambda have: {f"net.blocks.7.q.{of}.weight": have[key] for of, key in (("lora_A", A), ("lora_B", B))},
        "another architecture",
    ),
    "a layer too many": (
        lambda have: have | {"net.x.lora_A.weight": have[A].clone(), "net.x.lora_B.weight": have[B].clone()},
        "net.x",
    ),
    "another width": (lambda have: have | {A: torch.ones(4, 17)}, r"\(4, 17\)"),
    "another rank": (lambda have: have | {B: torch.ones(24, 5)}, r"\(24, 5\)"),
    "half a pair": (lambda have: {key: have[key] for key in have if key != B}, r"lacks its up \(B\) matrix"),
    "a stranger": (lambda have: have | {"net.first.scale": torch.ones(1)}, "net.first.scale"),
    "rank 0": (lambda have: have | {A: torch.ones(0, 16), B: torch.ones(24, 0)}, "rank is 0"),
    "one dimension": (lambda have: have | {A: torch.ones(4), B: torch.ones(24)}, "one dimension"),
    "integers": (lambda have: have | {A: torch.ones(4, 16, dtype=torch.int8)}, "int8"),
    "a norm": (
        lambda have: have | {"net.norm.lora_A.weight": torch.ones(2, 24), "net.norm.lora_B.weight": torch.ones(24, 2)},
        "LayerNorm",
    ),
    "DoRA": (lambda have: have | {"net.first.lora_magnitude_vector": torch.ones(24)}, "DoRA"),
    "LoHa": (lambda have: {"net.first.hada_w1_a": have[A]}, "LoHa"),
    "nothing of a LoRA": (lambda have: {"net.first.weight": have[A]}, "no part of a LoRA"),
    "nothing at all": (lambda have: {}, "no LoRA|no tensors"),
}


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_refused_and_nothing_changes(tmp_path: Path, what: str, merge: bool) -> None:
    change, match = BAD[what]
    with pool_of(tmp_path) as pool:
        pool.load_adapter("m", lora_file(tmp_path / "a.safetensors", 2))
        pool.load_adapter("m", bad(tmp_path, change))
        pool.set_adapters("m", ["a"], merge=merge)
        before = outputs(pool)
        with pytest.raises(penstock.AdapterError, match=match) as raised:
            pool.set_adapters("m", ["a", "bad"], merge=merge)
        assert str(tmp_path / "bad.safetensors") in str(raised.value)
        assert same(outputs(pool), before)
        check_books(pool)
        pool.unload_adapter("m", "bad")
        assert pool.adapters("m") == ["a"]
        check_books(pool)


def test_layers_too_many_can_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    location = bad(tmp_path, BAD["a layer too many"][0])
    with pool_of(tmp_path) as pool:
        pool.load_adapter("m", location, strict=False)
        pool.set_adapters("m", ["bad"], merge=True)
        assert same(state(pool), merged(torch.float32, (1, 1)))
        assert "net.x" in caplog.text


def test_files_of_8_bits_are_added_to_any_weight(tmp_path: Path) -> None:
    location = lora_file(tmp_path / "a.safetensors", dtype=torch.float8_e4m3fn)
    halves = matrices(1, torch.float8_e4m3fn)["first"]
    with pool_of(tmp_path, torch.float16) as pool:
        pool.load_adapter("m", location)
        pool.set_adapters("m", ["a"], merge=True)
        base = net(torch.float16).first.weight
        assert torch.equal(state(pool)["first.weight"], added(base, *halves, 1))
        pool.set_adapters("m", ["a"])
        assert not same(outputs(pool, dtype=torch.float16), net(torch.float16)(*inputs(torch.float16)))


def test_adapters_in_fp32_are_merged_into_weights_of_8_bits(tmp_path: Path) -> None:
    value = torch.randn(8, 8).to(torch.float8_e4m3fn)
    down, up = torch.randn(2, 8), torch.randn(8, 2)
    layer = {"net.0.lora_A.weight": down, "net.0.lora_B.weight": up}
    safetensors_torch.save_file(layer, tmp_path / "a.safetensors")
    safetensors_torch.save_file({"0.weight": value}, tmp_path / "base.safetensors")
    with ModelPool("cpu", host_budget="8MiB", device_budget="8MiB") as pool:
        pool.register(
            "m",
            {"net": tmp_path / "base.safetensors"},
            build={"net": lambda: torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))},
        )
        pool.load_adapter("m", tmp_path / "a.safetensors")
        pool.set_adapters("m", ["a"], merge=True)
        assert torch.equal(state(pool)["0.weight"].float(), (value.float() + up @ down).to(value.dtype).float())
        pool.set_adapters("m")
        assert torch.equal(state(pool)["0.weight"].float(), value.float())
        check_books(pool)


def test_a_file_that_disappears_or_is_replaced_is_an_error_and_the_model_keeps_what_it_had(tmp_path: Path) -> None:
    with pool_of(tmp_path) as pool:
        for seed, name in enumerate("ab", start=1):
            pool.load_adapter("m", lora_file(tmp_path / f"{name}.safetensors", seed))
        pool.set_adapters("m", ["a"], merge=True)
        expected = state(pool)
        (tmp_path / "b.safetensors").unlink()
        with pytest.raises(penstock.LocationNotFoundError):
            pool.set_adapters("m", ["b"], merge=True)
        assert same(state(pool), expected)
        # What is set has to be read again, to be merged into a copy that is new.
        (tmp_path / "a.safetensors").unlink()
        pool.sleep("m", 2)
        with pool.use("m") as model, pytest.raises(penstock.LocationNotFoundError):
            model["net"]
        check_books(pool)
        lora_file(tmp_path / "a.safetensors", 5)
        with pool.use("m") as model, pytest.raises(penstock.LocationChangedError, match="load it again"):
            model["net"]
        check_books(pool)
        pool.set_adapters("m")
        assert same(state(pool), net().state_dict())
        check_books(pool)


def test_a_change_that_fails_within_a_lease_leaves_the_weights_that_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora_file(tmp_path / "a.safetensors", 1)
    with pool_of(tmp_path, adapter_budget="1MiB") as pool:
        for name in "ab":
            pool.load_adapter("m", lora_file(tmp_path / f"{name}.safetensors", ord(name)))
        pool.set_adapters("m", ["b"], merge=True)
        pool.set_adapters("m", ["a"], merge=True)
        with pool.use("m") as model:
            before = {key: value.clone() for key, value in model["net"].state_dict().items()}
            # Only what is set is still in memory.
            pool.resize(adapters=pool._models["m"].adapters.by_name["a"].nbytes)
            (tmp_path / "b.safetensors").unlink()
            with pytest.raises(penstock.LocationNotFoundError):
                pool.set_adapters("m", ["a", "b"], merge=True)
            assert same(model["net"].state_dict(), before)
        check_books(pool)


def test_names_weights_and_models_are_checked(tmp_path: Path) -> None:
    lora_file(tmp_path / "a.safetensors")
    (tmp_path / "style").mkdir()
    with pool_of(tmp_path) as pool:
        assert pool.load_adapter("m", tmp_path / "a.safetensors") == "a"
        assert pool.load_adapter("m", tmp_path / "style" / "pytorch_lora_weights.safetensors") == "style"
        assert pool.load_adapter("m", "s3://bucket/hats/") == "hats"
        wrong: list[tuple[Any, str]] = [
            (lambda: pool.load_adapter("m", tmp_path / "a.safetensors"), "an adapter 'a' already"),
            (lambda: pool.load_adapter("x", "b.safetensors"), "no model 'x'"),
            (lambda: pool.load_adapter("m", "b.safetensors", component="vae"), "no component 'vae'"),
            (lambda: pool.load_adapter("m", "b.safetensors", weight=float("nan")), "finite"),
            (lambda: pool.set_adapters("m", {"b": 1}), "no adapter 'b'; it has 'a'"),
            (lambda: pool.set_adapters("m", {"a": float("inf")}), "finite"),
            (lambda: pool.set_adapters("m", {"a": True}), "finite"),
            (lambda: pool.set_adapters("m", "a"), "one name"),
            (lambda: pool.set_adapters("x"), "no model 'x'"),
            (lambda: pool.unload_adapter("m", "b"), "no adapter 'b'"),
        ]
        for call, match in wrong:
            with pytest.raises(penstock.ConfigError, match=match):
                call()
        check_books(pool)
        assert pool.adapters("m") == ["a", "style", "hats"]


def test_unloading_a_model_leaves_its_module_without_hooks(tmp_path: Path) -> None:
    with pool_of(tmp_path) as pool:
        pool.load_adapter("m", lora_file(tmp_path / "a.safetensors"))
        pool.set_adapters("m", ["a"])
        module = pool._models["m"].bounds["net"].module
        outputs(pool)
        assert module.first._forward_hooks
        pool.unload("m")
        assert not module.first._forward_hooks
        stats = pool.stats()
        assert stats.adapters_bytes == stats.adapters_device_bytes == 0
        check_books(pool)
        pool.register("m", {"net": tmp_path / "net.safetensors"}, build={"net": Net})
        assert pool.adapters("m") == []


def test_threads_with_models_of_their_own_change_adapters_at_once(tmp_path: Path) -> None:
    with pool_of(tmp_path, adapter_budget=20_000) as pool:
        for number in range(3):
            file = net_file(tmp_path / f"net{number}.safetensors", seed=number)
            pool.register(f"m{number}", {"net": file}, build={"net": Net})
            for seed in range(4):
                pool.load_adapter(f"m{number}", lora_file(tmp_path / f"{number}-{seed}.safetensors", seed))
        size = pool.explain("m").components[0].nbytes
        pool.resize(device=2 * size + 20_000)
        # Made here: torch's generator is the threads' common one.
        nets, pairs, x = (
            [net(seed=number) for number in range(3)],
            [matrices(n)["first"] for n in range(4)],
            inputs()[0],
        )
        wrong: list[Any] = []

        def work(number: int) -> None:
            try:
                for turn in range(30):
                    seed = turn % 4
                    pool.set_adapters(f"m{number}", [f"{number}-{seed}"], merge=turn % 3 == 0)
                    with pool.use(f"m{number}") as model, torch.no_grad():
                        got = model["net"].first(x)
                    first = nets[number].first
                    weight = added(first.weight.data, *pairs[seed], 1)
                    expected = torch.nn.functional.linear(x, weight, first.bias)
                    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            except BaseException as error:  # noqa: BLE001
                wrong.append(error)

        threads = [threading.Thread(target=work, args=[number]) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong
        check_books(pool)


def test_peft_configurations_say_how_much_is_added(tmp_path: Path) -> None:
    plain = peft_directory(tmp_path / "plain")
    rslora = peft_directory(tmp_path / "rslora", use_rslora=True)
    pattern = peft_directory(tmp_path / "pattern", alpha_pattern={"blocks.2": 6, "^first": 1})
    with pool_of(tmp_path) as pool:
        for path in (plain, rslora, pattern):
            pool.load_adapter("m", path)
        base = net().state_dict()
        for name, alphas in (
            ("plain", {"first": 8 / 4, "blocks.0": 8 / 2, "blocks.2": 8 / 2, "one": 8 / 3}),
            ("rslora", {"first": 8 / 4**0.5, "blocks.2": 8 / 2**0.5}),
            ("pattern", {"first": 1 / 4, "blocks.0": 8 / 2, "blocks.2": 6 / 2}),
        ):
            pool.set_adapters("m", [name], merge=True)
            found = state(pool)
            for layer, factor in alphas.items():
                key = f"{layer}.weight"
                assert torch.equal(found[key], added(base[key], *matrices(1)[layer], factor)), (name, layer)
        for number, settings in enumerate(({"use_dora": True}, {"peft_type": "IA3"}, {"modules_to_save": ["norm"]})):
            pool.load_adapter("m", peft_directory(tmp_path / str(number), **settings))
            with pytest.raises(penstock.AdapterError, match=r"adapter_config\.json says"):
                pool.set_adapters("m", [str(number)])
        (plain / "adapter_config.json").write_text("{")
        pool.load_adapter("m", plain, name="no json")
        with pytest.raises(penstock.AdapterError, match="no JSON"):
            pool.set_adapters("m", ["no json"])
        (plain / "adapter_config.json").unlink()
        pool.load_adapter("m", plain, name="no config")
        with pytest.raises(penstock.AdapterError, match="alpha is not known"):
            pool.set_adapters("m", ["no config"])
        check_books(pool)


def test_kohya_names_and_alphas_are_known_without_diffusers(tmp_path: Path) -> None:
    tensors = {}
    for layer, (down, up) in matrices(1).items():
        name = f"lora_unet_{layer.replace('.', '_')}"
        tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(2.0)}
    safetensors_torch.save_file(tensors, tmp_path / "a.safetensors")
    with pool_of(tmp_path) as pool:
        pool.load_adapter("m", tmp_path / "a.safetensors")
        pool.set_adapters("m", ["a"], merge=True)
        found, base = state(pool), net().state_dict()
        for layer, (down, up) in matrices(1).items():
            key = f"{layer}.weight"
            assert torch.equal(found[key], added(base[key], down, up, 2 / down.shape[0])), layer


def test_an_adapter_says_which_component_it_is_for_or_is_asked(tmp_path: Path) -> None:
    files = {of: net_file(tmp_path / f"{of}.safetensors", seed=seed) for seed, of in enumerate(("net", "other"))}
    with ModelPool("cpu", host_budget="8MiB", device_budget="8MiB") as pool:
        pool.register("m", files, build={"net": Net, "other": Net})
        pool.load_adapter("m", peft_directory(tmp_path / "a"))
        with pytest.raises(penstock.AdapterError, match="component="):
            pool.set_adapters("m", ["a"])
        pool.load_adapter("m", tmp_path / "a", name="said", component="other")
        pool.set_adapters("m", ["said"], merge=True)
        with pool.use("m") as model:
            assert same(model["net"].state_dict(), net(seed=0).state_dict())
            base = net(seed=1).first.weight
            assert torch.equal(model["other"].first.weight, added(base, *matrices(1)["first"], 2))
        check_books(pool)


def test_explain_names_the_adapters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pool_of(tmp_path) as pool:
        pool.load_adapter("m", lora_file(tmp_path / "a.safetensors"))
        pool.set_adapters("m", {"a": 0.5}, merge=True)
        state(pool)
        assert "adapter a: 0.5" in str(pool.explain("m"))
