"""What callers may pass: odd paths are opened, and what makes no sense is named, with what to write instead."""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from conftest import Raw, as_bytes, assert_bits, raw_bytes, shard, write_header, write_raw
from penstock._native import Checkpoint

ODD = os.fsdecode(b"mod\xe9l-\xff")
"""A name that is Latin-1, as old archives hold them: no UTF-8."""


@pytest.fixture
def odd(tmp_path: Path) -> tuple[Path, dict[str, Raw]]:
    """A sharded checkpoint in a directory, and in files, whose names are not UTF-8."""
    directory = tmp_path / ODD
    directory.mkdir()
    tensors = {name: Raw("F32", (3, 2), raw_bytes("F32", (3, 2), seed)) for seed, name in enumerate("ab")}
    for name, tensor in tensors.items():
        write_raw(directory / f"{ODD}-{name}.safetensors", {name: tensor})
    return directory, tensors


class TestPaths:
    """Whatever the system can name can be opened."""

    def test_a_directory_whose_name_is_not_utf8(self, odd: tuple[Path, dict[str, Raw]]) -> None:
        directory, tensors = odd
        for given in (directory, str(directory), os.fsencode(directory)):
            assert_bits(penstock.open(given).load(framework="np"), tensors)

    def test_a_file_whose_name_is_not_utf8_in_every_way_of_loading(self, odd: tuple[Path, dict[str, Raw]]) -> None:
        directory, tensors = odd
        path = os.fsencode(directory / f"{ODD}-a.safetensors")
        ckpt = penstock.open(path)
        assert dict(ckpt.stream(framework="np"))["a"].shape == (3, 2)
        into = {"a": np.zeros((3, 2), np.float32)}
        ckpt.load_into(into)
        views = ckpt.load(framework="np", mmap=True)
        read = penstock.load_file(path, framework="np")
        with penstock.safe_open(path, "np") as opened:
            alone = opened.get_tensor("a")
        for array in (into["a"], views["a"], read["a"], alone):
            assert as_bytes(array) == tensors["a"].data

    def test_what_a_checkpoint_says_of_its_files_can_be_opened(self, odd: tuple[Path, dict[str, Raw]]) -> None:
        directory, _ = odd
        ckpt = penstock.open(directory)
        files = sorted(str(path) for path in directory.iterdir())
        assert [path for path, _ in ckpt.files] == files
        assert ckpt["a"].location == files[0]
        assert all(Path(path).is_file() for path, _ in ckpt.files)
        assert ckpt.storage

    def test_an_index_in_a_directory_whose_name_is_not_utf8(self, odd: tuple[Path, dict[str, Raw]]) -> None:
        directory, tensors = odd
        shutil.copy(directory / f"{ODD}-a.safetensors", directory / "plain.safetensors")
        (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "plain.safetensors"}}')
        assert_bits(penstock.open(directory).load(framework="np"), {"a": tensors["a"]})

    def test_an_error_shows_the_bytes_and_names_a_path_that_exists(self, tmp_path: Path) -> None:
        path = write_header(tmp_path / f"{ODD}.safetensors", b"{nonsense}")
        with pytest.raises(penstock.FormatError) as raised:
            penstock.open(path)
        assert raised.value.location == str(path)
        assert r"mod\xe9l-\xff.safetensors" in str(raised.value)
        str(raised.value).encode()
        with pytest.raises(penstock.LocationNotFoundError, match=r"holds mod\\xe9l-\\xff\.safetensors") as missing:
            penstock.open(tmp_path / "other.safetensors")
        assert missing.value.remedy is not None
        missing.value.remedy.encode()

    def test_a_file_url_may_escape_bytes_that_are_not_utf8(self, odd: tuple[Path, dict[str, Raw]]) -> None:
        directory, tensors = odd
        assert sorted(penstock.open(directory.as_uri())) == sorted(tensors)

    def test_a_name_with_a_nul_is_not_found_and_blames_no_disk(self) -> None:
        for given in ("a\0b.safetensors", b"a\0ff.safetensors", "/tmp/\0"):
            with pytest.raises(penstock.LocationNotFoundError, match="NUL"):
                penstock.open(given)

    def test_a_nul_is_never_taken_for_an_escape(self, tmp_path: Path) -> None:
        write_raw(tmp_path / os.fsdecode(b"\xff.safetensors"), {"w": Raw("U8", (1,), b"1")})
        with pytest.raises(penstock.LocationNotFoundError):
            penstock.open(tmp_path / "\0ff.safetensors")

    def test_links_in_a_circle_are_named(self, tmp_path: Path) -> None:
        for name, other in (("a", "b"), ("b", "a")):
            (tmp_path / f"{name}.safetensors").symlink_to(tmp_path / f"{other}.safetensors")
        for given in (tmp_path / "a.safetensors", tmp_path):
            with pytest.raises(penstock.LocationNotFoundError, match="circle") as raised:
                penstock.open(given)
            assert raised.value.errno == 40
            assert "dmesg" not in str(raised.value)

    def test_a_name_that_is_too_long_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(penstock.LocationNotFoundError, match="longer than the file system allows"):
            penstock.open(tmp_path / ("x" * 300))

    @pytest.mark.parametrize("name", ["a:b.safetensors", "s3:a.safetensors", "C:\\a.safetensors"])
    def test_a_path_with_a_colon_is_the_same_file_from_any_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        body, held = shard(tmp_path, 0)
        (tmp_path / "here").mkdir()
        (tmp_path / "here" / name).write_bytes(body)
        monkeypatch.chdir(tmp_path / "here")
        opened = [penstock.open(given) for given in (name, f"./{name}", f"./{name[:2]}*.safetensors")]
        parts = Checkpoint.of_ranges([(name, [(0, 8)])], penstock.LoadOptions())
        monkeypatch.chdir("/")
        for ckpt in opened:
            assert ckpt.files == [(str(tmp_path / "here" / name), len(body))]
            assert_bits(ckpt.load(framework="np"), held)
        assert parts.files == [(str(tmp_path / "here" / name), len(body))]

    def test_a_tilde_is_the_home_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_raw(tmp_path / "model.safetensors", {"w": Raw("U8", (1,), b"1")})
        monkeypatch.setenv("HOME", str(tmp_path))
        for given in ("~/model.safetensors", "~", "~/*.safetensors", Path("~/model.safetensors"), b"~"):
            assert list(penstock.open(given)) == ["w"]

    def test_a_file_that_is_called_tilde_is_that_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "~").mkdir()
        write_raw(tmp_path / "~" / "m.safetensors", {"w": Raw("U8", (1,), b"1")})
        monkeypatch.chdir(tmp_path)
        assert list(penstock.open("~")) == ["w"]
        with pytest.raises(penstock.LocationNotFoundError, match="full path"):
            penstock.open("~nobody-of-that-name/x")

    @pytest.mark.parametrize("given", [None, 3, [None], [b"x", 3], {"a": "b"}, object()])
    def test_what_is_no_path_is_named(self, given: Any) -> None:
        with pytest.raises(penstock.ConfigError, match=r"path(\[\d\])? must be a path or a URL"):
            penstock.open(given)

    def test_open_files_are_refused(self, tmp_path: Path) -> None:
        path = write_raw(tmp_path / "m.safetensors", {})
        with path.open("rb") as file, pytest.raises(penstock.ConfigError, match="BufferedReader"):
            penstock.open(file)  # type: ignore[arg-type]
        with pytest.raises(penstock.ConfigError, match="BytesIO"):
            penstock.open(io.BytesIO())  # type: ignore[arg-type]

    @pytest.mark.parametrize("call", [lambda bad: penstock.pull(bad, "x"), lambda bad: penstock.pull("s3://b", bad)])
    def test_pull_names_what_is_no_path(self, call: Any) -> None:
        with pytest.raises(penstock.ConfigError, match=r"(url|dst) must be a path"):
            call(None)

    @pytest.mark.parametrize(
        ("given", "meant"),
        [("s3:/models/x", "s3://models/x"), ("hf:org/model", "hf://org/model"), ("gs:bucket/x", "gs://bucket/x"),
         ("https:/host/m.safetensors?sig=1", "https://host/m.safetensors"), (Path("s3://bucket/x"), "s3://bucket/x")],
    )  # fmt: skip
    def test_a_url_short_of_slashes_is_answered_with_the_url(self, given: Any, meant: str) -> None:
        with pytest.raises(penstock.LocationNotFoundError) as raised:
            penstock.open(given)
        assert str(raised.value.remedy).endswith(f"Write {meant}")
        assert "sig=1" not in str(raised.value)


