"""A recording ends with its context: for the threads that it started, the heap, the process, and the other ranks."""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

import penstock
from conftest import Raw, raw_bytes, write_raw

torch = pytest.importorskip("torch")

from torch import nn

from penstock import patches
from penstock.recording import Recorder


@pytest.fixture
def checkpoint(tmp_path: Path) -> penstock.Checkpoint:
    tensors = {name: Raw("F32", (8, 8), raw_bytes("F32", (8, 8), number)) for number, name in enumerate("ab")}
    return penstock.open(write_raw(tmp_path / "x.safetensors", tensors))


def same(one: Any, other: Any) -> bool:
    """Whether all bits are."""
    return bool(one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8)))


# Threads that outlive it


class Worker(threading.Thread):
    """Does what it is asked to, in a thread that was started while something was recorded."""

    recorder: weakref.ref[Recorder]

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._tasks: Queue[tuple[Callable[[], Any], Queue[Any]]] = Queue()

    def run(self) -> None:
        while True:
            task, results = self._tasks.get()
            try:
                results.put(task())
            except StopIteration:
                return results.put(None)

    def do(self, task: Callable[[], Any]) -> Any:
        results: Queue[Any] = Queue()
        self._tasks.put((task, results))
        return results.get(timeout=60)

    def stop(self) -> None:
        def ends() -> None:
            raise StopIteration

        self.do(ends)
        self.join()


@pytest.fixture
def worker(checkpoint: penstock.Checkpoint) -> Iterator[Worker]:
    """A thread that has helped to load, whose recording is over."""
    made, parameter = Worker(), torch.zeros(8, 8)

    def records() -> weakref.ref[Recorder]:
        with Recorder() as recorder:
            weight = dict(recorder.weights(checkpoint))["a"]
            made.start()
            made.do(lambda: parameter.copy_(weight))
            assert made.do(modes) == (1, 1)
        return weakref.ref(recorder)

    made.recorder = records()
    assert same(parameter, checkpoint.load(["a"])["a"])
    yield made
    made.stop()


def modes() -> tuple[int, int]:
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def test_a_thread_that_outlives_the_recording_holds_nothing_of_it(worker: Worker) -> None:
    gc.collect()
    assert worker.recorder() is None


def test_a_thread_that_a_thread_which_outlives_the_recording_starts_is_not_watched(worker: Worker) -> None:
    def starts() -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(modes()))
        thread.start()
        thread.join()
        return found

    assert worker.do(starts) == [(0, 0)]


def test_a_thread_that_is_started_by_way_of_two_recordings_replacements_runs(checkpoint: penstock.Checkpoint) -> None:
    original = threading.Thread.start
    try:
        with Recorder():
            ours = threading.Thread.start
            threading.Thread.start = lambda self: ours(self)  # type: ignore[method-assign]  # noqa: PLW0108
        parameter = torch.zeros(8, 8)
        with Recorder() as recorder:
            weight = dict(recorder.weights(checkpoint))["a"]
            thread = threading.Thread(target=lambda: parameter.copy_(weight))
            thread.start()
            thread.join()
        assert same(parameter, checkpoint.load(["a"])["a"])
    finally:
        threading.Thread.start = original  # type: ignore[method-assign]


# The process


