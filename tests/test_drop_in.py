"""The drop-in for safetensors: the same calls, the same results."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

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


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_load_file_gives_what_safetensors_gives(path: Path) -> None:
    assert_equal(penstock.load_file(path), safetensors.torch.load_file(path))


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


@pytest.mark.parametrize("url", ["s3://bucket/x.safetensors", "https://user:secret@host/x.safetensors"])
def test_the_drop_in_saves_to_files_only_and_names_what_saves_to_object_stores(url: str) -> None:
    with pytest.raises(penstock.ConfigError, match=r"penstock\.save") as refused:
        penstock.save_file({"a": torch.zeros(1)}, url)
    assert "secret" not in str(refused.value)
    assert refused.value.remedy


def test_what_cannot_be_saved_is_told(tmp_path: Path) -> None:
    with pytest.raises(penstock.ConfigError, match=r"given were str and dict\. Write save_file\(tensors, filename\)"):
        penstock.save_file(str(tmp_path / "x.safetensors"), {"a": torch.zeros(1)})  # type: ignore[arg-type]
    with pytest.raises(penstock.ConfigError, match="framework='jax'"):
        penstock.save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors", framework="jax")
    assert not list(tmp_path.iterdir())


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


def test_what_safetensors_refuses_has_the_name_people_know(tmp_path: Path, path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"12345678")
    with pytest.raises(penstock.SafetensorError):
        penstock.load_file(tmp_path / "bad.safetensors")
    with pytest.raises(penstock.SafetensorError):
        penstock.safe_open(path, "caffe")
    with penstock.safe_open(path, "np") as file:
        for act in (
            lambda: file.get_tensor("absent"),
            lambda: file.get_slice("b")[:, -7],
            lambda: file.get_slice("b")[[0, 1]],  # safetensors' own refuses lists for numpy, too
        ):
            with pytest.raises(penstock.SafetensorError):
                act()
    with pytest.raises(penstock.SafetensorError, match="closed"):
        file.keys()
    with pytest.raises(FileNotFoundError) as raised:
        penstock.safe_open(tmp_path / "absent", "pt")
    assert not isinstance(raised.value, penstock.SafetensorError)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize(
    "selection",
    [
        *([2, 0], [], None, True, (slice(1, 3), None), ([0, 1], [5, 2]), (..., [3])),
        *(torch.tensor([1]), torch.tensor(1), torch.arange(8) > 4),
    ],
    ids=str,
)
def test_slices_take_what_torch_takes(path: Path, selection: object, patched: bool) -> None:
    with safetensors.safe_open(path, "pt") as theirs:
        expected = theirs.get_slice("b")[selection]
    with penstock.patch_safetensors() if patched else nullcontext():
        opened = safetensors.safe_open if patched else penstock.safe_open
        with opened(path, "pt") as file:
            part = file.get_slice("b")[selection]
    assert part.is_contiguous()
    assert torch.equal(part, expected)
    assert part.shape == expected.shape


def test_slices_of_a_file_that_is_left_still_read_and_rows_come_one_by_one(path: Path) -> None:
    with penstock.safe_open(path, "pt") as file:
        part, whole = file.get_slice("b"), file.get_tensor("b")
    assert torch.equal(torch.stack(list(part)), whole)
    for wrong in (1.5, torch.ones(3, dtype=torch.bool)):
        with pytest.raises(penstock.SelectionError, match="'b'"):
            part[wrong]


def test_the_backend_is_for_penstock_to_find(path: Path) -> None:
    assert_equal(penstock.load_file(path, backend="pread"), safetensors.torch.load_file(path))


def test_load_model_takes_a_module_as_safetensors_does(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 3)
    safetensors.torch.save_model(torch.nn.Linear(2, 3), str(tmp_path / "m.safetensors"))
    assert penstock.load_model(module, tmp_path / "m.safetensors") is module
    theirs = torch.nn.Linear(2, 3)
    safetensors.torch.load_model(theirs, tmp_path / "m.safetensors")
    assert_equal(dict(module.state_dict()), dict(theirs.state_dict()))


def test_unknown_frameworks_list_the_known_ones(path: Path) -> None:
    with pytest.raises(penstock.ConfigError, match="dlpack"):
        penstock.safe_open(path, "caffe")
