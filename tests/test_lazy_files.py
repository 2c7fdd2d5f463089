"""``safe_open`` where its reading ahead meets something else: other modes, dtypes that a library lacks, forks."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from conftest import Raw, write_raw
from penstock.patterns import natural_sort_key

torch = pytest.importorskip("torch")
LAZY = [{}, {"mmap": True}]


@pytest.fixture
def floats(tmp_path: Path) -> Path:
    path = tmp_path / "floats.safetensors"
    penstock.save_file({name: torch.full((64, 32), float(ord(name))) for name in "abcdef"}, path)
    return path


@pytest.mark.parametrize("how", LAZY)
def test_tensors_can_be_trained_though_another_was_taken_in_inference_mode(floats: Path, how: dict[str, Any]) -> None:
    with penstock.safe_open(floats, **how) as file:
        file.get_tensor("a")
        with torch.inference_mode():
            file.get_tensor("b")
        later = file.get_tensor("c")
    weight = torch.nn.Parameter(later)
    (weight * weight).sum().backward()
    assert weight.grad is not None


def test_a_stream_that_was_begun_in_inference_mode_goes_on_with_tensors_of_any_mode(floats: Path) -> None:
    with torch.inference_mode():
        stream = penstock.open(floats).stream(dtype="float16")
        tensors = [next(stream)[1]]
    tensors += [tensor for _, tensor in stream]
    assert not any(tensor.is_inference() for tensor in tensors)


@pytest.mark.parametrize("how", LAZY)
def test_a_tensor_that_a_library_has_no_dtype_for_fails_nobody_but_who_asks_for_it(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    path = tmp_path / "mixed.safetensors"
    ones = np.ones(4096, np.float32).tobytes()
    write_raw(
        path,
        {
            "a": Raw("F32", [4096], ones),
            "b": Raw("F32", [4096], ones),
            "c": Raw("F4", [64], bytes(32)),
            "d": Raw("F32", [4096], ones),
        },
    )
    with penstock.safe_open(path, "np", **how) as file:
        for _ in range(2):
            for name in "abd":
                assert file.get_tensor(name).sum() == 4096
            with pytest.raises(penstock.SelectionError, match="F4"):
                file.get_tensor("c")


@pytest.mark.parametrize("how", LAZY)
def test_arrays_for_dlpack_are_whole_and_in_parts(floats: Path, how: dict[str, Any]) -> None:
    with penstock.safe_open(floats, "dlpack", **how) as file:
        assert torch.from_dlpack(file.get_tensor("a")).sum() == 64 * 32 * ord("a")
        assert torch.from_dlpack(file.get_slice("b")[:2]).shape == (2, 32)
        assert set(file.get_tensors(["c", "d"])) == {"c", "d"}


@pytest.mark.parametrize("how", LAZY)
def test_a_child_that_is_forked_while_another_thread_reads_goes_on(
    floats: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(method: Any) -> Any:
        def slow(*args: Any, **options: Any) -> Any:
            time.sleep(0.5)
            return method(*args, **options)

        return slow

    for name in ("prefault", "begin"):
        monkeypatch.setattr(penstock.Checkpoint, name, slowly(getattr(penstock.Checkpoint, name)))
    file = penstock.safe_open(floats, **how)
    file.get_tensor("a")
    reading = threading.Thread(target=lambda: [file.get_tensor(name) for name in "bc"])
    reading.start()
    time.sleep(0.1)
    child = os.fork()
    if child == 0:
        os._exit(0 if file.get_tensor("d").shape == (64, 32) else 1)
    end = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.05)
    reading.join()
    if ended == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0), "the child hangs"


def test_what_is_known_of_a_tensor_is_read_by_indices_only(floats: Path) -> None:
    info = penstock.open(floats)["a"]
    for none in (None, (None,)):
        with pytest.raises(penstock.SelectionError, match="None"):
            info[none]
    with pytest.raises(TypeError, match="reversible"):
        reversed(info)


def test_names_are_sorted_as_people_count_however_long_their_numbers_are() -> None:
    names = ["layer.10", "layer.9", "layer.010a", "layer." + "1" * 5000, "norm"]
    assert sorted(names, key=natural_sort_key) == [names[1], names[0], names[2], names[3], names[4]]


def test_settings_are_equal_to_their_copies() -> None:
    options = penstock.LoadOptions(readers=3)
    assert options == penstock.LoadOptions(readers=3)
    assert options != penstock.LoadOptions()