def test_a_recording_never_sets_torchs_default_dtype(
    checkpoint: penstock.Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write_raw(tmp_path / "i.safetensors", {"n": Raw("I32", (6, 4), raw_bytes("I32", (6, 4), 3))})
    works: list[Callable[[Any], Any]] = [
        lambda t: t / 7,
        lambda t: torch.exp(t[1:]),
        lambda t: t * 0.1,
        lambda t: torch.where(t > 3, 1.0, 2.0),
        lambda t: torch.sqrt(t.t()),
        lambda t: 2.5 - t,
        lambda t: torch.mul(t, 3),
        lambda t: t.to(torch.float64) / 3,
        lambda t: torch.add(t, torch.ones(6, 4, dtype=torch.int32), alpha=2) / torch.arange(4),
    ]
    set_by: list[Any] = []
    before, really = torch.get_default_dtype(), torch.set_default_dtype
    try:
        for dtype in (torch.float64, torch.bfloat16):
            really(dtype)
            eager = [work(penstock.open(path).load()["n"]) for work in works]
            parameters = [torch.zeros(made.shape, dtype=made.dtype) for made in eager]
            with Recorder() as recorder:
                for work, parameter in zip(works, parameters, strict=True):
                    made = work(dict(recorder.weights(penstock.open(path)))["n"])
                    assert made.dtype == parameter.dtype
                    parameter.copy_(made)
                # Another thread's doing, say.
                really(torch.float32)
                monkeypatch.setattr(torch, "set_default_dtype", set_by.append)
            monkeypatch.undo()
            assert all(map(same, eager, parameters))
            # But for the choice by a value.
            assert len(recorder.statistics.eager) <= 1
    finally:
        really(before)
    assert set_by == []


def attributes() -> dict[tuple[str, str], Any]:
    """All that modules and their classes have, of everything that is imported besides Penstock and these tests."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in list(sys.modules.items()):
        space = getattr(module, "__dict__", None)
        if space is None or name.partition(".")[0] in {"penstock", __name__, "__main__", "conftest"}:
            continue
        for attribute, value in list(space.items()):
            found[name, attribute] = value
            # Where it is defined, or in C: classes are everywhere they are imported.
            if issubclass(type(value), type) and value.__module__ in {name, "torch"}:
                for inner, own in list(vars(value).items()):
                    found[f"{name}.{attribute}", inner] = own
    return found


def is_of_class(before: dict[tuple[str, str], Any], key: tuple[str, str]) -> bool:
    """Whether it is in a class that was there."""
    module, _, name = key[0].rpartition(".")
    return isinstance(before.get((module, name)), type)


def differing(before: dict[tuple[str, str], Any], now: dict[tuple[str, str], Any]) -> set[str]:
    # What was not there was imported or is kept from now on, and some are counts and the like.
    ignored = (int, float, str, dict, list, set, tuple, types.ModuleType)
    return {
        ".".join(key)
        for key, value in now.items()
        if value is not before.get(key)
        and (key in before or is_of_class(before, key))
        and not isinstance(value, ignored)
    }


def test_every_attribute_that_a_recording_replaces_is_listed_and_goes(checkpoint: penstock.Checkpoint) -> None:
    def records(during: Callable[[], Any]) -> Any:
        with Recorder(keep="eager") as recorder:
            module = nn.Linear(8, 8)
            module.weight.data.copy_(dict(recorder.weights(checkpoint))["a"])
            return during()

    records(lambda: None)
    before = attributes()
    replaced = differing(before, records(attributes))
    left = differing(before, attributes())
    by_another_name = {
        "concurrent.futures.thread.ThreadPoolExecutor.submit": "concurrent.futures.ThreadPoolExecutor.submit",
        "torch.nn.parameter.Parameter.__new__": "torch.nn.Parameter.__new__",
        "torch.nn.parameter.Buffer.__new__": "torch.nn.Buffer.__new__",
    }
    # The class of tensors is in many modules, by several names.
    once = set()
    for name in replaced:
        owner, _, attribute = name.rpartition(".")
        module, _, kind = owner.rpartition(".")
        once.add(f"torch.Tensor.{attribute}" if before.get((module, kind)) is torch.Tensor else name)
    assert {by_another_name.get(name, name) for name in once} == {
        target for when, targets in patches.PATCHES.items() if "`Recorder`" in when for target in targets
    }
    assert replaced > {*by_another_name}
    assert left == set()


# Weights that were kept


@pytest.mark.parametrize("when", ["before", "during", "both"])
def test_weights_that_frozen_objects_keep_become_ordinary_tensors(checkpoint: penstock.Checkpoint, when: str) -> None:
    class Holder:
        pass

    holder = Holder()
    gc.collect()
    try:
        if when != "during":
            gc.freeze()
        with Recorder(keep="eager") as recorder:
            holder.weights = dict(recorder.weights(checkpoint))  # type: ignore[attr-defined]
            holder.part = holder.weights["a"][2:, 3]  # type: ignore[attr-defined]
            if when != "before":
                gc.freeze()
            still = gc.get_freeze_count()
        # What it froze stays so.
        assert gc.get_freeze_count() >= still * 0.9
    finally:
        gc.unfreeze()
    for name, tensor in checkpoint.load().items():
        assert type(holder.weights[name]) is torch.Tensor  # type: ignore[attr-defined]
        assert same(holder.weights[name], tensor)  # type: ignore[attr-defined]
    assert type(holder.part) is torch.Tensor  # type: ignore[attr-defined]


def test_what_loading_code_freezes_stays_frozen(checkpoint: penstock.Checkpoint) -> None:
    parameter = torch.zeros(8, 8)
    try:
        with Recorder(keep="eager") as recorder:
            for _, weight in recorder.weights(checkpoint):
                parameter.copy_(weight)
                del weight
            made = [[number] for number in range(100)]
            gc.freeze()
            still = gc.get_freeze_count()
        assert gc.get_freeze_count() >= still * 0.9
        del made
    finally:
        gc.unfreeze()


def test_a_recording_that_leaves_no_weight_searches_no_objects(
    checkpoint: penstock.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    parameter = torch.zeros(8, 8)
    with Recorder(keep="eager") as recorder:
        for _, weight in recorder.weights(checkpoint):
            parameter.copy_(weight)
            del weight
        for name in ("collect", "get_objects", "get_referrers"):
            monkeypatch.setattr(gc, name, lambda *_, name=name: calls.append(name))
    monkeypatch.undo()
    assert calls == []
    assert same(parameter, checkpoint.load(["b"])["b"])


# Other ranks


class Ranks:
    """The others, who hear one thing."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def opt_out(self, why: Any) -> None:
        self.heard.append(why)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
def test_whatever_ends_a_recording_is_told_to_the_other_ranks(error: type[BaseException]) -> None:
    ranks = Ranks()
    with pytest.raises(error), Recorder(sharing=ranks):  # type: ignore[arg-type]
        raise error("so")
    assert [(type(why), str(why)) for why in ranks.heard] == [(error, "so")]


def test_a_weight_that_cannot_be_made_real_is_told_to_the_other_ranks(
    checkpoint: penstock.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()

    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError("no memory is left")

    kept: list[Any] = []

    def records() -> None:
        with Recorder(sharing=ranks, keep="eager") as recorder:  # type: ignore[arg-type]
            kept.extend(weight for _, weight in recorder.weights(checkpoint))
            monkeypatch.setattr("penstock.recording.recorder.empty_for", full)

    with pytest.raises(MemoryError):
        records()
    assert [type(why) for why in ranks.heard] == [MemoryError]
