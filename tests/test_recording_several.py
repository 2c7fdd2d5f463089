"""Several recorders at once, in one another, in threads, in forked children: one records, and all are exact."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from conftest import Raw, raw_bytes, write_raw

torch = pytest.importorskip("torch")

import numpy as np
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.recording import Recorder, eager_reader


@pytest.fixture
def checkpoint(tmp_path: Path) -> penstock.Checkpoint:
    tensors = {name: Raw("F32", (8, 8), raw_bytes("F32", (8, 8), number)) for number, name in enumerate("ab")}
    tensors["at"] = Raw("I64", (3,), np.array([5, 1, 7], dtype=np.int64).tobytes())
    return penstock.open(write_raw(tmp_path / "x.safetensors", tensors))


def bits(tensor: Any) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()  # type: ignore[no-any-return]


def test_of_two_recorders_the_later_copy_stays(checkpoint: penstock.Checkpoint) -> None:
    eager = checkpoint.load()
    parameter, other = torch.zeros(8, 8), torch.zeros(8, 8)
    with Recorder() as outer:
        parameter.copy_(dict(outer.weights(checkpoint))["a"])
        with Recorder() as inner:
            weights = dict(inner.weights(checkpoint))
            parameter.copy_(weights["b"])
            other.copy_(weights["b"])
        other.copy_(dict(outer.weights(checkpoint))["a"])
    assert parameter.numpy().tobytes() == eager["b"].numpy().tobytes()
    assert torch.equal(other, eager["a"])


def test_a_recorder_in_another_hands_out_ordinary_tensors_and_says_so(checkpoint: penstock.Checkpoint) -> None:
    with Recorder() as outer, Recorder() as inner:
        assert all(type(weight) is torch.Tensor for _, weight in inner.weights(checkpoint))
    assert inner.statistics.fallback == len(checkpoint)
    assert inner.statistics.notes == ["eager tensors: another load of this process is being recorded"]
    assert outer.statistics.notes == []


def test_ordinary_tensors_are_gone_when_loading_code_has_dropped_them(
    checkpoint: penstock.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load to a GPU takes the address of every tensor; that concerns no recording, and keeps none of them."""
    stream = penstock.Checkpoint.stream

    def addressed(self: Any, *args: Any, **named: Any) -> Iterator[tuple[str, Any]]:
        for name, tensor in stream(self, *args, **named):
            torch.Tensor.data_ptr(tensor)
            yield name, tensor

    monkeypatch.setattr(penstock.Checkpoint, "stream", addressed)
    with Recorder() as recorder:
        for _, tensor in recorder.eager(checkpoint):
            with torch._C.DisableTorchFunction():
                memory = weakref.ref(tensor.untyped_storage())
        del tensor
        assert memory() is None


@pytest.mark.parametrize(
    "made",
    [
        lambda weight, there, at: weight * there,
        lambda weight, there, at: torch.cat([weight, there]),
        lambda weight, there, at: weight[at],
        lambda weight, there, at: weight.index_select(0, at),
        lambda weight, there, at: weight.tensor_split(at[1:2])[0],
        lambda weight, there, at: weight.abs().pow(there.abs()),
        lambda weight, there, at: weight.clamp(max=there),
        lambda weight, there, at: weight * nn.Parameter(there),
        lambda weight, there, at: torch.full_like(weight, float(at[0])),
    ],
)
def test_a_recorder_reads_what_another_has_recorded_before(
    checkpoint: penstock.Checkpoint, made: Callable[[Any, Any, Any], Any]
) -> None:
    eager = checkpoint.load()
    there, at = torch.zeros(8, 8), torch.zeros(3, dtype=torch.int64)
    with torch.no_grad(), Recorder() as outer:
        weights = dict(outer.weights(checkpoint))
        there.copy_(weights["a"])
        at.copy_(weights["at"])
        with Recorder() as inner:
            result = made(dict(inner.weights(checkpoint))["b"], there, at)
            into = torch.zeros(result.shape)
            into.copy_(result)
    assert bits(into) == bits(made(eager["b"], eager["a"], eager["at"]))


