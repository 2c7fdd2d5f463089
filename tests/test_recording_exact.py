"""A recorded load ends with the bits of an eager load, past what torch's modes and subclasses see by themselves."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import penstock
from conftest import Raw, raw_bytes, write_raw

torch = pytest.importorskip("torch")

import numpy as np
from torch import nn

from penstock.integrations.shared.filling import Weights, fill
from penstock.recording import Recorder, VerificationError, calls, copy_state, differing, eager_reader, verify_equal
from penstock.recording.lazy import empty_for
from programs.compare import Runner, described, make
from programs.language import Capsule

Pairs = Iterator[tuple[str, Any]]
PROGRAMS = 2000


@pytest.fixture
def checkpoint(tmp_path: Path) -> penstock.Checkpoint:
    tensors = {name: Raw("F32", (8, 8), raw_bytes("F32", (8, 8), number)) for number, name in enumerate("ab")}
    return penstock.open(write_raw(tmp_path / "x.safetensors", tensors))


def check(checkpoint: penstock.Checkpoint, load: Callable[[Pairs], list[Any]], **settings: Any) -> Any:
    """Runs loading code with ordinary and with lazy tensors; what it returns must be the same, bit by bit."""

    def bits(tensor: Any) -> Any:
        assert tensor.untyped_storage().nbytes() > 0
        assert tensor.data_ptr() != 0
        return type(tensor), tensor.shape, tensor.detach().contiguous().numpy().tobytes()

    with torch.no_grad():
        eager = list(map(bits, load(iter(sorted(checkpoint.load().items())))))
        with Recorder(**settings) as recorder:
            made = load(recorder.weights(checkpoint, sorted(checkpoint)))
        assert list(map(bits, made)) == eager
    return recorder.statistics


def by_data(parameter: Any, weight: Any) -> Any:
    parameter.data = weight
    return parameter


def by_part(parameter: Any, weight: Any) -> Any:
    parameter.data = weight.t()[2:]
    return parameter


def by_grad(parameter: Any, weight: Any) -> Any:
    parameter.grad = weight
    return parameter.grad


def by_real(parameter: Any, weight: Any) -> Any:
    parameter.real = weight
    return parameter


SETTERS = [
    by_data, by_part, by_grad, by_real, lambda _, weight: nn.Parameter(weight),
    lambda _, weight: nn.Parameter(weight.to(torch.float64)), lambda _, weight: nn.Buffer(weight),
]  # fmt: skip


@pytest.mark.parametrize("keep", ["lazy", "eager"])
@pytest.mark.parametrize("setter", SETTERS)
def test_a_weight_that_becomes_a_parameters_memory_is_read(
    checkpoint: penstock.Checkpoint, setter: Callable[[Any, Any], Any], keep: str
) -> None:
    statistics = check(
        checkpoint, lambda weights: [setter(nn.Parameter(torch.zeros(8, 8)), dict(weights)["a"])], keep=keep
    )
    assert statistics.plans <= 1


def test_setters_refuse_a_weight_that_outlives_its_recorder_or_take_its_values(checkpoint: penstock.Checkpoint) -> None:
    with Recorder() as recorder:
        kept = dict(recorder.weights(checkpoint))
    parameter = nn.Parameter(torch.ones(8, 8))
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = kept["a"]
    parameter.grad = kept["b"]
    wanted = checkpoint.load()
    assert verify_equal({"b": parameter.grad + 0}, {"b": wanted["b"] + 0}) == 1
    assert bool((parameter + 0 == 1).all()), "it still has its memory"
    with torch.no_grad():
        parameter.copy_(kept["a"])
    assert verify_equal({"a": parameter}, {"a": wanted["a"]}) == 1


def test_kept_weights_become_ordinary_tensors(checkpoint: penstock.Checkpoint) -> None:
    module = nn.Module()

    def load(weights: Pairs) -> None:
        for name, weight in weights:
            module.register_buffer(name, weight)
            module.kept = [weight[2:]]

    with Recorder(keep="eager") as recorder:
        load(recorder.weights(checkpoint))
    assert (type(module.a), type(module.kept[0]), recorder.statistics.plans) == (torch.Tensor, torch.Tensor, 1)
    module.b.zero_()
    assert verify_equal({"a": module.a}, {"a": checkpoint.load()["a"]}) == 1
    assert not module.kept[0].any(), "it is a view still"


COPYING = [
    lambda p: p[torch.tensor([3, 1, 0, 2, 4, 5, 7, 6])],
    lambda p: p[[7, 6, 5, 4, 3, 2, 1, 0]],
    lambda p: p[torch.tensor([True, False] * 4)].repeat(2, 1),
    lambda p: p.t().reshape(-1).view(8, 8),
    lambda p: torch.flatten(p.t()).view(8, 8),
    lambda p: p.t().reshape_as(torch.empty(4, 16)).view(8, 8),
    lambda p: p.t().contiguous(),
    lambda p: p.to(torch.float64).float(),
]


@pytest.mark.parametrize("small", [8, 1 << 18], ids=["large", "small"])
@pytest.mark.parametrize("copying", COPYING)
def test_a_function_that_may_copy_reads_what_was_copied_before(
    checkpoint: penstock.Checkpoint, monkeypatch: pytest.MonkeyPatch, copying: Callable[[Any], Any], small: int
) -> None:
    monkeypatch.setattr("penstock.recording.eager_reader.SMALL_BYTES", small)

    def load(weights: Pairs) -> list[Any]:
        parameters = [nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(8, 8))]
        parameters[0].data.copy_(dict(weights)["a"])
        parameters[1].data.copy_(copying(parameters[0].data))
        parameters[0].data.copy_(copying(parameters[0].data))
        return parameters

    check(checkpoint, load)


def in_thread(do: Callable[[], Any]) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


def in_new_pool(do: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(do).result()


def test_threads_read_what_was_copied_before_and_may_copy(checkpoint: penstock.Checkpoint) -> None:
    with ThreadPoolExecutor(1) as existing:
        existing.submit(int).result()
        for run in (in_thread, in_new_pool, lambda do: existing.submit(do).result()):

            def load(weights: Pairs, run: Any = run) -> list[Any]:
                first, second, third = (torch.zeros(8, 8) for _ in range(3))
                kept = dict(weights)
                first.copy_(kept["a"])
                run(lambda: second.copy_(first * 2))
                run(lambda: third.copy_(kept["b"]))
                third.add_(1)
                run(lambda: kept["a"].mul_(2))
                first[0].copy_(kept["a"][0])
                return [first, second, third]

            check(checkpoint, load)
    assert threading.Thread.start.__module__ == "threading", "what is replaced while recording is put back"


def test_what_others_than_torch_see_is_filled_when_it_is_copied_to(checkpoint: penstock.Checkpoint) -> None:
    def load(weights: Pairs) -> list[Any]:
        kept = dict(weights)
        viewed = torch.zeros(8, 8)
        array = viewed.numpy()
        viewed.copy_(kept["a"])
        seen = torch.from_numpy(array.copy())
        shared = np.zeros(72, dtype=np.float32)
        whole, part = torch.from_numpy(shared), torch.from_numpy(shared[2:])
        whole[:64].copy_(kept["a"].view(-1))
        part[:64].mul_(2)
        addressed = torch.zeros(8, 8)
        address = addressed.data_ptr()
        addressed.copy_(kept["b"])
        raw = torch.frombuffer(bytearray(ctypes.string_at(address, 256)), dtype=torch.float32)
        return [seen, whole, raw]

    check(checkpoint, load)


@pytest.mark.parametrize(
    "capsule",
    [
        lambda tensor: torch.to_dlpack(tensor),  # noqa: PLW0108 - looked up when it is called
        lambda tensor: torch.utils.dlpack.to_dlpack(tensor),  # noqa: PLW0108 - looked up when it is called
        lambda tensor: tensor.__dlpack__(),
        lambda tensor: tensor.__dlpack__(max_version=(1, 0)),
    ],
    ids=["torch", "utils", "method", "versioned"],
)
def test_what_a_dlpack_capsule_shares_is_filled_when_it_is_copied_to(
    checkpoint: penstock.Checkpoint, capsule: Callable[[Any], Any]
) -> None:
    def array(tensor: Any) -> Any:
        return np.from_dlpack(Capsule(capsule(tensor)))

    def load(weights: Pairs) -> list[Any]:
        kept = dict(weights)
        before, after, written = torch.zeros(8, 8), torch.zeros(8, 8), torch.zeros(8, 8)
        early = array(before)
        before.copy_(kept["a"])
        seen = torch.from_numpy(early.copy())
        after.copy_(kept["a"])
        late = torch.from_numpy(array(after).copy())
        # What is written past torch, after the copy, stays.
        written.copy_(kept["b"])
        ctypes.memset(array(written).ctypes.data, 7, 128)
        of_weight = array(kept["b"])
        kept["b"].view(torch.uint8).bitwise_xor_(1)
        # Of a part, whose memory begins elsewhere.
        parted = torch.zeros(8, 8)
        alias = torch.from_dlpack(Capsule(capsule(parted[4:])))
        parted.copy_(kept["a"])
        alias.view(torch.uint8).bitwise_xor_(1)
        return [seen, late, written, torch.from_numpy(of_weight.copy()), parted]

    check(checkpoint, load)


def test_memory_whose_address_was_taken_goes_when_loading_code_drops_it(checkpoint: penstock.Checkpoint) -> None:
    with Recorder() as recorder:
        weights = dict(recorder.weights(checkpoint))
        argument = torch.zeros(8, 8)
        argument.data_ptr()
        with torch._C.DisableTorchFunction():
            memory = weakref.ref(argument.untyped_storage())
        del argument
        assert memory() is None
        # What lies there next may be copied to.
        parameters = [torch.zeros(8, 8) for _ in range(16)]
        for parameter in parameters:
            parameter.copy_(weights["a"])
    eager = checkpoint.load(["a"])["a"]
    assert all(torch.equal(parameter, eager) for parameter in parameters)


def test_whose_address_was_taken_by_a_part_is_filled_all(checkpoint: penstock.Checkpoint) -> None:
    def load(weights: Pairs) -> list[Any]:
        kept = dict(weights)
        parameter, stored = torch.zeros(8, 8), torch.zeros(8, 8)
        parameter[4:].copy_(kept["a"][4:])
        raw = bytearray(ctypes.string_at(parameter[:4].data_ptr(), 256))
        stored[4:].copy_(kept["b"][4:])
        listed = stored[:4].untyped_storage().tolist()
        return [torch.frombuffer(raw, dtype=torch.float32), torch.tensor(listed, dtype=torch.uint8)]

    check(checkpoint, load)


def test_scripts_read_what_was_copied_before(checkpoint: penstock.Checkpoint) -> None:
    script = torch.jit.CompilationUnit("def f(x: Tensor) -> Tensor:\n    return x.t().reshape(-1) + 1\n").f

    def load(weights: Pairs) -> list[Any]:
        parameter = torch.zeros(8, 8)
        parameter.copy_(dict(weights)["a"])
        return [script(parameter)]

    check(checkpoint, load)


class Model(nn.Module):
    """Counts what it is given, and adds to what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.total = nn.Parameter(torch.zeros(8, 8), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(8, 8), requires_grad=False)
        self.loads = 0

    def load_weights(self, weights: Pairs) -> None:
        self.loads += 1
        for _, weight in weights:
            self.total.add_(weight)
            self.scale = nn.Parameter(weight.mul_(2), requires_grad=False)


