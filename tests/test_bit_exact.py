"""Promise 7: bit-exact, for every dtype, block size, number of readers, state of the cache and way of loading."""

from pathlib import Path

import numpy as np
import pytest

import penstock
from conftest import BITS, Raw, as_bytes, assert_bits, drop_cache, raw_bytes, write_raw

torch = pytest.importorskip("torch")
from penstock.frameworks.torch import DTYPES, Torch, torch_shape
from penstock.loading import FreshHost

TORCH_DTYPES = sorted(set(BITS) - {"F6_E2M3", "F6_E3M2"})
SIZES = [4096, 4 << 20]  # smaller and larger than the tensors


@pytest.fixture(params=TORCH_DTYPES)
def of_one_dtype(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Raw]]:
    dtype = request.param
    shapes = {"a": (64, 130), "b": (3, 5, 2), "c": (1, 20_000), "empty": (4, 0)}
    tensors = {
        name: Raw(dtype, shape, raw_bytes(dtype, shape, seed)) for seed, (name, shape) in enumerate(shapes.items())
    }
    return write_raw(tmp_path / f"{dtype}.safetensors", tensors), tensors


@pytest.mark.parametrize("readers", [1, 8])
@pytest.mark.parametrize("block_bytes", SIZES)
def test_every_dtype_is_loaded_bit_for_bit(of_one_dtype, readers: int, block_bytes: int) -> None:
    path, tensors = of_one_dtype
    config = penstock.LoadOptions(readers=readers, block_bytes=block_bytes)
    assert_bits(penstock.open(path, options=config).load(), tensors)


def test_every_dtype_is_what_safetensors_makes_of_it(of_one_dtype) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path, tensors = of_one_dtype
    dtype = next(iter(tensors.values())).dtype
    try:
        theirs = safetensors.load_file(path)
    except Exception as error:  # noqa: BLE001 - whatever a version of theirs says of a dtype that it lacks
        pytest.skip(f"safetensors cannot load {dtype}: {error}")
    ours = penstock.load_file(path)
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape)
        assert as_bytes(ours[name]) == as_bytes(tensor)


@pytest.mark.parametrize("cache", ["auto", "use", "bypass"])
@pytest.mark.parametrize("state", ["cold", "warm"])
@pytest.mark.parametrize("block_bytes", SIZES)
def test_the_state_of_the_cache_makes_no_difference(mixed, cache: str, state: str, block_bytes: int) -> None:
    path, tensors = mixed
    if state == "cold":
        drop_cache(path)
    ckpt = penstock.open(path, options=penstock.LoadOptions(cache=cache, block_bytes=block_bytes))
    assert_bits(ckpt.load(), tensors)
    assert ckpt.stats is not None
    assert ckpt.stats.read_bytes >= ckpt.nbytes


@pytest.mark.parametrize("window", [1, 100_000, 1 << 30])
@pytest.mark.parametrize("block_bytes", SIZES)
def test_a_stream_brings_the_same_bits_whatever_its_window(mixed, window: int, block_bytes: int) -> None:
    path, tensors = mixed
    config = penstock.LoadOptions(window_bytes=window, block_bytes=block_bytes)
    assert_bits(dict(penstock.open(path, options=config).stream()), tensors)


@pytest.mark.parametrize("ahead", [None, 1, 100_000])
def test_a_load_brings_the_same_bits_however_far_ahead_destinations_are_made(
    mixed, monkeypatch: pytest.MonkeyPatch, ahead: int | None
) -> None:
    path, tensors = mixed
    monkeypatch.setattr(FreshHost, "ahead", lambda _: ahead)
    assert_bits(penstock.open(path, options=penstock.LoadOptions(block_bytes=4096)).load(), tensors)


@pytest.mark.parametrize("prefault", [False, True])
def test_mapped_views_have_the_same_bits(mixed, prefault: bool) -> None:
    path, tensors = mixed
    drop_cache(path)
    assert_bits(penstock.open(path).load(mmap=True, prefault=prefault), tensors)


def test_numpy_arrays_have_the_same_bits(mixed) -> None:
    pytest.importorskip("ml_dtypes")
    path, tensors = mixed
    arrays = penstock.open(path).load(framework="np")
    assert_bits(arrays, tensors)
    assert all(array.flags.writeable for array in arrays.values())


