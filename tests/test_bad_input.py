"""Bad input is a typed error that names the file, the tensor and the offending value; never a crash, never a hang."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest

import penstock
from conftest import Raw, assert_bits, raw_bytes, write_header, write_raw


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS: dict[str, tuple[Any, bytes, str | None, str]] = {
    # name: header, data, the tensor that must be named, words that must be in the message
    "not UTF-8": (b'{"\xff":1}', b"", None, "UTF-8"),
    "not JSON": (b"{nonsense}", b"", None, "malformed"),
    "not an object": ([1, 2], b"", None, "object of tensors"),
    "an entry without a dtype": ({"w": {"shape": [1], "data_offsets": [0, 4]}}, b"1234", "w", "`dtype`"),
    "a negative size": ({"w": entry(shape=[-1])}, b"", "w", "-1"),
    "a fractional size": ({"w": entry(shape=[1.5])}, b"", "w", "1.5"),
    "metadata that is no text": ({"__metadata__": {"a": 1}}, b"", None, "string"),
    "duplicate names": (
        b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"1", "w", "twice",
    ),
    "an unknown dtype": ({"w": entry("F128")}, b"12345678", "w", "F128"),
    "a shape that disagrees with the bytes": ({"w": entry(shape=[3])}, b"12345678", "w", "needs 12 bytes"),
    "a shape that overflows": ({"w": entry(shape=[2**40, 2**40])}, b"12345678", "w", "more bits"),
    "reversed offsets": ({"w": entry(offsets=[8, 0])}, b"12345678", "w", "[8, 0]"),
    "a hole": ({"a": entry(), "b": entry(offsets=[16, 24])}, b"x" * 24, "b", "belong to no tensor"),
    "an overlap": ({"a": entry(), "b": entry(offsets=[4, 12])}, b"x" * 12, "b", "overlap"),
    "too little data": ({"a": entry(), "b": entry(offsets=[8, 16])}, b"x" * 12, "b", "incomplete"),
    "too much data": ({"a": entry()}, b"x" * 12, None, "accounts for 77 only"),
    "half a byte": ({"w": entry("F4", [3], [0, 2])}, b"12", "w", "whole number of bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_a_malformed_header_is_a_format_error(tmp_path: Path, case: str) -> None:
    header, data, tensor, words = HEADERS[case]
    path = write_header(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(penstock.FormatError) as raised:
        penstock.open(path)
    assert (raised.value.location, raised.value.tensor) == (str(path), tensor)
    assert words in str(raised.value)
    assert isinstance(raised.value, ValueError)


FILES = {
    "empty": (b"", "empty"),
    "shorter than a length": (b"1234", "4 bytes"),
    "header length 0": (struct.pack("<Q", 0) + b"{}", "length is 0"),
    "header beyond the file": (struct.pack("<Q", 1000) + b"{}", "says 1008"),
    "header above 100 MB": (struct.pack("<Q", 100_000_001) + b"{}", "100000001"),
    "header length that overflows": (struct.pack("<Q", 2**64 - 1) + b"{}", str(2**64 - 1)),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
    "a PyTorch checkpoint": (b"PK\x03\x04" + bytes(100), "torch.save"),
    "a GGUF file": (b"GGUF\x03\x00\x00\x00" + bytes(100), "GGUF"),
    "a web page": (b"<!DOCTYPE html><html>" + bytes(100), "HTML page"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_something_else_is_a_format_error_that_says_what(tmp_path: Path, case: str) -> None:
    content, words = FILES[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(penstock.FormatError) as raised:
        penstock.open(path)
    assert raised.value.location == str(path)
    assert words in str(raised.value)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none") as raised:
        penstock.open(tmp_path / "none.safetensors")
    assert isinstance(raised.value, penstock.LocationNotFoundError)
    assert raised.value.errno == 2


def test_a_link_to_nowhere_says_that_it_is_one(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").symlink_to(tmp_path / "gone")
    for where in (tmp_path, tmp_path / "x.safetensors"):
        with pytest.raises(penstock.LocationNotFoundError, match="link"):
            penstock.open(where)


def test_a_directory_without_a_checkpoint_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(penstock.LocationNotFoundError, match=r"pytorch_model\.bin.*convert"):
        penstock.open(tmp_path)


def test_nothing_to_open_and_nothing_that_matches(tmp_path: Path) -> None:
    with pytest.raises(penstock.LocationNotFoundError):
        penstock.open([])
    with pytest.raises(penstock.LocationNotFoundError, match="no file matches"):
        penstock.open(tmp_path / "*.safetensors")
    with pytest.raises(penstock.LocationNotFoundError, match="not supported"):
        penstock.open("ftp://host/model.safetensors")


@pytest.mark.parametrize("given", ["", b"", "  ", [""], ["x", ""]])
def test_an_empty_location_is_said_to_be_empty(given: Any) -> None:
    with pytest.raises(
        penstock.LocationNotFoundError, match=r"^path(\[[01]\])? is empty: .*\. Give the path"
    ) as raised:
        penstock.open(given)
    assert raised.value.code == "not_found"


def test_an_empty_argument_is_named(tmp_path: Path) -> None:
    with pytest.raises(penstock.LocationNotFoundError, match=r"^dst is empty"):
        penstock.pull("s3://bucket/model/", " ")
    with pytest.raises(penstock.LocationNotFoundError, match=r"^url is empty"):
        penstock.pull("", tmp_path)
    with pytest.raises(penstock.LocationNotFoundError, match=r"^cache_dir is empty"):
        penstock.open(tmp_path, cache_dir="\t")


def test_a_models_name_is_answered_with_its_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(penstock.LocationNotFoundError, match="write hf://meta-llama/Llama-3; else"):
        penstock.open("meta-llama/Llama-3")


@pytest.mark.parametrize("kind", ["fifo", "device", "socket", "directory in a list"])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path: Any = tmp_path / "odd.safetensors"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "socket":
        import socket

        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    else:
        (tmp_path / "w" / "sub.safetensors").mkdir(parents=True)
        (tmp_path / "w" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "sub.safetensors"}}')
        path = tmp_path / "w"
    with pytest.raises(penstock.LocationAccessError) as raised:
        penstock.open(path)
    assert "not a regular file" in str(raised.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_says_so(mixed) -> None:
    path, _ = mixed
    path.chmod(0)
    with pytest.raises(PermissionError, match="ermission"):
        penstock.open(path)


def shards(directory: Path, weight_map: dict[str, str]) -> Path:
    for name in "ab":
        tensors = {name: Raw("F32", (4,), raw_bytes("F32", (4,))), f"extra.{name}": Raw("U8", (1,), b"1")}
        write_raw(directory / f"{name}.safetensors", tensors)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_an_index_decides_what_belongs_to_the_checkpoint(tmp_path: Path) -> None:
    index = shards(tmp_path, {"a": "a.safetensors", "b": "b.safetensors"})
    (tmp_path / "other.safetensors").write_bytes(b"not in the index, so not looked at")
    for where in (index, tmp_path):
        assert list(penstock.open(where)) == ["a", "b"]


BROKEN_INDICES = {
    "a missing file": ({"a": "c.safetensors"}, penstock.LocationNotFoundError, "c.safetensors"),
    "a tensor that is not in its file": (
        {"a": "a.safetensors", "z": "b.safetensors"},
        penstock.FormatError,
        "'z'|\"z\"",
    ),
    "a tensor in the other file": ({"a": "b.safetensors", "b": "b.safetensors"}, penstock.FormatError, '"a"'),
    "a way out of its directory": ({"a": "../a.safetensors"}, penstock.FormatError, r"\.\./a"),
    "an absolute path": ({"a": "/etc/passwd"}, penstock.FormatError, "/etc/passwd"),
}


@pytest.mark.parametrize("case", BROKEN_INDICES)
def test_a_broken_index_names_what_is_wrong(tmp_path: Path, case: str) -> None:
    weight_map, kind, words = BROKEN_INDICES[case]
    shards(tmp_path, weight_map)
    with pytest.raises(kind, match=words) as raised:
        penstock.open(tmp_path)
    assert str(tmp_path) in str(raised.value.location)


def test_an_index_that_is_no_index(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for text in ("", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "1", "a": "2"}}'):
        index.write_text(text)
        with pytest.raises(penstock.FormatError, match="index"):
            penstock.open(tmp_path)


def test_a_tensor_in_two_files_names_both(tmp_path: Path) -> None:
    for name in "xy":
        write_raw(tmp_path / f"{name}.safetensors", {"w": Raw("U8", (1,), b"1")})
    with pytest.raises(penstock.FormatError) as raised:
        penstock.open(tmp_path)
    assert raised.value.tensor == "w"
    assert "x.safetensors" in str(raised.value)
    assert "y.safetensors" in str(raised.value)


def test_odd_names_are_fine(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    names = ["", " ", "a/b", "../up", "naïve→", 'quote"', "back\\slash", "nul\0byte", "new\nline", "x" * 10_000]
    tensors = {name: Raw("U8", (i,), raw_bytes("U8", (i,), i)) for i, name in enumerate(names)}
    path = write_raw(tmp_path / "odd.safetensors", tensors)
    assert_bits(penstock.open(path).load(), tensors)


def test_a_file_without_tensors_is_a_checkpoint_without_tensors(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ckpt = penstock.open(write_raw(tmp_path / "none.safetensors", {}))
    assert (list(ckpt), ckpt.nbytes, ckpt.load(), list(ckpt.stream())) == ([], 0, {}, [])


def test_a_hundred_thousand_tensors_open(tmp_path: Path) -> None:
    import time

    tensors = {f"model.layers.{i}.weight": Raw("U8", (1,), b"x") for i in range(100_000)}
    path = write_raw(tmp_path / "many.safetensors", tensors)
    began = time.perf_counter()
    assert len(penstock.open(path)) == 100_000
    assert time.perf_counter() - began < 5  # a hang or a quadratic step, not a slow machine


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "with space.safetensors", {"w": Raw("U8", (1,), b"1")})
    assert list(penstock.open(path.as_uri())) == ["w"]


def test_settings_that_make_no_sense_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for keywords in ({"readers": 0}, {"block_bytes": 1}, {"cache": "maybe"}, {"staging_bytes": 5}):
        with pytest.raises(penstock.ConfigError, match=next(iter(keywords))):
            penstock.LoadOptions(**keywords)  # type: ignore[arg-type]
    monkeypatch.setenv("PENSTOCK_READERS", "lots")
    with pytest.raises(penstock.ConfigError, match=r"PENSTOCK_READERS.*lots"):
        penstock.LoadOptions()


def test_errors_survive_pickling(tmp_path: Path) -> None:
    with pytest.raises(penstock.PenstockError) as raised:
        penstock.open(tmp_path / "none")
    copy = pickle.loads(pickle.dumps(raised.value))  # noqa: S301 - our own
    assert (type(copy), str(copy), copy.location) == (type(raised.value), str(raised.value), raised.value.location)


def test_a_path_that_was_mistyped_is_told_with_what_is_like_it(tmp_path: Path) -> None:
    (tmp_path / "llama-3-8b").mkdir()
    good = write_raw(tmp_path / "llama-3-8b" / "model.safetensors", {"w": Raw("U8", (1,), b"1")})
    for typed, meant in (
        (good.with_name("modle.safetensors"), good),
        (tmp_path / "lama-3-8b", tmp_path / "llama-3-8b"),
    ):
        with pytest.raises(penstock.LocationNotFoundError) as raised:
            penstock.open(typed)
        assert f"Did you mean {meant}?" in (raised.value.remedy or "")