def filled(checkpoint: penstock.Checkpoint, load: Callable[[Pairs], Any], why_eager: str | None = None) -> Any:
    offered = [Weights(checkpoint, sorted(checkpoint), "")]
    return fill(
        load, offered, lambda sharing: Recorder(sharing=sharing, keep="eager"), why_eager=why_eager, sharing=None
    )


def test_a_model_that_adds_to_its_parameters_loads_once(checkpoint: penstock.Checkpoint) -> None:
    models = Model(), Model()
    filled(checkpoint, models[0].load_weights)
    filled(checkpoint, models[1].load_weights, "to compare")
    assert models[0].loads == 1
    assert verify_equal(*models) == 2


def test_a_models_own_error_comes_through_and_its_code_is_not_run_again(checkpoint: penstock.Checkpoint) -> None:
    calls = []

    def load(weights: Pairs) -> None:
        calls.append(next(weights))
        raise KeyError("layers.99.weight")

    with pytest.raises(KeyError, match=r"layers\.99") as raised:
        filled(checkpoint, load)
    assert (len(calls), raised.value.__cause__, raised.value.__context__) == (1, None, None)


def test_verifying_names_what_differs_and_takes_a_nan_for_a_nan() -> None:
    models = Model(), Model()
    models[0].total.fill_(float("nan"))
    copy_state(*models)
    assert verify_equal(*models) == 2
    models[1].scale[3, 4] = -0.0
    assert differing(*models) == ["scale"]
    with pytest.raises(VerificationError, match=r"1 of 2 .* differ .*: scale\. .*record.*false") as raised:
        verify_equal(*models)
    assert raised.value.differing == ["scale"]
    bits = torch.tensor([0x7FC0, 0x3F80], dtype=torch.int16)
    nan, other = (made.view(torch.bfloat16) for made in (bits, bits ^ torch.tensor([-0x7FFF, 0], dtype=torch.int16)))
    assert differing({"x": nan}, {"x": other}) == []
    assert differing({"x": nan[0]}, {"x": other[0]}) == []
    assert differing({"x": nan.float().view(torch.complex64)}, {"x": other.float().view(torch.complex64)}) == []
    assert differing({"x": -nan.float().view(torch.complex64)}, {"x": nan.float().view(torch.complex64)}) == ["x"]
    assert differing({"x": nan}, {"x": nan.flip(0)}) == ["x"]
    assert differing({"x": bits}, {"x": other.view(torch.int16)}) == ["x"]
    nans = torch.tensor([0x7F, -1], dtype=torch.int8).view(torch.float8_e4m3fn)
    assert differing({"x": nans}, {"x": nans.view(torch.int8).flip(0).view(torch.float8_e4m3fn)}) == []
    assert differing({"x": torch.zeros(2)}, {"x": torch.zeros(3), "y": torch.zeros(1)}) == ["y", "x"]


