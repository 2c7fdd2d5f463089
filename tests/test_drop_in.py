"""The drop-in for safetensors: the same calls, the same results."""

from pathlib import Path

import pytest

import penstock
from conftest import as_bytes

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors.torch")
import safetensors.torch


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {"b": torch.randn(8, 6), "a": torch.arange(10), "c": torch.randn(4).to(torch.bfloat16)}
    penstock.save_file(tensors, tmp_path / "x.safetensors", {"made": "here"})
    return tmp_path / "x.safetensors"


def test_load_file_gives_what_safetensors_gives(path: Path) -> None:
    theirs, ours = safetensors.torch.load_file(path), penstock.load_file(path)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_safe_open_answers_as_safetensors_does(path: Path, framework: str) -> None:
    pytest.importorskip("ml_dtypes")
    with safetensors.safe_open(path, framework) as theirs, penstock.safe_open(path, framework, device="cpu") as ours:
        assert ours.keys() == list(theirs.keys())
        assert ours.offset_keys() == list(theirs.offset_keys())
        assert ours.metadata() == theirs.metadata() == {"made": "here"}
        for name in ("a", "b"):
            assert as_bytes(ours.get_tensor(name)) == as_bytes(theirs.get_tensor(name))
            their_slice, our_slice = theirs.get_slice(name), ours.get_slice(name)
            assert our_slice.get_shape() == their_slice.get_shape()
            assert our_slice.get_dtype() == their_slice.get_dtype()
            assert as_bytes(our_slice[2:5]) == as_bytes(their_slice[2:5])
        assert as_bytes(ours.get_slice("b")[:, 1:3]) == as_bytes(theirs.get_slice("b")[:, 1:3])
        assert tuple(ours.get_slice("b")[[]].shape) == tuple(theirs.get_slice("b")[[]].shape)
        assert set(ours.get_tensors(["a", "c"])) == {"a", "c"}
        assert set(ours.get_tensors()) == {"a", "b", "c"}


def test_a_file_without_metadata_has_none(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    with penstock.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() is None


def test_a_closed_file_says_so(path: Path) -> None:
    with penstock.safe_open(path, "pt") as file:
        pass
    with pytest.raises(penstock.PenstockError, match="closed"):
        file.get_tensor("a")


def test_unknown_names_suggest_the_closest(path: Path) -> None:
    with penstock.safe_open(path, "pt") as file, pytest.raises(KeyError) as raised:
        file.get_tensor("A.weight")
    assert isinstance(raised.value, penstock.TensorNotFoundError)
    assert str(path) in str(raised.value)


def test_malformed_files_raise_the_error_people_know(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"12345678")
    with pytest.raises(penstock.SafetensorError):
        penstock.load_file(tmp_path / "bad.safetensors")


def test_unknown_frameworks_list_the_known_ones(path: Path) -> None:
    with pytest.raises(penstock.ConfigError, match="dlpack"):
        penstock.safe_open(path, "caffe")
