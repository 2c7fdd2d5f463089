"""Within ``patch_safetensors``, whoever calls safetensors loads through Penstock; after it, all is as before."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from conftest import Raw, as_bytes, assert_bits, drop_cache, raw_bytes, write_raw
from penstock.supply.read_ahead import ReadAhead

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
import safetensors
import safetensors.numpy
import safetensors.torch
from safetensors import safe_open
from safetensors.torch import load_file

THEIRS = {"safe_open": safetensors.safe_open, "load_file": safetensors.torch.load_file}


@pytest.fixture(autouse=True)
def _all_is_as_before() -> Iterator[None]:
    yield
    assert safetensors.safe_open is THEIRS["safe_open"]
    assert safetensors.torch.safe_open is THEIRS["safe_open"]
    assert safetensors.numpy.safe_open is THEIRS["safe_open"]
    assert safetensors.torch.load_file is THEIRS["load_file"]
    assert (safe_open, load_file) == (THEIRS["safe_open"], THEIRS["load_file"])


@pytest.fixture
def library() -> Iterator[types.ModuleType]:
    """A library that has imported the functions by name, as most do."""
    module = types.ModuleType("a_library")
    module.opener, module.load_file = safetensors.safe_open, safetensors.torch.load_file
    sys.modules["a_library"] = module
    yield module
    del sys.modules["a_library"]


def is_ours(function: Any) -> bool:
    return function.__module__ == "penstock.integrations.safetensors.patching"


def test_every_name_is_replaced_and_put_back(library: types.ModuleType) -> None:
    with penstock.patch_safetensors():
        for function in (
            *(safetensors.safe_open, safetensors.torch.load_file, safetensors.torch.safe_open),
            *(safetensors.numpy.safe_open, library.opener, library.load_file, safe_open, load_file),
        ):
            assert is_ours(function)
    assert library.opener is THEIRS["safe_open"]
    assert library.load_file is THEIRS["load_file"]


def test_modules_that_are_imported_meanwhile_are_put_back_too() -> None:
    module = types.ModuleType("late")
    sys.modules["late"] = module
    try:
        with penstock.patch_safetensors():
            module.safe_open = safetensors.safe_open
            assert is_ours(module.safe_open)
        assert module.safe_open is THEIRS["safe_open"]
    finally:
        del sys.modules["late"]


def test_an_exception_ends_the_block_as_well(library: types.ModuleType) -> None:
    with pytest.raises(ZeroDivisionError), penstock.patch_safetensors():
        1 / 0  # noqa: B018
    assert library.opener is THEIRS["safe_open"]


@penstock.patch_safetensors()
def decorated() -> bool:
    return is_ours(safetensors.safe_open)


def test_the_log_says_that_a_file_is_opened_by_penstock(mixed: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="penstock")
    with penstock.patch_safetensors(), safetensors.safe_open(mixed[0], "pt"):
        pass
    assert f"safe_open of {mixed[0]} is Penstock's, to cpu" in caplog.text


def test_it_decorates_functions_again_and_again() -> None:
    assert [decorated(), decorated()] == [True, True]


def test_blocks_nest_and_the_innermost_decides(mixed: Any) -> None:
    path, _ = mixed

    def owned() -> bool:
        """Whether a tensor lies elsewhere than in a mapping of the file."""
        loaded = load_file(path)
        address = loaded["large"].data_ptr()
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if path.name in line]
        spans = [[int(bound, 16) for bound in line.split()[0].split("-")] for line in lines]
        return not any(start <= address < end for start, end in spans)

    with penstock.patch_safetensors():
        assert not owned()
        with penstock.patch_safetensors(mmap=False):
            assert owned()
        assert is_ours(safetensors.safe_open)
        assert not owned()


def test_blocks_of_several_threads_overlap(library: types.ModuleType) -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with penstock.patch_safetensors():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(30)
    assert is_ours(library.opener)  # the process's, not the thread's
    with penstock.patch_safetensors():
        pass
    assert is_ours(library.opener)  # the other block is still open
    leave.set()
    thread.join()
    assert library.opener is THEIRS["safe_open"]


def test_many_threads_in_and_out_leave_nothing_behind(library: types.ModuleType) -> None:
    def in_and_out() -> None:
        for _ in range(20):
            with penstock.patch_safetensors():
                assert is_ours(library.opener)

    threads = [threading.Thread(target=in_and_out) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert library.opener is THEIRS["safe_open"]


# ---- what is loaded


@pytest.mark.parametrize("mmap", [True, False])
def test_files_have_the_bits_that_safetensors_gives(mixed: Any, mmap: bool) -> None:
    path, tensors = mixed
    drop_cache(path)
    with penstock.patch_safetensors(mmap=mmap):
        assert_bits(load_file(path), tensors)
        with safe_open(path, framework="pt") as file:
            assert_bits({name: file.get_tensor(name) for name in file.keys()}, tensors)  # noqa: SIM118
            assert_bits({name: file.get_slice(name)[...] for name in file.offset_keys()}, tensors)
            assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_slices_are_those_of_safetensors(mixed: Any, framework: str, mmap: bool) -> None:
    path, _ = mixed
    with (
        safe_open(path, framework) as theirs,
        penstock.patch_safetensors(mmap=mmap),
        safe_open(path, framework) as ours,
    ):
        assert is_ours(type(ours))
        for selection in ((slice(3, 9),), (slice(None), slice(5, 50)), (slice(1, 2), slice(0, 7)), (...,)):
            mine, other = ours.get_slice("large"), theirs.get_slice("large")
            assert (mine.get_shape(), mine.get_dtype()) == (other.get_shape(), other.get_dtype())
            part = mine[selection]
            assert as_bytes(part) == as_bytes(other[selection])
            assert tuple(part.shape) == tuple(other[selection].shape)
            assert framework == "np" or part.is_contiguous()


def test_files_stay_usable_after_the_block_and_tensors_after_the_file(mixed: Any) -> None:
    path, tensors = mixed
    with penstock.patch_safetensors():
        file = safe_open(path, framework="pt")
    first = file.get_tensor("large")
    file.__exit__(None, None, None)
    assert as_bytes(first) == tensors["large"].data
    with pytest.raises(penstock.PenstockError, match="closed"):
        file.keys()
    with pytest.raises(safetensors.SafetensorError, match="closed"):
        file.get_slice("large")


def test_tensors_may_be_written_to_and_the_file_stays(mixed: Any) -> None:
    path, tensors = mixed
    before = path.read_bytes()
    with penstock.patch_safetensors():
        load_file(path)["large"].zero_()
    assert path.read_bytes() == before
    assert_bits(safetensors.torch.load_file(path), tensors)


def test_a_block_that_is_never_left_lasts_and_ends_in_silence(mixed: tuple[Path, dict[str, torch.Tensor]]) -> None:
    code = (
        "import gc, sys, penstock, safetensors\n"
        "penstock.patch_safetensors().__enter__()\n"
        "gc.collect()\n"
        "kept = penstock.patch_safetensors()\n"
        "kept.__enter__()\n"
        "with safetensors.safe_open(sys.argv[1], 'pt') as file: print(type(file).__module__)"
    )
    command = [sys.executable, "-c", code, str(mixed[0])]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("penstock.integrations.safetensors.patching", "", 0)


def test_headers_are_read_where_there_is_no_such_gpu(mixed: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = mixed
    with penstock.patch_safetensors():
        for device in ("cuda:99", 99):
            with safe_open(path, framework="pt", device=device) as file:
                assert set(file.keys()) == set(tensors)
                name = next(iter(tensors))
                assert file.get_slice(name).get_shape() == list(tensors[name].shape)
                with pytest.raises(penstock.DeviceError, match=r"cuda:99|without CUDA|no usable GPU|99"):
                    file.get_tensor(name)


def test_what_a_later_safetensors_does_besides_is_its_own(
    mixed: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, left = [], []

    class Later:
        """As 0.9's: a handle that knows more."""

        def __init__(self, *args: object, **options: object) -> None:
            opened.append((args, options))

        def __exit__(self, *_: object) -> None:
            left.append(self)

        def get_tensor_meta(self, name: str) -> str:
            return f"meta of {name}"

    monkeypatch.setattr(safetensors, "safe_open", Later)
    with penstock.patch_safetensors():
        with safetensors.safe_open(mixed[0], framework="pt", backend="mmap") as file:
            assert not hasattr(file, "prefetch"), "nor does this one"
            assert set(file.get_tensors()) == set(mixed[1])
            assert not opened, "it is not needed"
            assert [file.get_tensor_meta(name) for name in "ab"] == ["meta of a", "meta of b"]
        assert opened == [((mixed[0], "pt", "cpu"), {"backend": "mmap"})]
        assert len(left) == 1
        with pytest.raises(penstock.SafetensorError, match="closed"):
            file.get_tensor_meta("a")