SHAPING = [
    lambda w: w.unsqueeze_(0),
    lambda w: w.t_(),
    lambda w: w.resize_(3),
    lambda w: w.transpose_(0, 1),
]


@pytest.mark.parametrize("keep", ["lazy", "eager"])
@pytest.mark.parametrize("shaping", SHAPING)
def test_a_function_that_changes_a_weights_shape_changes_the_same_object(
    checkpoint: penstock.Checkpoint, shaping: Callable[[Any], Any], keep: str
) -> None:
    def load(weights: Pairs) -> list[Any]:
        weight = dict(weights)["a"]
        same = shaping(weight)
        assert same is weight
        return [weight, torch.vmap(lambda row: row * 2)(weight)]

    check(checkpoint, load, keep=keep)


@pytest.mark.parametrize("keep", ["lazy", "eager"])
@pytest.mark.parametrize("same", [lambda v: v.flatten(), torch.flatten, lambda v: v.flatten(-1)])
def test_a_view_that_is_the_weight_itself_follows_it(
    checkpoint: penstock.Checkpoint, same: Callable[[Any], Any], keep: str
) -> None:
    def load(weights: Pairs) -> list[Any]:
        row = dict(weights)["a"][3]
        view = same(row)
        assert view is row
        view.unsqueeze_(0)
        return [row, view]

    check(checkpoint, load, keep=keep)


