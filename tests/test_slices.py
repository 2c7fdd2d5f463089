"""Parts of tensors: what is delivered is what the framework's own indexing gives, and little more is read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from conftest import Raw, raw_bytes, write_raw

torch = pytest.importorskip("torch")

SHAPES = {"vector": (1000,), "matrix": (40, 70), "cube": (6, 5, 8), "scalar": ()}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {name: Raw("I32", shape, raw_bytes("I32", shape, 3)) for name, shape in SHAPES.items()}
    return write_raw(tmp_path_factory.mktemp("slices") / "s.safetensors", tensors)


bound = st.none() | st.integers(-90, 90)
item = st.builds(slice, bound, bound, st.none() | st.integers(1, 7)) | st.integers(-8, 8) | st.just(...)


# torch takes several ellipses; numpy does not, and what the second would stand for is anyone's guess.
indices = st.lists(item, max_size=4).filter(lambda items: items.count(...) <= 1).map(tuple)


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(SHAPES)), index=indices)
def test_a_slice_is_what_indexing_the_whole_tensor_gives(path: Path, name: str, index: tuple) -> None:
    whole = penstock.load_file(path)[name]
    try:
        expected = whole[index]
    except IndexError:
        with pytest.raises(penstock.SelectionError):
            penstock.open(path).load([name], slices={name: index})
        return
    part = penstock.open(path).load([name], slices={name: index})[name]
    assert part.shape == expected.shape
    assert torch.equal(part, expected)


@pytest.mark.parametrize(
    "index", [[0, 1], np.array([0, 1]), None, True, np.array([True] * 40), "x", (slice(None), [0])]
)
def test_what_only_a_library_can_index_is_refused_with_the_way_to_have_it(path: Path, index: Any) -> None:
    with pytest.raises(penstock.SelectionError, match="neither an integer nor a slice nor an ellipsis") as raised:
        penstock.open(path).load(["matrix"], slices={"matrix": index})
    assert "index what comes with lists, masks or None" in (raised.value.remedy or "")
    assert (raised.value.remedy or "") in str(raised.value)


def test_a_step_backwards_is_refused_with_the_way_to_have_it(path: Path) -> None:
    with pytest.raises(penstock.SelectionError, match=r"steps must be positive.*torch\.flip"):
        penstock.open(path).get_tensor("matrix", slice(None, None, -1))


def test_a_tensor_of_the_catalogue_is_sliced_as_the_tensor_is(path: Path) -> None:
    ckpt, whole = penstock.open(path), penstock.load_file(path)
    for name, shape in SHAPES.items():
        info = ckpt[name]
        assert torch.equal(info[...], whole[name])
        assert torch.equal(ckpt.get_tensor(name), whole[name])
        if shape and shape[0]:
            assert torch.equal(info[-1], whole[name][-1])
            assert torch.equal(ckpt.get_tensor(name, slice(0, 1)), whole[name][:1])
            assert len(info) == shape[0]
        with pytest.raises(penstock.SelectionError):
            info[(0,) * 9]
    with pytest.raises(TypeError, match="iterated"):
        iter(ckpt[next(iter(ckpt))])
    some = next(iter(SHAPES))
    assert ckpt.get_tensor(some, framework="np").shape == SHAPES[some]
    with pytest.raises(penstock.TensorNotFoundError):
        ckpt.get_tensor("nothing")


def test_rows_read_their_range_only_and_columns_only_their_pieces_where_that_pays(tmp_path: Path) -> None:
    shape = (64, 400_000)
    path = write_raw(tmp_path / "wide.safetensors", {"w": Raw("F32", shape, raw_bytes("F32", shape))})
    ckpt = penstock.open(path)
    whole = ckpt.load()["w"]
    rows = ckpt.load(slices={"w": slice(3, 5)})["w"]
    assert torch.equal(rows.view(torch.int32), whole[3:5].view(torch.int32))
    assert ckpt.stats is not None
    assert ckpt.stats.read_bytes == rows.nbytes
    columns = ckpt.load(slices={"w": (slice(None), slice(1000, 90_000))})["w"]
    assert torch.equal(columns.view(torch.int32), whole[:, 1000:90_000].view(torch.int32))
    assert ckpt.stats.read_bytes < 1.1 * columns.nbytes


@pytest.mark.parametrize("index", [slice(None, None, -1), "a", (0, 0, 0, 0), (..., ...), 1000, True, None, [1, 2]])
def test_what_cannot_be_selected_says_so(path: Path, index: object) -> None:
    with pytest.raises(penstock.SelectionError) as raised:
        penstock.open(path).load(["vector"], slices={"vector": index})  # type: ignore[dict-item]
    assert raised.value.tensor == "vector"
    assert "[1000]" in str(raised.value)


def test_slicing_a_tensor_that_is_not_loaded_is_a_mistake(path: Path) -> None:
    with pytest.raises(penstock.TensorNotFoundError, match="not among the names"):
        penstock.open(path).load(["vector"], slices={"matrix": 0})