@pytest.fixture
def ckpt(tmp_path: Path) -> penstock.Checkpoint:
    """Three tensors, whose names are letters among others."""
    tensors = {
        "a": Raw("F32", (2,), raw_bytes("F32", (2,))),
        "ab": Raw("F32", (3,), raw_bytes("F32", (3,), 1)),
        "i": Raw("I64", (1,), raw_bytes("I64", (1,), 2)),
    }
    return penstock.open(write_raw(tmp_path / "m.safetensors", tensors))


class TestNames:
    """A string is one name, wherever names are taken."""

    def test_a_string_is_one_name(self, ckpt: penstock.Checkpoint) -> None:
        assert list(ckpt.load("ab", framework="np")) == ["ab"]
        assert [name for name, _ in ckpt.stream("ab", framework="np")] == ["ab"]
        into = {"ab": np.zeros(3, np.float32)}
        ckpt.load_into(into, names="ab")
        assert into["ab"].any()
        with ckpt.prefetch("ab"):
            pass
        assert list(ckpt.load("ab", framework="np", mmap=True)) == ["ab"]
        with penstock.safe_open(ckpt.files[0][0], "np") as opened:
            assert list(opened.get_tensors("ab")) == ["ab"]

    def test_a_string_that_is_no_name_is_missing_as_a_whole(self, ckpt: penstock.Checkpoint) -> None:
        for load in (ckpt.load, ckpt.stream):
            with pytest.raises(penstock.TensorNotFoundError, match="ia"):
                load("ia", framework="np")

    @pytest.mark.parametrize("names", [b"ab", 3, [3], [["ab"]], [b"ab"], [None]])
    def test_what_is_no_name_is_refused_by_name(self, ckpt: penstock.Checkpoint, names: Any) -> None:
        into = {"ab": np.zeros(3, np.float32)}
        for call in (
            lambda: ckpt.load(names, framework="np"),
            lambda: ckpt.stream(names, framework="np"),
            lambda: ckpt.load_into(into, names=names),
            lambda: ckpt.prefetch(names),
            lambda: ckpt.load(names, framework="np", mmap=True),
        ):
            with pytest.raises(penstock.SelectionError, match="names must be names of tensors"):
                call()

    def test_a_name_that_is_no_unicode_is_not_found(self, ckpt: penstock.Checkpoint) -> None:
        assert "\udcff" not in ckpt
        for call in (lambda: ckpt["\udcff"], lambda: ckpt.load(["\udcff"], framework="np")):
            with pytest.raises(penstock.TensorNotFoundError):
                call()

    def test_a_pattern_is_no_filter(self, ckpt: penstock.Checkpoint) -> None:
        with pytest.raises(penstock.ConfigError, match="fnmatch"):
            ckpt.load(filter="a*", framework="np")  # type: ignore[arg-type]

    def test_slices_are_a_mapping(self, ckpt: penstock.Checkpoint) -> None:
        with pytest.raises(penstock.SelectionError, match="slices must be a mapping"):
            ckpt.load(slices=[("a", slice(1))], framework="np")  # type: ignore[arg-type]