@pytest.mark.parametrize("keep", ["lazy", "eager"])
def test_a_function_that_returns_its_argument_returns_the_same_object(
    checkpoint: penstock.Checkpoint, keep: str
) -> None:
    def load(weights: Pairs) -> list[Any]:
        weight = dict(weights)["a"]
        scaled = weight.mul_(2)
        assert scaled is weight
        assert weight.contiguous() is weight
        scaled.data = torch.ones(3)
        return [weight, scaled]

    check(checkpoint, load, keep=keep)


@pytest.mark.parametrize("keep", ["lazy", "eager"])
def test_a_weight_that_was_given_another_dtype_is_of_that_dtype_to_all_of_torch(
    checkpoint: penstock.Checkpoint, keep: str
) -> None:
    def load(weights: Pairs) -> list[Any]:
        kept = dict(weights)
        kept["a"].data = torch.arange(64, dtype=torch.int32)
        number = torch.zeros(64, dtype=torch.int32)
        # It checks dtypes before it looks for subclasses.
        number.set_(kept["a"])
        return [number, kept["a"]]

    check(checkpoint, load, keep=keep)


def test_a_weights_gradient_may_be_given_another_dtype(checkpoint: penstock.Checkpoint) -> None:
    def load(weights: Pairs) -> list[Any]:
        weight = dict(weights)["a"]
        parameter = nn.Parameter(torch.ones(8, 8))
        weight.grad = parameter
        module = nn.Module()
        module.register_parameter("p", parameter)
        module.to(torch.float64)
        assert weight.grad is parameter
        return [weight, weight.grad]

    check(checkpoint, load, keep="eager")


@pytest.mark.parametrize("keep", ["lazy", "eager"])
def test_a_weight_that_is_a_gradient_stays_the_same_object(checkpoint: penstock.Checkpoint, keep: str) -> None:
    def load(weights: Pairs) -> list[Any]:
        weight = dict(weights)["a"]
        parameter = nn.Parameter(torch.ones(8, 8))
        parameter.grad = weight
        assert parameter.grad is weight
        weight.data = weight[2:]
        return [parameter.grad, weight]

    check(checkpoint, load, keep=keep)


def test_empty_like_of_an_empty_weight_has_the_strides_of_an_eager_one(checkpoint: penstock.Checkpoint) -> None:
    def empty(weight: Any) -> Any:
        return torch.empty_like(weight[:0].unsqueeze(0)).stride()

    with Recorder() as recorder:
        assert empty(dict(recorder.weights(checkpoint))["a"]) == empty(checkpoint.load()["a"])


def test_a_read_that_fails_is_the_loads_error_even_where_loading_code_catches_it(
    tmp_path: Path,
) -> None:
    path, hidden = tmp_path / "large.safetensors", tmp_path / "elsewhere"
    write_raw(path, {"a": Raw("F32", (400, 400), bytes(640_000))})
    checkpoint, parameter = penstock.open(path), torch.ones(400, 400)

    def record() -> None:
        with Recorder() as recorder:
            for name, weight in recorder.weights(checkpoint):
                if name == "a":
                    parameter.copy_(weight)
            path.rename(hidden)
            with contextlib.suppress(penstock.PenstockError):
                parameter.sum()
            hidden.rename(path)

    with pytest.raises(penstock.LocationNotFoundError):
        record()


@pytest.mark.parametrize("index", ["array", "bounds"])
def test_an_index_that_changes_later_is_used_as_it_was(checkpoint: penstock.Checkpoint, index: str) -> None:
    def load(weights: Pairs) -> list[Any]:
        weight = dict(weights)["a"]
        rows, first, last = np.arange(2), torch.tensor(0), torch.tensor(2)
        parameter = torch.zeros(2, *weight.shape[1:], dtype=weight.dtype)
        parameter.copy_(weight[rows] if index == "array" else weight[first:last])
        rows += 1
        first += 1
        last += 1
        return [parameter]

    check(checkpoint, load)


