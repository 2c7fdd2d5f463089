"""Verified loads: what is handed out is what the manifest says, however it was read; whatever was done to the files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
import servers
from conftest import Raw, assert_bits, drop_cache, raw_bytes, write_raw

NAME = "penstock-manifest.blake3"
MIB = 1 << 20
REQUIRE = penstock.LoadOptions(verify="require")

SHAPES = {"embed": (1100, 512), "norm": (3,), "q": (512, 300), "k": (512, 300), "big": (2, 1024, 700)}
"""From a few bytes to several blocks; two of one size."""


def tensors_of(seed: int) -> dict[str, Raw]:
    return {
        f"{seed}.{name}": Raw("F32", shape, raw_bytes("F32", shape, seed * 10 + place))
        for place, (name, shape) in enumerate(SHAPES.items())
    }


class Model:
    """A checkpoint of two shards, an index and a configuration, with a manifest of them."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self.tensors: dict[str, Raw] = {}
        weight_map = {}
        for number in (seed, seed + 1):
            held = tensors_of(number)
            write_raw(directory / f"model-{number - seed}.safetensors", held, {"format": "pt"})
            self.tensors |= held
            weight_map |= dict.fromkeys(held, f"model-{number - seed}.safetensors")
        self.index = directory / "model.safetensors.index.json"
        self.index.write_text(json.dumps({"weight_map": weight_map}))
        (directory / "config.json").write_text("{}")
        self.shard = directory / "model-0.safetensors"
        self.manifest = penstock.manifest(directory).path