def test_dlpack_consumers_get_the_same_bits(mixed) -> None:
    path, tensors = mixed
    for name, array in penstock.open(path).load(framework="dlpack").items():
        assert array.nbytes == len(tensors[name].data)
        # BF16 has no numpy dtype to come back as; torch takes every dtype that DLPack has.
        assert as_bytes(torch.from_dlpack(array)) == tensors[name].data
        if tensors[name].dtype in {"F32", "I64", "U8"}:
            assert as_bytes(np.from_dlpack(array)) == tensors[name].data


def test_dtypes_without_a_torch_dtype_can_be_had_as_bytes(tmp_path: Path) -> None:
    tensor = Raw("F6_E2M3", (4, 8), raw_bytes("F6_E2M3", (4, 8)))
    ckpt = penstock.open(write_raw(tmp_path / "f6.safetensors", {"w": tensor}))
    with pytest.raises(penstock.SelectionError, match="F6_E2M3"):
        ckpt.load()
    array = ckpt.load(framework="dlpack")["w"]
    assert (array.dtype, array.shape) == ("F6_E2M3", (4, 8))
    assert as_bytes(torch.utils.dlpack.from_dlpack(array.dlpack(raw=True))) == tensor.data


def test_misaligned_data_is_loaded_and_aligned(tmp_path: Path) -> None:
    tensors = {"odd": Raw("U8", (3,), b"abc"), "w": Raw("F64", (100,), raw_bytes("F64", (100,)))}
    path = write_raw(tmp_path / "odd.safetensors", tensors, pad_to=1)
    for loaded in (penstock.open(path).load(), penstock.open(path).load(mmap=True)):
        assert_bits(loaded, tensors)
        assert loaded["w"].data_ptr() % 8 == 0


def test_several_files_load_at_once(tmp_path: Path) -> None:
    everything = {}
    for shard in range(5):
        tensors = {f"{shard}.{i}": Raw("F32", (50, i), raw_bytes("F32", (50, i), shard * 10 + i)) for i in range(9)}
        write_raw(tmp_path / f"model-{shard}.safetensors", tensors)
        everything |= tensors
    assert_bits(penstock.open(tmp_path).load(), everything)
    assert_bits(penstock.open(str(tmp_path / "*.safetensors")).load(), everything)
    assert_bits(penstock.open(sorted(tmp_path.iterdir())).load(), everything)


def test_names_filter_and_dtype_choose_what_is_read_and_what_it_becomes(mixed) -> None:
    path, tensors = mixed
    ckpt = penstock.open(path)
    assert_bits(ckpt.load(["scalar", "large"]), {name: tensors[name] for name in ("scalar", "large")})
    assert list(ckpt.load(["scalar", "large"])) == ["scalar", "large"]
    few = ckpt.load(filter=lambda name: name.startswith("layer."), dtype=torch.float16)
    assert {tensor.dtype for tensor in few.values()} == {torch.float16, torch.int64, torch.uint8, torch.bool}
    assert ckpt.stats is not None
    assert ckpt.stats.read_bytes < ckpt.nbytes / 2
    assert ckpt.load([]) == {}


def test_progress_is_told_in_bytes(mixed) -> None:
    path, _ = mixed
    told: list[tuple[int, int]] = []
    ckpt = penstock.open(path)
    ckpt.load(progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (ckpt.nbytes, ckpt.nbytes)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_tensors_that_are_to_be_filled_have_memory_of_their_own_whatever_came_before_them() -> None:
    kinds = [
        ("BF16", (3, 4)),
        ("BF16", (3, 4)),
        ("F32", (3, 4)),
        ("F4", (3, 4)),
        ("F4", (3, 4)),
        ("U8", ()),
        ("U8", (0,)),
    ]
    dtypes, shapes = [dtype for dtype, _ in kinds] * 2, [shape for _, shape in kinds] * 2
    if "F4" not in DTYPES:
        dtypes = ["U8" if dtype == "F4" else dtype for dtype in dtypes]
    tensors, addresses = Torch().empties(dtypes, shapes, "cpu")
    assert [tensor.dtype for tensor in tensors] == [DTYPES[dtype] for dtype in dtypes]
    assert [tuple(t.shape) for t in tensors] == [torch_shape(d, s) for d, s in zip(dtypes, shapes, strict=True)]
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert addresses == [tensor.data_ptr() for tensor in tensors]
    filled = [address for address, tensor in zip(addresses, tensors, strict=True) if tensor.numel()]
    assert len(set(filled)) == len(filled)