def test_memory_that_another_thread_fills_is_waited_for(
    checkpoint: penstock.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread's use of its parameter has everything read that was recorded, that of other threads too."""
    read, reading = Recorder._read, threading.Event()

    def slowly(recorder: Recorder, *args: Any, **named: Any) -> None:
        reading.set()
        time.sleep(0.3)
        read(recorder, *args, **named)

    monkeypatch.setattr(Recorder, "_read", slowly)
    monkeypatch.setattr(eager_reader, "SMALL_BYTES", 0)
    parameters = {name: torch.zeros(8, 8) for name in "ab"}
    copied = threading.Barrier(2)

    def load(name: str, weight: Any) -> None:
        parameters[name].copy_(weight)
        copied.wait(30)
        if name == "b":
            reading.wait(30)
        parameters[name].mul_(2)

    with torch.no_grad(), Recorder() as recorder:
        weights = dict(recorder.weights(checkpoint))
        threads = [threading.Thread(target=load, args=item) for item in weights.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for name, weight in checkpoint.load().items():
        # As bits: some are no numbers.
        assert torch.equal(parameters[name].view(torch.int32), (weight * 2).view(torch.int32)), name


@pytest.mark.parametrize("copying", ["flatten", "reshape", "contiguous", "swapaxes"])
def test_views_of_a_converted_weight_that_torch_has_to_copy_hold_its_values(
    checkpoint: penstock.Checkpoint, copying: str
) -> None:
    """Whether ``flatten`` is a view or a copy depends on strides: of windows that overlap, it is a copy."""
    copies: dict[str, Callable[[Any], Any]] = {
        "flatten": lambda windows: windows.flatten(),
        "reshape": lambda windows: windows.reshape(-1, 2),
        "contiguous": lambda windows: windows.contiguous(),
        "swapaxes": lambda windows: windows.swapaxes(0, 1).reshape(-1),
    }

    def load(weights: Pairs) -> list[Any]:
        converted = dict(weights)["a"].to(torch.float64)
        windows = converted.unfold(0, 2, 1)
        # Kept beside what was made of it: they share no memory.
        return [converted, copies[copying](windows)]

    check(checkpoint, load, keep="eager")


def test_elements_are_viewed_as_larger_ones_whatever_dimensions_of_one_there_are(
    checkpoint: penstock.Checkpoint,
) -> None:
    def load(weights: Pairs) -> list[Any]:
        weight = dict(weights)["a"]
        return [weight[2:3].view(torch.int64), weight[:, None].view(torch.float64), weight[3:4, 2:6].view(torch.int64)]

    check(checkpoint, load, keep="eager")


def test_an_index_out_of_bounds_is_an_error_where_it_is_used(checkpoint: penstock.Checkpoint) -> None:
    def load(weights: Pairs) -> list[Any]:
        weight = dict(weights)["a"]
        with pytest.raises(IndexError):
            weight[:, [0, 8]]
        with pytest.raises(IndexError):
            weight[..., torch.tensor([0, -9])]
        with pytest.raises((IndexError, RuntimeError)):
            weight.index_select(1, torch.tensor([8]))
        with pytest.raises((IndexError, RuntimeError)):
            weight.index_select(1, torch.tensor([-1]))
        return [weight[:, [0, -1]], weight[..., torch.tensor([7, 0])], weight.index_select(1, torch.tensor([7]))]

    check(checkpoint, load, keep="eager")


def test_tensors_of_inference_mode_that_were_given_other_memory_are_filled(checkpoint: penstock.Checkpoint) -> None:
    def load(weights: Pairs) -> list[Any]:
        with torch.inference_mode():
            same, converted = torch.zeros(0), torch.zeros(0, dtype=torch.float64)
        same.data, converted.data = torch.zeros(8, 8), torch.zeros(8, 8, dtype=torch.float64)
        with torch.inference_mode():
            for (_, weight), into in zip(weights, (same, converted), strict=True):
                into.copy_(weight)
        return [same, converted]

    check(checkpoint, load)


@pytest.mark.parametrize("inference", [False, True])
def test_a_script_that_returns_its_argument_returns_that_very_tensor(
    checkpoint: penstock.Checkpoint, inference: bool
) -> None:
    script = torch.jit.CompilationUnit("def f(x: Tensor) -> Tensor:\n    return x.add_(1)\n").f
    with torch.inference_mode(inference), Recorder() as recorder:
        (_, weight), *_ = recorder.weights(checkpoint, ["a"])
        assert script(weight) is weight


def test_what_is_called_when_a_future_is_done_is_seen_and_what_that_starts_and_submits_too(
    checkpoint: penstock.Checkpoint,
) -> None:
    def load(weights: Pairs) -> list[Any]:
        kept = dict(weights)
        of_worker, of_thread, of_task, here = (torch.zeros(8, 8) for _ in range(4))
        added, started = threading.Event(), []

        def copies() -> None:
            added.wait(60)
            for parameter in (of_worker, of_thread, of_task):
                parameter.copy_(kept["a"])

        def ended(future: Any) -> None:
            assert future.result() is None
            of_worker.view(torch.int32).bitwise_xor_(1)
            started.append(threading.Thread(target=of_thread.view(torch.int32).bitwise_xor_, args=(2,)))
            started[0].start()
            pool.submit(of_task.view(torch.int32).bitwise_xor_, 3)

        with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as first:
            future = first.submit(copies)
            future.add_done_callback(ended)
            added.set()
            first.shutdown()
            # It is called in this thread, since the future is done.
            here.copy_(kept["b"])
            future.add_done_callback(lambda _: here.view(torch.int32).bitwise_xor_(4))
        started[0].join()
        return [of_worker, of_thread, of_task, here]

    check(checkpoint, load)


def test_a_future_that_outlives_the_recording_calls_what_it_was_given(checkpoint: penstock.Checkpoint) -> None:
    goes_on, stacks = threading.Event(), []
    with ThreadPoolExecutor(1) as pool:
        with Recorder() as recorder:
            dict(recorder.weights(checkpoint))
            future = pool.submit(goes_on.wait, 60)
            future.add_done_callback(lambda done: stacks.append((done, torch._C._len_torch_dispatch_stack())))
        goes_on.set()
    assert stacks == [(future, 0)]


def test_a_pool_that_outlives_the_recording_is_not_watched_any_more(checkpoint: penstock.Checkpoint) -> None:
    with ThreadPoolExecutor(1) as pool:
        with Recorder() as recorder:
            weights = dict(recorder.weights(checkpoint))
            parameter = torch.zeros(tuple(weights["a"].shape), dtype=weights["a"].dtype)
            pool.submit(parameter.copy_, weights["a"]).result()
        assert torch.equal(parameter, checkpoint.load(["a"])["a"])
        assert pool.submit(torch._C._len_torch_function_stack).result() == 0
        assert pool.submit(torch._C._len_torch_dispatch_stack).result() == 0


def test_copies_that_still_run_when_weights_become_ordinary_tensors_are_made(checkpoint: penstock.Checkpoint) -> None:
    eager = checkpoint.load(["a"])["a"]
    with ThreadPoolExecutor(4) as pool:
        for at in range(0, 200, 4):
            parameters = [torch.zeros(8, 8) for _ in range(8)]
            with Recorder(keep="eager") as recorder:
                (_, weight), *_ = recorder.weights(checkpoint, ["a"])
                copies = [
                    pool.submit(
                        lambda into, weight, wait: (time.sleep(wait), into.copy_(weight)), into, weight, 1e-5 * at
                    )
                    for into in parameters
                ]
            for copied in copies:
                copied.result()
            assert all(torch.equal(parameter, eager) for parameter in parameters)


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
def test_threads_take_parts_of_weights_while_they_become_ordinary_tensors(checkpoint: penstock.Checkpoint) -> None:
    eager = checkpoint.load()

    def work(name: str, weight: Any, stop: threading.Event) -> None:
        while not stop.is_set():
            into = torch.zeros(8, 8)
            into[2:].copy_(weight[2:])
            into[:2] = weight.narrow(0, 0, 2)
            assert into.numpy().tobytes() == eager[name].numpy().tobytes()

    with ThreadPoolExecutor(4) as pool:
        for _ in range(60):
            stop = threading.Event()
            with Recorder(keep="eager") as recorder:
                weights = dict(recorder.weights(checkpoint))
                running = [pool.submit(work, name, weights[name], stop) for name in ("a", "b", "a", "b")]
                time.sleep(1e-3)
            stop.set()
            for ended in running:
                ended.result()


@pytest.mark.usefixtures("switching")
def test_threads_make_parameters_of_weights_while_they_become_ordinary_tensors(checkpoint: penstock.Checkpoint) -> None:
    def work(weight: Any, stop: threading.Event) -> None:
        while not stop.is_set():
            nn.Parameter(weight, requires_grad=False)
            torch.to_dlpack(weight)

    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            stop = threading.Event()
            with Recorder(keep="eager") as recorder:
                running = [pool.submit(work, weight, stop) for weight in dict(recorder.weights(checkpoint)).values()]
            stop.set()
            for ended in running:
                ended.result()


@pytest.mark.usefixtures("switching")
def test_threads_use_a_weight_that_others_copy_deeply(checkpoint: penstock.Checkpoint) -> None:
    eager = checkpoint.load(["a"])["a"].numpy().tobytes()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(60):
            with Recorder() as recorder:
                (_, weight), *_ = recorder.weights(checkpoint, ["a"])
                into = [torch.zeros(8, 8) for _ in range(16)]
                running = [pool.submit(lambda to, of: to.copy_(of[:]), to, weight) for to in into]
                copies = [pool.submit(copy.deepcopy, weight) for _ in range(2)]
                for ended in [*running, *copies]:
                    ended.result()
            assert {made.numpy().tobytes() for made in [*into, *(ended.result() for ended in copies)]} == {eager}


def test_a_weight_that_another_thread_uses_is_real_when_it_is_known_to_be_read(
    checkpoint: penstock.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def note(self: Recorder, memory: Any, value: Any) -> bool:
        seen.append(weight.lazy_storage.materialised)
        return False

    with Recorder() as recorder:
        (_, weight), *_ = recorder.weights(checkpoint, ["a"])
        monkeypatch.setattr(Recorder, "_record", note)
        parameter = nn.Parameter(weight, requires_grad=False)
    assert seen == [None]
    assert torch.equal(parameter, checkpoint.load(["a"])["a"])


def test_a_fill_that_fails_leaves_the_weight_as_it_was(checkpoint: penstock.Checkpoint) -> None:
    with Recorder() as recorder:
        (_, weight), *_ = recorder.weights(checkpoint, ["a"])
        with pytest.raises(RuntimeError):
            weight.fill_(torch.zeros(3))
        assert torch.equal(weight, checkpoint.load(["a"])["a"])
        assert weight.zero_() is weight
        assert not weight.any()


def test_a_weight_is_filled_where_another_thread_has_made_it_real_meanwhile(
    checkpoint: penstock.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    views: list[Any] = []

    def empty(storage: Any) -> Any:
        if not views:
            views.append(None)
            in_thread(lambda: views.append(weight.view(torch.int32).bitwise_xor_(1)))
        return empty_for(storage)

    with Recorder() as recorder:
        (_, weight), *_ = recorder.weights(checkpoint, ["a"])
        monkeypatch.setattr(calls, "empty_for", empty)
        weight.zero_()
        weight[0].add_(1)
        assert views[1].view(torch.float32).tolist() == weight.tolist() == [[1.0] * 8, *([0.0] * 8 for _ in range(7))]


def test_a_thread_that_fills_small_tensors_on_a_gpu_waits_for_it(
    checkpoint: penstock.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    with Recorder() as recorder:
        weights = dict(recorder.weights(checkpoint))
        parameters = {name: torch.zeros(8, 8) for name in weights}
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        for pending in recorder._pending.values():
            pending.device = "cuda:0"
        parameters["a"].sum()
        assert waited == []
        in_thread(parameters["b"].sum)
    assert waited == ["cuda:0"]
    assert all(
        parameter.numpy().tobytes() == checkpoint.load([name])[name].numpy().tobytes()
        for name, parameter in parameters.items()
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda weight: weight.pow(-1),
        lambda weight: weight**-1,
        lambda weight: weight.repeat_interleave(2, output_size=1),
        lambda weight: torch.repeat_interleave(weight, 2, 0, output_size=1),
        lambda weight: weight - torch.ones(4, dtype=torch.bool),
        lambda weight: True - weight,
        lambda weight: torch.add(weight, True, torch.ones(4)),
        lambda weight: weight.to(torch.bfloat16) * 1j,
        lambda weight: torch.bitwise_left_shift(weight.bool(), True),
        lambda weight: weight.to(torch.float8_e5m2).flip(0),
        lambda weight: nn.functional.pad(weight.bool()[None], (1, 1), mode="reflect"),
        lambda weight: torch.cat([weight.to(torch.float8_e5m2), torch.ones(2)]),
    ],
)
def test_what_torch_refuses_it_refuses_at_the_call(tmp_path: Path, call: Callable[[Any], Any]) -> None:
    path = write_raw(tmp_path / "whole.safetensors", {"a": Raw("I32", (4,), raw_bytes("I32", (4,), 1))})
    with pytest.raises(RuntimeError) as eager:
        call(penstock.open(path).load()["a"])
    with Recorder() as recorder:
        ((_, weight),) = recorder.weights(penstock.open(path))
        with pytest.raises(RuntimeError) as recorded:
            call(weight)
    assert str(recorded.value) == str(eager.value)


def test_modes_of_others_see_views_of_ordinary_tensors(checkpoint: penstock.Checkpoint) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Recorder() as recorder:
        dict(recorder.weights(checkpoint))
        with Seeing():
            torch.zeros(4, 6).view(-1)
    assert torch.ops.aten.view.default in seen


def test_a_deep_copy_of_weights_and_tensors_shares_what_they_share(checkpoint: penstock.Checkpoint) -> None:
    with Recorder() as recorder:
        weight = dict(recorder.weights(checkpoint))["a"]
        memory = torch.arange(8.0)
        made = copy.deepcopy([weight, memory, memory[2:], weight])
        assert made[0] is made[3]
        made[1].fill_(7)
        assert made[2].tolist() == [7] * 6
        assert memory[0] == 0
    assert torch.equal(made[0], checkpoint.load()["a"])


def test_attributes_that_loading_code_sets_on_a_weight_stay(checkpoint: penstock.Checkpoint) -> None:
    with Recorder(keep="eager") as recorder:
        weight = dict(recorder.weights(checkpoint))["a"]
        weight.is_scale = True
    assert weight.is_scale
    assert vars(weight) == {"is_scale": True}


@pytest.mark.parametrize("how", ["_make_subclass", "as_subclass", "__new__"])
def test_classes_of_parameters_take_weights(checkpoint: penstock.Checkpoint, how: str) -> None:
    class Own(nn.Parameter):
        def __new__(cls, data: Any) -> Any:
            return torch.Tensor._make_subclass(cls, data, False)

    with Recorder() as recorder:
        weight = dict(recorder.weights(checkpoint))["a"]
        made = {
            "_make_subclass": lambda: torch.Tensor._make_subclass(Own, weight),
            "as_subclass": lambda: weight.as_subclass(Own),
            "__new__": lambda: Own(weight),
        }[how]()
    assert type(made) is Own
    assert torch.equal(made.detach().as_subclass(torch.Tensor), checkpoint.load()["a"])
    assert "as_subclass" not in vars(torch.Tensor)


def test_threads_of_others_make_tuples_while_kept_weights_are_searched_for(checkpoint: penstock.Checkpoint) -> None:
    stop = threading.Event()

    def items() -> Iterator[int]:
        for number in range(20):
            time.sleep(0.0002)
            yield number

    def work() -> None:
        while not stop.is_set():
            tuple(item for item in items())

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(work) for _ in range(2)]
        for _ in range(20):
            with Recorder(keep="eager") as recorder:
                kept = dict(recorder.weights(checkpoint))
        stop.set()
        for ended in running:
            ended.result()
    assert all(type(weight) is torch.Tensor for weight in kept.values())


@pytest.mark.parametrize(
    "call",
    [
        lambda weight: weight.div(0, rounding_mode="floor"),
        lambda weight: weight.add(1, alpha=True),
        lambda weight: torch.zeros(4, dtype=torch.uint4).copy_(weight),
        lambda weight: weight.to(torch.uint4),
    ],
)
def test_what_torch_refuses_of_whole_numbers_it_refuses_at_the_call(tmp_path: Path, call: Callable[[Any], Any]) -> None:
    path = write_raw(tmp_path / "whole.safetensors", {"a": Raw("I32", (4,), raw_bytes("I32", (4,), 1))})
    with pytest.raises(Exception) as eager:
        call(penstock.open(path).load()["a"])
    with Recorder() as recorder:
        ((_, weight),) = recorder.weights(penstock.open(path))
        with pytest.raises(type(eager.value)):
            call(weight)


def test_a_recorder_is_left_in_the_thread_that_entered_it(checkpoint: penstock.Checkpoint) -> None:
    recorder = Recorder()
    recorder.__enter__()
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="in the thread that entered it"):
        pool.submit(recorder.__exit__, None, None, None).result()
    torch.zeros(2).add_(1)


def test_what_another_library_replaced_meanwhile_stays(checkpoint: penstock.Checkpoint) -> None:
    original = threading.Thread.start
    try:
        with Recorder() as recorder:
            dict(recorder.weights(checkpoint))
            ours = threading.Thread.start
            theirs = threading.Thread.start = lambda self: ours(self)  # type: ignore[method-assign]  # noqa: PLW0108
        assert threading.Thread.start is theirs
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
    finally:
        threading.Thread.start = original  # type: ignore[method-assign]


# torch gives some warnings once per process: as an error, only the first of two loads would raise it.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("programs", [150, pytest.param(PROGRAMS, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_random_programs_leave_what_eager_loads_leave(tmp_path: Path, programs: int) -> None:
    """Of fixed seeds; ``python -m tests.programs`` runs others."""
    runner = Runner(tmp_path)
    try:
        for seed in range(programs):
            program = make(seed)
            if runner.difference(program) is not None:
                pytest.fail(f"seed {seed}: {described(runner, program)}")
    finally:
        runner.close()


@pytest.mark.parametrize("cut", [torch.tensor_split, torch.Tensor.tensor_split])
def test_a_weight_is_cut_where_a_tensor_says_that_a_weight_was_copied_to(
    tmp_path: Path, cut: Callable[[Any, Any], Any]
) -> None:
    numbers = np.array([2, 5], dtype=np.int64)
    raw = {"at": Raw("I64", (2,), numbers.tobytes()), "w": Raw("F32", (8, 4), raw_bytes("F32", (8, 4)))}
    with Recorder() as recorder:
        weights = dict(recorder.weights(penstock.open(write_raw(tmp_path / "x.safetensors", raw))))
        at = torch.zeros(2, dtype=torch.int64)
        at.copy_(weights["at"])
        assert [part.shape[0] for part in cut(weights["w"], at)] == [2, 3, 3]


def pickled(tensor: Any) -> Any:
    return pickle.loads(pickle.dumps(tensor))  # noqa: S301 - ours


@pytest.mark.parametrize("keep", ["lazy", "eager"])
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled])
def test_copies_of_a_weight_have_the_attributes_that_it_was_given(
    checkpoint: penstock.Checkpoint, copied: Callable[[Any], Any], keep: Any
) -> None:
    with Recorder(keep=keep) as recorder:
        weight = dict(recorder.weights(checkpoint))["a"]
        weight.scale = 3
        made = copied(weight)
        assert made.scale == weight.scale == 3
    assert torch.equal(made, checkpoint.load(["a"])["a"])


def test_modes_of_others_change_what_is_done_with_weights(checkpoint: penstock.Checkpoint) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Doubling(TorchDispatchMode):
        """Whoever adds one adds two."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(args[0], 2) if func is torch.ops.aten.add.Tensor else func(*args, **(kwargs or {}))

    def load(weights: Pairs) -> list[Any]:
        into = torch.zeros(8, 8)
        with Doubling():
            for _, weight in weights:
                assert weight.shape == (8, 8)
                into.copy_(weight + 1)
        return [into]

    check(checkpoint, load)