def flip(path: Path, at: int) -> None:
    """Flips a bit, and puts the times back, as one would who does not want to be seen."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    drop_cache(path)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path / "model")


# How a whole checkpoint is loaded. Each of them checks bits itself only where it returns other than a dict.
def whole(path: Any, **options: Any) -> dict[str, Any]:
    return penstock.open(path, options=penstock.LoadOptions(**options)).load(framework="np")


def cold(path: Path, **options: Any) -> dict[str, Any]:
    for file in path.glob("*.safetensors"):
        drop_cache(file)
    return whole(path, **options)


def direct(path: Path, **options: Any) -> dict[str, Any]:
    return whole(path, cache="bypass", **options)


def mapped(path: Path, **options: Any) -> dict[str, Any]:
    return penstock.open(path, options=penstock.LoadOptions(**options)).load(framework="np", mmap=True)


def prefaulted(path: Path, **options: Any) -> dict[str, Any]:
    return penstock.open(path, options=penstock.LoadOptions(**options)).load(framework="np", mmap=True, prefault=True)


def streamed(path: Path, **options: Any) -> dict[str, Any]:
    return dict(penstock.open(path, options=penstock.LoadOptions(**options)).stream(framework="np"))


def into(path: Path, **options: Any) -> dict[str, Any]:
    ckpt = penstock.open(path, options=penstock.LoadOptions(**options))
    arrays = {name: np.zeros(info.shape, np.float32) for name, info in ckpt.items()}
    ckpt.load_into(arrays)
    return arrays


def one_by_one(path: Path, **options: Any) -> dict[str, Any]:
    ckpt = penstock.open(path, options=penstock.LoadOptions(**options))
    return {name: ckpt.get_tensor(name, framework="np") for name in ckpt}


def small_blocks(path: Path, **options: Any) -> dict[str, Any]:
    return whole(path, block_bytes=12 << 10, **options)


WAYS: list[Callable[..., dict[str, Any]]] = [
    whole,
    cold,
    direct,
    mapped,
    prefaulted,
    streamed,
    into,
    one_by_one,
    small_blocks,
]
each_way = pytest.mark.parametrize("way", WAYS)


class TestGood:
    @each_way
    @pytest.mark.parametrize("verify", ["auto", "require", "off"])
    def test_a_verified_load_is_bit_exact(self, model: Model, way: Any, verify: str) -> None:
        assert_bits(way(model.directory, verify=verify), model.tensors)

    def test_figures_say_what_was_verified_and_what_that_cost(self, model: Model) -> None:
        ckpt = penstock.open(model.directory)
        ckpt.load(framework="np")
        stats = ckpt.stats
        assert stats is not None
        # All of both files, whose headers are in the first block; and nothing twice.
        assert stats.verified_bytes == sum(nbytes for _, nbytes in ckpt.files)
        assert stats.verification_excess_bytes == stats.verified_bytes - stats.bytes
        assert stats.read_bytes == stats.verified_bytes
        ckpt.load(framework="np", options=penstock.LoadOptions(verify="off"))
        assert ckpt.stats is not None
        assert (ckpt.stats.verified_bytes, ckpt.stats.verification_excess_bytes) == (0, 0)

    def test_a_slice_reads_whole_blocks_once(self, model: Model) -> None:
        ckpt = penstock.open(model.directory)
        name = "0.big"
        loaded = ckpt.load([name], slices={name: (slice(None), slice(5, 9))}, framework="np")[name]
        raw = model.tensors[name]
        whole = np.frombuffer(raw.data, np.float32).reshape(raw.shape)
        assert loaded.tobytes() == whole[:, 5:9].tobytes()
        stats = ckpt.stats
        assert stats is not None
        # Two places, 2.8 MB from each other: two blocks.
        assert stats.verified_bytes == stats.read_bytes == 2 * MIB
        assert stats.verification_excess_bytes < stats.verified_bytes

    def test_columns_read_each_block_once(self, model: Model) -> None:
        ckpt = penstock.open(model.directory)
        name = "0.big"
        loaded = ckpt.load([name], slices={name: (slice(None), slice(None), slice(0, 7))}, framework="np")[name]
        whole = np.frombuffer(model.tensors[name].data, np.float32).reshape(model.tensors[name].shape)
        assert loaded.tobytes() == whole[..., :7].tobytes()
        assert ckpt.stats is not None
        first, end = ckpt[name].byte_range
        size = Path(ckpt[name].location).stat().st_size
        blocks = min(-(-end // MIB) * MIB, size) - first // MIB * MIB
        assert ckpt.stats.read_bytes == ckpt.stats.verified_bytes == blocks

    def test_a_single_file_is_verified_by_the_manifest_beside_it(self, model: Model) -> None:
        ckpt = penstock.open(model.shard, options=REQUIRE)
        ckpt.load(framework="np")
        assert ckpt.stats is not None
        assert ckpt.stats.verified_bytes == model.shard.stat().st_size

    def test_a_view_that_is_written_to_does_not_make_its_neighbours_look_damaged(self, model: Model) -> None:
        ckpt = penstock.open(model.directory, options=REQUIRE)
        views = ckpt.load(framework="np", mmap=True)
        views["0.q"][:] = 0
        assert_bits(ckpt.load(framework="np", mmap=True), model.tensors)

    def test_odd_sizes_are_verified(self, tmp_path: Path) -> None:
        for number, nbytes in enumerate([0, 1, MIB - 200, MIB, MIB + 1, 2 * MIB - 88, 2 * MIB, 3 * MIB + 7]):
            directory = tmp_path / str(number)
            directory.mkdir()
            tensors = {"w": Raw("U8", (nbytes,), raw_bytes("U8", (nbytes,), number))}
            path = write_raw(directory / "m.safetensors", tensors, pad_to=1)
            penstock.manifest(directory)
            assert_bits(whole(directory, verify="require"), tensors)
            flip(path, path.stat().st_size - 1)
            with pytest.raises(penstock.IntegrityError):
                whole(directory)


def places(model: Model) -> dict[str, tuple[Path, int]]:
    """A place of every kind in which a bit may flip."""
    ckpt = penstock.open(model.directory)
    first = {name: ckpt[f"0.{name}"].byte_range for name in SHAPES}
    end = model.shard.stat().st_size
    big = first["big"]
    return {
        "the header's length": (model.shard, 0),
        "the header's text": (model.shard, 20),
        "the padding of the header": (model.shard, min(begin for begin, _ in first.values()) - 1),
        "the first byte of data": (model.shard, min(begin for begin, _ in first.values())),
        "a tensor in a shared block": (model.shard, first["norm"][0]),
        "the inside of a large tensor": (model.shard, sum(big) // 2),
        "the last byte before a block ends": (model.shard, MIB - 1),
        "the first byte of a block": (model.shard, 2 * MIB),
        "the last byte": (model.shard, end - 1),
        "the index": (model.index, model.index.stat().st_size // 2),
    }


class TestAttacks:
    """Each is a typed error, and nothing is handed out."""

    @each_way
    @pytest.mark.parametrize("place", range(10))
    def test_one_flipped_bit(self, model: Model, way: Any, place: int) -> None:
        path, at = list(places(model).values())[place]
        flip(path, at)
        with pytest.raises(penstock.IntegrityError) as raised:
            way(model.directory)
        error = raised.value
        assert error.code == "integrity"
        assert error.location == str(path)
        assert error.byte_range is not None
        assert error.byte_range[0] <= at < error.byte_range[1]

    def test_the_error_names_the_tensors_of_the_block(self, model: Model) -> None:
        ckpt = penstock.open(model.directory)
        at = ckpt["0.norm"].byte_range[0]
        flip(model.shard, at)
        block = range(at // MIB * MIB, (at // MIB + 1) * MIB)
        touched = [
            name
            for name in ckpt.offset_keys()
            if name.startswith("0.")
            and ckpt[name].byte_range[0] < block.stop
            and ckpt[name].byte_range[1] > block.start
        ]
        for mmap in (False, True):
            with pytest.raises(penstock.IntegrityError) as raised:
                ckpt.load(framework="np", mmap=mmap)
            assert raised.value.details["tensors"].split(", ") == touched
            assert raised.value.tensor == touched[0]
            assert "not what the manifest says" in str(raised.value)

    def test_what_the_damage_does_not_touch_is_loaded(self, model: Model) -> None:
        flip(model.shard, model.shard.stat().st_size - 1)
        ckpt = penstock.open(model.directory, options=REQUIRE)
        wanted = [name for name in ckpt if name.startswith("1.")] + ["0.norm"]
        assert_bits(ckpt.load(wanted, framework="np"), {name: model.tensors[name] for name in wanted})

    def test_headers_are_verified_before_they_are_parsed(self, model: Model) -> None:
        # As FormatError, this would show that it was parsed.
        model.shard.write_bytes(b"\xff" * model.shard.stat().st_size)
        with pytest.raises(penstock.IntegrityError):
            penstock.open(model.directory)
        with pytest.raises(penstock.FormatError):
            penstock.open(model.directory, options=penstock.LoadOptions(verify="off"))

    @each_way
    @pytest.mark.parametrize("more", [-1, -MIB, -(5 * MIB), 1, MIB])
    def test_truncation_and_extension(self, model: Model, way: Any, more: int) -> None:
        size = model.shard.stat().st_size
        os.truncate(model.shard, size + more)
        with pytest.raises(penstock.IntegrityError, match=f"has {size + more} bytes, and the manifest says {size}"):
            way(model.directory)

    @each_way
    def test_swapped_files(self, model: Model, way: Any) -> None:
        one, other = model.shard, model.directory / "model-1.safetensors"
        one.rename(model.directory / "x")
        other.rename(one)
        (model.directory / "x").rename(other)
        # Which tensors are where, the index says; without it nothing but the manifest would see this.
        with pytest.raises(penstock.IntegrityError):
            way(model.directory)

    @each_way
    def test_two_tensors_of_one_size_exchanged_in_the_data(self, model: Model, way: Any) -> None:
        ckpt = penstock.open(model.directory)
        body = bytearray(model.shard.read_bytes())
        (q, q_end), (k, k_end) = ckpt["0.q"].byte_range, ckpt["0.k"].byte_range
        body[q:q_end], body[k:k_end] = body[k:k_end], body[q:q_end]
        model.shard.write_bytes(body)
        with pytest.raises(penstock.IntegrityError):
            way(model.directory)

    @each_way
    def test_two_tensors_of_one_size_exchanged_in_the_header(self, model: Model, way: Any) -> None:
        body = model.shard.read_bytes()
        swapped = body.replace(b'"0.q"', b'"0.?"', 1).replace(b'"0.k"', b'"0.q"', 1).replace(b'"0.?"', b'"0.k"', 1)
        assert swapped != body
        model.shard.write_bytes(swapped)
        with pytest.raises(penstock.IntegrityError):
            way(model.directory)

    @each_way
    def test_the_manifest_of_another_checkpoint(self, model: Model, way: Any, tmp_path: Path) -> None:
        # Of the same names and sizes.
        other = Model(tmp_path / "other", seed=2)
        shutil.copy(other.manifest, model.manifest)
        with pytest.raises(penstock.IntegrityError):
            way(model.directory)

    def test_a_file_that_the_manifest_does_not_have(self, model: Model) -> None:
        extra = {"extra": Raw("F32", (3,), raw_bytes("F32", (3,)))}
        path = write_raw(model.directory / "adapter.safetensors", extra)
        with pytest.raises(penstock.IntegrityError, match="does not have this file") as raised:
            penstock.open(path)
        assert raised.value.location == str(path)

    @pytest.mark.parametrize("verify", ["auto", "require"])
    @pytest.mark.parametrize("at", [0, 17, 21, 40, 100, -40, -1])
    def test_one_flipped_bit_in_the_manifest(self, model: Model, verify: Any, at: int) -> None:
        flip(model.manifest, at % model.manifest.stat().st_size)
        with pytest.raises(penstock.IntegrityError, match="manifest is refused") as raised:
            whole(model.directory, verify=verify)
        assert raised.value.code == "bad_manifest"
        assert raised.value.location == str(model.manifest)
        assert_bits(whole(model.directory, verify="off"), model.tensors)

    @pytest.mark.parametrize("content", [b"", b"{}", b"penstock-blake3\n", b"\0" * 5000])
    def test_a_manifest_that_is_none(self, model: Model, content: bytes) -> None:
        model.manifest.write_bytes(content)
        with pytest.raises(penstock.IntegrityError, match="manifest is refused"):
            whole(model.directory)

    def test_a_manifest_of_a_terabyte_takes_no_memory(self, model: Model) -> None:
        os.truncate(model.manifest, 1 << 40)
        with pytest.raises(penstock.IntegrityError, match="more than") as raised:
            whole(model.directory)
        assert raised.value.code == "bad_manifest"

    @pytest.mark.parametrize("verify", ["auto", "require"])
    def test_a_symlink_in_place_of_the_manifest(self, model: Model, verify: Any, tmp_path: Path) -> None:
        for target in (tmp_path / "elsewhere", Path("/dev/zero"), Path("nowhere"), Path("../../blobs/../x")):
            elsewhere = tmp_path / "elsewhere"
            if not elsewhere.exists():
                shutil.copy(model.manifest, elsewhere)
            model.manifest.unlink()
            model.manifest.symlink_to(target)
            with pytest.raises(penstock.IntegrityError, match="symbolic link") as raised:
                whole(model.directory, verify=verify)
            assert raised.value.code == "bad_manifest"

    @pytest.mark.parametrize("kind", ["fifo", "directory"])
    def test_no_file_in_place_of_the_manifest(self, model: Model, kind: str) -> None:
        model.manifest.unlink()
        os.mkfifo(model.manifest) if kind == "fifo" else model.manifest.mkdir()
        with pytest.raises(penstock.IntegrityError, match="no regular file"):
            whole(model.directory)

    def test_the_links_of_the_hub_s_cache_are_followed(self, tmp_path: Path) -> None:
        model = Model(tmp_path / "repo" / "snapshots" / "0123")
        blobs = tmp_path / "repo" / "blobs"
        blobs.mkdir()
        for number, path in enumerate(sorted(model.directory.iterdir())):
            path.rename(blobs / f"b{number}")
            path.symlink_to(f"../../blobs/b{number}")
        assert_bits(whole(model.directory, verify="require"), model.tensors)
        flip(model.shard, MIB)
        with pytest.raises(penstock.IntegrityError):
            whole(model.directory)

    @each_way
    def test_a_file_that_is_written_to_after_it_was_opened(self, model: Model, way: Any) -> None:
        ckpt = penstock.open(model.directory)
        at = ckpt["0.big"].byte_range[1] - 1
        flip(model.shard, at)
        # Its times are what they were.
        with pytest.raises(penstock.IntegrityError):
            ckpt.load(framework="np", mmap=way in (mapped, prefaulted))

    @pytest.mark.parametrize("way", [way for way in WAYS if way not in (mapped, prefaulted)])
    def test_a_file_changed_after_it_was_verified_changes_nothing(self, model: Model, way: Any) -> None:
        loaded = way(model.directory, verify="require")
        with model.shard.open("r+b") as file:
            file.write(b"\xff" * model.shard.stat().st_size)
        assert_bits(loaded, model.tensors)

    def test_nothing_of_a_damaged_block_is_streamed(self, model: Model) -> None:
        ckpt = penstock.open(model.directory)
        at = ckpt["0.q"].byte_range[0]
        flip(model.shard, at)
        block = at // MIB * MIB
        handed_out: list[str] = []
        tensors = ckpt.stream(framework="np")
        with pytest.raises(penstock.IntegrityError):
            handed_out.extend(name for name, _ in tensors)
        for name in handed_out:
            begin, end = ckpt[name].byte_range
            assert not (name.startswith("0.") and begin < block + MIB and end > block), name


class TestRequire:
    def test_without_a_manifest_nothing_is_loaded(self, model: Model) -> None:
        model.manifest.unlink()
        for way in WAYS:
            with pytest.raises(penstock.IntegrityError, match="one is required") as raised:
                way(model.directory, verify="require")
            assert raised.value.code == "no_manifest"
        assert_bits(whole(model.directory), model.tensors)

    def test_a_load_can_require_what_opening_found(self, model: Model) -> None:
        ckpt = penstock.open(model.directory)
        assert_bits(ckpt.load(framework="np", options=REQUIRE), model.tensors)
        # Taking the manifest away later changes nothing.
        model.manifest.unlink()
        assert_bits(ckpt.load(framework="np", options=REQUIRE), model.tensors)
        ckpt = penstock.open(model.directory)
        with pytest.raises(penstock.IntegrityError, match="no manifest when"):
            ckpt.load(framework="np", options=REQUIRE)

    def test_a_load_cannot_require_what_opening_left_out(self, model: Model) -> None:
        ckpt = penstock.open(model.directory, options=penstock.LoadOptions(verify="off"))
        for mmap in (False, True):
            with pytest.raises(penstock.IntegrityError, match="opened without") as raised:
                ckpt.load(framework="np", mmap=mmap, options=REQUIRE)
            assert raised.value.code == "no_manifest"

    def test_files_of_several_directories_each_need_a_manifest(self, model: Model, tmp_path: Path) -> None:
        other = Model(tmp_path / "other", seed=2)
        files = [model.shard, other.shard]
        assert len(penstock.open(files, options=REQUIRE).load(framework="np")) == 2 * len(SHAPES)
        other.manifest.unlink()
        with pytest.raises(penstock.IntegrityError, match="one is required"):
            penstock.open(files, options=REQUIRE)

    def test_the_variable_requires_it_of_every_load(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PENSTOCK_VERIFY", "require")
        assert_bits(penstock.load_file(model.shard), tensors_of(0))
        model.manifest.unlink()
        with pytest.raises(penstock.IntegrityError):
            penstock.load_file(model.shard)
        with pytest.raises(penstock.IntegrityError), penstock.safe_open(model.shard, "np") as file:
            file.get_tensor("0.q")

    def test_lazy_files_hand_out_nothing_that_is_damaged(self, model: Model) -> None:
        at = penstock.open(model.directory)["0.big"].byte_range[0]
        flip(model.shard, at)
        with pytest.raises(penstock.IntegrityError), penstock.safe_open(model.shard, "np") as file:
            file.get_tensor("0.big")

    def test_the_command_has_a_code_for_it(self, model: Model) -> None:
        def load(*more: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "penstock", "load", str(model.directory), "--framework", "np", "--json"]
            return subprocess.run([*command, *more], capture_output=True, text=True, check=False)

        assert load("--verify", "require").returncode == 0
        flip(model.shard, MIB)
        done = load()
        assert done.returncode == 9, done.stderr
        assert json.loads(done.stdout)["error"]["code"] == "integrity"
        assert load("--verify", "off").returncode == 0


class Damaged(bytes):
    """A body of which a server damages one byte in so many answers."""

    at = 0
    times = 0

    def __getitem__(self, key: Any) -> Any:
        taken = super().__getitem__(key)
        if isinstance(key, slice) and key.start <= self.at < key.stop and self.times > 0:
            self.times -= 1
            damaged = bytearray(taken)
            damaged[self.at - key.start] ^= 1
            return bytes(damaged)
        return taken


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Remote]:
    with servers.moto(tmp_path_factory.mktemp("server")) as remote:
        yield remote


@pytest.fixture
def s3(bucket: servers.Remote, model: Model, monkeypatch: pytest.MonkeyPatch) -> servers.Remote:
    """The model, in a bucket."""
    servers.forget_settings(monkeypatch, "AWS_")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    upload(bucket, model)
    return bucket


def upload(remote: servers.Remote, model: Model) -> None:
    for path in model.directory.iterdir():
        remote.put(f"model/{path.name}", path.read_bytes())  # type: ignore[operator]


class TestRemote:
    def test_a_load_from_a_bucket_is_verified(self, s3: servers.Remote, model: Model) -> None:
        ckpt = penstock.open(f"{s3.root}/model/")
        assert_bits(ckpt.load(framework="np"), model.tensors)
        assert ckpt.stats is not None
        assert ckpt.stats.verified_bytes == ckpt.stats.network_bytes == sum(nbytes for _, nbytes in ckpt.files)
        # A lone object's manifest is asked for only where it is required.
        lone = f"{s3.root}/model/model-0.safetensors"
        assert_bits(whole(lone, verify="require"), tensors_of(0))
        assert_bits(whole(lone), tensors_of(0))

    @pytest.mark.parametrize("place", range(10))
    def test_one_flipped_bit(self, s3: servers.Remote, model: Model, place: int) -> None:
        path, at = list(places(model).values())[place]
        flip(path, at)
        upload(s3, model)
        with pytest.raises(penstock.IntegrityError) as raised:
            whole(f"{s3.root}/model/")
        assert raised.value.location == f"{s3.root}/model/{path.name}"
        assert raised.value.byte_range is not None
        assert raised.value.byte_range[0] <= at < raised.value.byte_range[1]

    def test_other_attacks(self, s3: servers.Remote, model: Model, tmp_path: Path) -> None:
        put: Any = s3.put
        body, key = model.shard.read_bytes(), "model/model-0.safetensors"
        url = f"{s3.root}/model/"
        for attack in (body[:-1], body + b"\0", (model.directory / "model-1.safetensors").read_bytes()):
            put(key, attack)
            with pytest.raises(penstock.IntegrityError):
                whole(url)
        put(key, body)
        assert_bits(whole(url, verify="require"), model.tensors)
        other = Model(tmp_path / "other", seed=2)
        put(f"model/{NAME}", other.manifest.read_bytes())
        with pytest.raises(penstock.IntegrityError):
            whole(url)
        put(f"model/{NAME}", b"no manifest")
        with pytest.raises(penstock.IntegrityError, match="manifest is refused"):
            whole(url)

    def test_without_a_manifest_nothing_is_loaded(self, s3: servers.Remote, model: Model) -> None:
        put: Any = s3.put
        put("bare/model-0.safetensors", model.shard.read_bytes())
        for url in (f"{s3.root}/bare/", f"{s3.root}/bare/model-0.safetensors"):
            with pytest.raises(penstock.IntegrityError) as raised:
                whole(url, verify="require")
            assert raised.value.code == "no_manifest"
            assert_bits(whole(url), tensors_of(0))

    def test_a_block_that_a_network_damaged_is_fetched_once_more(self, model: Model, tmp_path: Path) -> None:
        with servers.web(tmp_path) as remote:
            upload(remote, model)
            body = Damaged(model.shard.read_bytes())
            body.at = 2 * MIB + 5
            put: Any = remote.put
            put("model/model-0.safetensors", body)
            ckpt = penstock.open(f"{remote.root}/model/model-0.safetensors", options=REQUIRE)
            body.times = 1
            assert_bits(ckpt.load(framework="np"), tensors_of(0))
            assert ckpt.stats is not None
            assert any("fetched once more" in note for note in ckpt.stats.notes)
            body.times = 2
            with pytest.raises(penstock.IntegrityError) as raised:
                ckpt.load(framework="np")
            assert raised.value.byte_range == (2 * MIB, 3 * MIB)
            assert raised.value.tensor is not None
            # The header too.
            body.at, body.times = 20, 1
            assert_bits(whole(f"{remote.root}/model/model-0.safetensors", verify="require"), tensors_of(0))

    def test_auto_costs_a_server_that_cannot_list_no_request(self, model: Model, tmp_path: Path) -> None:
        with servers.web(tmp_path) as remote:
            upload(remote, model)
            assert remote.requests is not None
            penstock.open(f"{remote.root}/model/model.safetensors.index.json").load(framework="np")
            assert not any(NAME in request for request in remote.requests)

    def test_what_is_damaged_in_a_disk_cache_is_not_handed_out(
        self, s3: servers.Remote, model: Model, tmp_path: Path
    ) -> None:
        url, cache = f"{s3.root}/model/", tmp_path / "cache"
        for at in (None, MIB + 1, 20):
            if at is not None:
                kept = [path for path in cache.rglob("data") if path.stat().st_size == model.shard.stat().st_size]
                assert kept
                for path in kept:
                    path.chmod(0o600)
                    flip(path, at)
            # The cache has checksums of its own, and what it lacks then is fetched; else the manifest sees it.
            ckpt = penstock.open(url, cache_dir=cache, options=REQUIRE)
            assert_bits(ckpt.load(framework="np"), model.tensors)
            assert penstock.flush_disk_cache()

    def test_what_a_network_damaged_on_its_way_to_a_disk_cache_is_fetched_once_more(
        self, model: Model, tmp_path: Path
    ) -> None:
        with servers.web(tmp_path) as remote:
            upload(remote, model)
            body = Damaged(model.shard.read_bytes())
            body.at, body.times = 2 * MIB + 5, 1
            put: Any = remote.put
            put("model/model-0.safetensors", body)
            for _ in range(3):
                ckpt = penstock.open(
                    f"{remote.root}/model/model-0.safetensors", cache_dir=tmp_path / "cache", options=REQUIRE
                )
                assert_bits(ckpt.load(framework="np"), tensors_of(0))
                assert penstock.flush_disk_cache()