def test_what_penstock_does_not_load_goes_to_safetensors(tmp_path: Path) -> None:
    data = raw_bytes("F32", (4, 5))
    path = write_raw(tmp_path / "x.safetensors", {"w": Raw("F32", (4, 5), data)})
    with penstock.patch_safetensors():
        for framework, device in (("jax", "cpu"), ("pt", "mps")):
            assert type(safe_open(path, framework=framework, device=device)) is THEIRS["safe_open"]
        with pytest.raises(safetensors.SafetensorError, match="caffe is invalid"):
            safe_open(path, framework="caffe")
        with pytest.raises(safetensors.SafetensorError, match="nonsense is invalid"):
            safe_open(path, framework="pt", device="nonsense")
        assert safetensors.numpy.load_file(path)["w"].tobytes() == data


def test_options_that_penstock_does_not_know_go_to_safetensors(mixed: Any) -> None:
    path, tensors = mixed
    with penstock.patch_safetensors():
        assert_bits(load_file(path, backend="pread"), tensors)
        assert is_ours(type(safe_open(path, framework="pt", backend="mmap")))
        for act in (lambda: load_file(path, backend="x"), lambda: safe_open(path, framework="pt", backend="x")):
            with pytest.raises(safetensors.SafetensorError, match="mmap"):
                act()
        with pytest.raises(TypeError):
            load_file(path, anything=True)