class TestConfig:
    """Settings that make no sense are ConfigErrors that name the keyword."""

    @pytest.mark.parametrize("value", ["many", -1, 2**64, 1.5, True, b"3"])
    @pytest.mark.parametrize("name", ["readers", "block_bytes", "staging_bytes", "window_bytes", "cache_bytes"])
    def test_what_is_no_number_is_named(self, name: str, value: Any) -> None:
        with pytest.raises(penstock.ConfigError, match=name) as raised:
            penstock.LoadOptions(**{name: value})
        assert repr(value) in str(raised.value) or str(value) in str(raised.value)

    @pytest.mark.parametrize("name", ["block_bytes", "staging_bytes", "window_bytes", "cache_bytes"])
    def test_a_size_is_a_number_or_what_a_variable_may_hold(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for text, nbytes in (("4MiB", 4 << 20), (" 5mb ", 5_000_000), ("2097152", 2 << 20)):
            assert getattr(penstock.LoadOptions(**{name: text}), name) == nbytes
            monkeypatch.setenv(f"PENSTOCK_{name.upper()}", text)
            assert getattr(penstock.LoadOptions(), name) == nbytes
        for text in ("5 apples", "", "-1"):
            with pytest.raises(penstock.ConfigError, match="or a size such as 4MiB or 500GB"):
                penstock.LoadOptions(**{name: text})

    def test_a_checkpoint_is_opened_with_a_bound_in_words(self, ckpt: penstock.Checkpoint, tmp_path: Path) -> None:
        opened = penstock.open(ckpt.files[0][0], cache_dir=tmp_path / "cache", cache_bytes="5GB")
        assert opened.options.cache_bytes == 5_000_000_000
        assert pickle.loads(pickle.dumps(opened)).options.cache_bytes == 5_000_000_000  # noqa: S301 - our own

    @pytest.mark.parametrize(
        "keywords",
        [
            {"cache": 3},
            {"cache": "often"},
            {"verify": "yes"},
            {"verify": True},
            {"cache_dir": 3},
            {"cache_dir": ["x"]},
        ],
    )
    def test_other_settings_are_named_too(self, keywords: dict[str, Any]) -> None:
        with pytest.raises(penstock.ConfigError, match=next(iter(keywords))):
            penstock.LoadOptions(**keywords)

    def test_numbers_of_numpy_are_numbers(self) -> None:
        assert penstock.LoadOptions(readers=np.int64(3)).readers == 3  # type: ignore[arg-type]

    def test_a_directory_that_is_not_utf8(self, tmp_path: Path) -> None:
        directory = os.fsencode(tmp_path / ODD)
        assert penstock.LoadOptions(cache_dir=directory).cache_dir == os.fsdecode(directory)

    def test_a_copy_has_the_same_settings(self, tmp_path: Path) -> None:
        config = penstock.LoadOptions(readers=3, cache="use", cache_dir=tmp_path, block_bytes=8192)
        for made in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):  # noqa: S301 - our own
            assert repr(made) == repr(config)