class Reading:
    """A recorder in a thread of its own, which stands still as it reads."""

    def __init__(self, checkpoint: penstock.Checkpoint) -> None:
        self.parameter = torch.zeros(8, 8)
        self.reads, self.goes_on = threading.Event(), threading.Event()
        self._checkpoint = checkpoint
        self._thread = threading.Thread(target=self._load)

    def _load(self) -> None:
        with Recorder(progress=self._progress) as recorder:
            self.parameter.copy_(dict(recorder.weights(self._checkpoint))["a"])

    def _progress(self, *_: object) -> None:
        self.reads.set()
        assert self.goes_on.wait(60)

    def __enter__(self) -> Reading:  # noqa: PYI034 - Self is newer than Python 3.10
        self._thread.start()
        assert self.reads.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.goes_on.set()
        self._thread.join()


def test_a_recorder_does_not_wait_for_what_another_reads_elsewhere(checkpoint: penstock.Checkpoint) -> None:
    into = torch.zeros(8, 8)
    with Reading(checkpoint) as other:
        with Recorder() as recorder:
            into.copy_(dict(recorder.weights(checkpoint))["b"])
        assert not other.goes_on.is_set()
        assert bits(into) == bits(checkpoint.load(["b"])["b"])


def ended(child: int) -> int:
    """The exit code of a forked child, which is given a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_that_is_forked_while_another_thread_reads_records_of_its_own(
    checkpoint: penstock.Checkpoint,
) -> None:
    eager = bits(checkpoint.load(["b"])["b"])
    with Reading(checkpoint):
        child = os.fork()
        if not child:
            code = 1
            try:
                into = torch.zeros(8, 8)
                with Recorder() as recorder:
                    into.copy_(dict(recorder.weights(checkpoint))["b"])
                code = 0 if bits(into) == eager else 2
            finally:
                os._exit(code)
        assert ended(child) == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_recording_that_is_forked_while_a_thread_of_it_reads_fails_in_the_child(
    checkpoint: penstock.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small tensors are read without progress.
    monkeypatch.setattr(eager_reader, "SMALL_BYTES", 8)
    reads, goes_on = threading.Event(), threading.Event()

    def progress(*_: object) -> None:
        reads.set()
        goes_on.wait(60)

    parameter, into = torch.zeros(8, 8), torch.zeros(8, 8)
    recorder = Recorder(progress=progress)
    with recorder:
        weights = dict(recorder.weights(checkpoint))
        parameter.copy_(weights["a"])
        # To look at what was copied makes it be read, in that thread.
        thread = threading.Thread(target=parameter.sum)
        thread.start()
        assert reads.wait(60)
        child = os.fork()
        if not child:
            code = 1
            try:
                into.copy_(torch.ones(8, 8) + 1)
                recorder.__exit__(None, None, None)
            except penstock.PenstockError as error:
                code = 0 if "forked" in str(error) else 2
            finally:
                os._exit(code)
        try:
            assert ended(child) == 0
        finally:
            goes_on.set()
        thread.join()
        into.copy_(weights["b"])
    assert bits(parameter) == bits(checkpoint.load(["a"])["a"])
    assert bits(into) == bits(checkpoint.load(["b"])["b"])


class Seeing(TorchDispatchMode):
    """Notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_of_others_see_a_thread_that_records_after_it_has_served_another_recording(
    checkpoint: penstock.Checkpoint,
) -> None:
    over, seen = threading.Event(), []

    def serve() -> None:
        over.wait(60)
        with Recorder() as recorder, Seeing() as mode:
            dict(recorder.weights(checkpoint))
            torch.zeros(4, 6).view(-1)
        seen.extend(mode.seen)

    with Recorder():
        thread = threading.Thread(target=serve)
        thread.start()
    over.set()
    thread.join()
    assert torch.ops.aten.view.default in seen


def test_a_recorder_that_is_left_in_a_thread_that_it_has_started_says_so(checkpoint: penstock.Checkpoint) -> None:
    def records() -> Iterator[None]:
        with Recorder() as recorder:
            dict(recorder.weights(checkpoint))
            yield

    started, errors = records(), []
    next(started)

    def ends() -> None:
        try:
            next(started, None)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=ends)
    thread.start()
    thread.join()
    assert errors == ["a Recorder has to be left in the thread that entered it"]