@pytest.mark.parametrize("mmap", [True, False])
def test_errors_are_caught_under_either_name(tmp_path: Path, mixed: Any, mmap: bool) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"12345678")
    path, _ = mixed
    with penstock.patch_safetensors(mmap=mmap), safe_open(path, framework="pt") as file:
        for act in (lambda: load_file(tmp_path / "bad.safetensors"), lambda: file.get_tensor("absent")):
            with pytest.raises(safetensors.SafetensorError) as raised:
                act()
            assert isinstance(raised.value, penstock.PenstockError)
            again = pickle.loads(pickle.dumps(raised.value))  # noqa: S301
            assert (type(again).__module__, str(again)) == ("penstock.errors", str(raised.value))
        with pytest.raises(FileNotFoundError):
            load_file(tmp_path / "absent.safetensors")
        with pytest.raises(safetensors.SafetensorError):
            file.get_slice("large")[0:10:-1]


def test_without_safetensors_it_says_so() -> None:
    code = (
        "import sys; sys.modules['safetensors'] = None\nimport penstock\n"
        "try:\n    penstock.patch_safetensors().__enter__()\nexcept penstock.MissingDependencyError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install safetensors" in done.stdout


# ---- reading ahead


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve tensors of 1 MiB in two files, of which two are read at once."""
    monkeypatch.setattr("penstock.supply.read_ahead.STRETCH_BYTES", 2 << 20)
    for number in range(2):
        tensors = {f"t{number}.{i}": Raw("U8", (1 << 20,), raw_bytes("U8", (1 << 20,), i)) for i in range(6)}
        write_raw(tmp_path / f"s{number}.safetensors", tensors)
    return tmp_path


class Noted(ReadAhead):
    """Notes what was brought in."""

    def __init__(self, *arguments: Any) -> None:
        self.brought: list[list[str]] = []
        super().__init__(*arguments)

    def _bring(self, names: list[str]) -> None:
        self.brought.append(names)
        super()._bring(names)


def test_reading_goes_on_behind_what_is_taken_and_a_single_tensor_costs_itself(shards: Path) -> None:
    checkpoint = penstock.open(shards)
    names = checkpoint.offset_keys()
    ahead = Noted(checkpoint)
    ahead.want(names[5])
    assert ahead.brought == [[names[5]]]
    for name in names[:3]:
        ahead.want(name)
    ahead.close()
    # The stretches of two tensors each that were asked for, and the one behind.
    assert ahead.brought[1:] == [names[0:2], names[2:4], names[4:6]]
    for name in names:
        ahead.want(name)
    assert sorted(ahead.brought[1:]) == sorted([names[i : i + 2] for i in range(0, 12, 2)])


def test_any_order_brings_everything_once(shards: Path) -> None:
    checkpoint = penstock.open(shards)
    names = checkpoint.offset_keys()
    ahead = Noted(checkpoint)
    for name in [names[0], *reversed(names)]:
        ahead.want(name)
    ahead.close()
    assert sorted(ahead.brought[1:]) == sorted([names[i : i + 2] for i in range(0, 12, 2)])


def test_a_file_that_changed_is_an_error_for_whoever_wants_it(shards: Path, nothing_remains: None) -> None:
    checkpoint = penstock.open(shards)
    names = checkpoint.offset_keys()
    ahead = ReadAhead(checkpoint)
    ahead.want(names[0])
    changed = shards / "s1.safetensors"
    data = changed.read_bytes()
    changed.unlink()
    changed.write_bytes(data)
    ahead.want(names[4])  # begins to read on into the file that changed, and keeps quiet about it
    with pytest.raises(penstock.LocationChangedError, match=r"s1\.safetensors"):
        ahead.want(names[6])
    ahead.close()


def test_taking_tensors_one_by_one_reads_ahead(mixed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = mixed
    monkeypatch.setattr("penstock.supply.read_ahead.STRETCH_BYTES", 1 << 20)
    made: list[Noted] = []

    def note(*arguments: Any) -> Noted:
        made.append(Noted(*arguments))
        return made[-1]

    monkeypatch.setattr("penstock.supply.mapped.ReadAhead", note)
    with penstock.patch_safetensors(), safe_open(path, framework="pt") as file:
        for name in file.offset_keys():
            file.get_tensor(name)
    # The first tensor was asked for alone, and is a stretch by itself.
    assert sorted(name for names in made[0].brought for name in names) == sorted(penstock.open(path))