class TestConversion:
    """Dtypes and devices: what is none is named, with those that there are."""

    @pytest.mark.parametrize("framework", ["pt", "np"])
    @pytest.mark.parametrize(
        ("dtype", "meant"), [("fp16", "float16"), ("bf16", "bfloat16"), ("torch.float32", "float32")]
    )
    def test_a_dtype_that_is_called_otherwise(
        self, ckpt: penstock.Checkpoint, framework: str, dtype: str, meant: str
    ) -> None:
        pytest.importorskip("torch")
        for load in (ckpt.load, ckpt.stream):
            with pytest.raises(penstock.SelectionError, match=f"'{meant}'"):
                load(dtype=dtype, framework=framework)

    @pytest.mark.parametrize("framework", ["pt", "np"])
    @pytest.mark.parametrize("dtype", ["int8", "I64", "bool"])
    def test_integers_are_refused_for_floating_point_weights(
        self, ckpt: penstock.Checkpoint, framework: str, dtype: str
    ) -> None:
        pytest.importorskip("torch")
        with pytest.raises(penstock.SelectionError, match="integers"):
            ckpt.load(dtype=dtype, framework=framework)

    @pytest.mark.parametrize("dtype", [3, "nn", object()])
    def test_what_is_no_dtype_at_all(self, ckpt: penstock.Checkpoint, dtype: Any) -> None:
        pytest.importorskip("torch")
        with pytest.raises(penstock.SelectionError, match="not a dtype of torch"):
            ckpt.load(dtype=dtype)

    def test_numpy_knows_bfloat16_by_its_name(self, ckpt: penstock.Checkpoint) -> None:
        pytest.importorskip("ml_dtypes")
        assert str(ckpt.load("a", dtype="bfloat16", framework="np")["a"].dtype) == "bfloat16"

    def test_packed_numbers_are_not_converted(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        if not hasattr(torch, "float4_e2m1fn_x2"):
            pytest.skip("this torch has no F4")
        path = write_raw(tmp_path / "f4.safetensors", {"w": Raw("F4", (2, 4), bytes(4))})
        with pytest.raises(penstock.SelectionError, match="F4") as raised:
            penstock.open(path).load(dtype=torch.float32)
        assert (raised.value.tensor, raised.value.location) == ("w", str(path))
        assert penstock.open(path).load()["w"].shape == (2, 2)

    def test_a_dtype_that_torch_does_not_convert_to(self, ckpt: penstock.Checkpoint) -> None:
        torch = pytest.importorskip("torch")
        if not hasattr(torch, "float4_e2m1fn_x2"):
            pytest.skip("this torch has no F4")
        with pytest.raises(penstock.SelectionError):
            ckpt.load(dtype="F4")

    @pytest.mark.parametrize("size", [1, 0])
    def test_more_dimensions_than_numpy_has(self, tmp_path: Path, size: int) -> None:
        shape = (1,) * 69 + (size,)
        path = write_raw(tmp_path / "deep.safetensors", {"w": Raw("U8", shape, b"1" * size)})
        with pytest.raises(penstock.SelectionError, match="70 dimensions"):
            penstock.open(path).load(framework="np")

    @pytest.mark.parametrize(
        ("device", "meant"),
        [("gpu", "'cuda'"), ("CUDA", "'cuda'"), ("host", "'cpu'"),
         ("nonsense", "'cuda:N'"), (True, "'cuda:N'"), (None, "'cuda:N'")],
    )  # fmt: skip
    def test_a_device_that_is_none(self, ckpt: penstock.Checkpoint, device: Any, meant: str) -> None:
        pytest.importorskip("torch")
        with pytest.raises(penstock.DeviceError, match="not a device of torch") as raised:
            ckpt.load(device=device)
        assert meant in str(raised.value.remedy)
        assert len(str(raised.value)) < 120

    @pytest.mark.parametrize(
        "keywords", [{"device": "cuda"}, {"device": 0}, {"dtype": "float16"}, {"slices": {"a": 0}}]
    )
    def test_views_are_of_files_as_they_are(self, ckpt: penstock.Checkpoint, keywords: dict[str, Any]) -> None:
        with pytest.raises(penstock.SelectionError, match=f"mmap=True.*{next(iter(keywords))}="):
            ckpt.load(mmap=True, framework="np", **keywords)

    def test_prefault_is_for_mapped_files(self, ckpt: penstock.Checkpoint) -> None:
        with pytest.raises(penstock.ConfigError, match="mmap=True"):
            ckpt.load(prefault=True, framework="np")
        assert ckpt.load(prefault=True, mmap=True, framework="np").keys() == ckpt.load(framework="np").keys()

    def test_load_model_takes_a_module_or_a_function_first(self, ckpt: penstock.Checkpoint) -> None:
        torch = pytest.importorskip("torch")
        path = ckpt.files[0][0]
        with pytest.raises(penstock.ConfigError, match=r"load_model\(model, path\)"):
            penstock.load_model(path, torch.nn.Linear(1, 1))  # type: ignore[arg-type]
        for first, second in ((torch.nn.Linear, torch.nn.Linear), (path, path)):
            with pytest.raises(penstock.ConfigError, match=r"load_model\(lambda: MyModel\(config\), path\)"):
                penstock.load_model(first, second)
        with pytest.raises(penstock.ConfigError, match="lambda"):
            penstock.load_model(None, path)  # type: ignore[arg-type]
        with pytest.raises(penstock.ConfigError, match="returned a dict"):
            penstock.load_model(dict, path)  # type: ignore[type-var]
        with pytest.raises(penstock.SelectionError, match="integers"):
            penstock.load_model(lambda: torch.nn.Linear(1, 1), path, dtype=torch.int8)

    def test_backends_are_those_of_safetensors(self, ckpt: penstock.Checkpoint) -> None:
        path = ckpt.files[0][0]
        for backend in ("mmap", "pread"):
            assert penstock.load_file(path, framework="np", backend=backend)
        for call in (penstock.load_file, penstock.safe_open):
            with pytest.raises(penstock.SafetensorError, match="bogus"):
                call(path, framework="np", backend="bogus")


class TestCheckpoints:
    """What people do with the object itself."""

    def test_with_is_a_block_that_closes_nothing(self, ckpt: penstock.Checkpoint) -> None:
        with ckpt as inside:
            assert inside is ckpt
        assert ckpt.load("a", framework="np")

    def test_a_pickled_checkpoint_is_opened_again(self, ckpt: penstock.Checkpoint) -> None:
        made = pickle.loads(pickle.dumps(penstock.open(ckpt.files[0][0], options=penstock.LoadOptions(readers=2))))  # noqa: S301
        assert list(made) == list(ckpt)
        assert made.options.readers == 2

    def test_a_pickled_checkpoint_means_the_same_file_from_any_directory(
        self, ckpt: penstock.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = Path(ckpt.files[0][0])
        monkeypatch.chdir(path.parent)
        pickled = pickle.dumps(penstock.open(path.name))
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert list(pickle.loads(pickled)) == list(ckpt)  # noqa: S301

    def test_a_location_that_may_hold_secrets_is_not_pickled(self, ckpt: penstock.Checkpoint) -> None:
        from penstock.checkpoint import Checkpoint

        for url in ("https://host/m?sig=SECRET", "HTTPS://me:SECRET@host/m", "http://SECRET@host:9000/m"):
            signed = Checkpoint(ckpt._native, ckpt.options, [url])
            with pytest.raises(penstock.ConfigError, match="secret") as raised:
                pickle.dumps(signed)
            assert "SECRET" not in str(raised.value)

    @pytest.mark.parametrize("url", ["http://host:9000/models@v1/x", "s3://bucket/models@v1/x", "hf://org/name@v1"])
    def test_a_location_with_an_at_that_ends_no_password_is_pickled(self, ckpt: penstock.Checkpoint, url: str) -> None:
        from penstock.checkpoint import Checkpoint

        _, (paths, *_) = Checkpoint(ckpt._native, ckpt.options, [url]).__reduce__()
        assert paths == [url]

    def test_small_checkpoints_are_not_nothing(self, ckpt: penstock.Checkpoint) -> None:
        assert repr(ckpt).endswith("3 tensors, 28 B>")

    def test_stats_are_readable(self, ckpt: penstock.Checkpoint) -> None:
        ckpt.load(framework="np")
        shown = repr(ckpt.stats)
        assert shown.startswith("<penstock.LoadStats: 3 tensors, 28 B in ")
        assert "limited by" in shown
        assert "object at" not in shown


def test_threads_that_memory_does_not_suffice_for_name_that_limit(tmp_path: Path) -> None:
    """Starting a thread fails alike for want of processes and of address space: the remedy tells which it was."""
    tensors = {f"w{i}": Raw("U8", (1 << 20,), bytes(1 << 20)) for i in range(8)}
    path = write_raw(tmp_path / "m.safetensors", tensors)
    script = f"""
import resource, penstock
from pathlib import Path
ckpt = penstock.open({str(path)!r})
held = []
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (13 << 20), resource.RLIM_INFINITY))
told = []
try:
    ckpt.load(framework="dlpack", options=penstock.LoadOptions(readers=64, block_bytes=65536))
    told = ckpt.stats.notes
except penstock.InsufficientMemoryError as error:
    told = [str(error)]
print("\\n".join(told))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "ulimit -v" in done.stdout, done.stdout
    assert "ulimit -u" not in done.stdout, done.stdout


def test_settings_that_are_no_load_options_say_what_to_write(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"a": Raw("F32", (2,), raw_bytes("F32", (2,)))})
    ckpt = penstock.open(path)
    wrong: Any = {"readers": 8}
    for call in (
        lambda: penstock.open(path, options=wrong),
        lambda: ckpt.load(options=wrong),
        lambda: ckpt.load(options=wrong, mmap=True),
        lambda: ckpt.stream(options=wrong),
        lambda: ckpt.load_into({"a": np.zeros(2, "f4")}, options=wrong),
        lambda: ckpt.prefetch(options=wrong),
    ):
        with pytest.raises(
            penstock.ConfigError, match=r"LoadOptions, not dict\. Write options=penstock\.LoadOptions\("
        ):
            call()


def test_python_may_say_which_name_of_the_package_was_meant() -> None:
    with pytest.raises(AttributeError) as raised:
        penstock.opne  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("opne", penstock)
