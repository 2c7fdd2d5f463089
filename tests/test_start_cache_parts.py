"""The parts of a start cache: what an index may name, where files may go, which are saved, what a key depends on."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import servers
from penstock.doctor.tree import Tree
from penstock.errors import ConfigError, FormatError
from penstock.start.cache import key as keys
from penstock.start.cache.index import Index, Kept, dumped, loaded
from penstock.start.cache.location import Directory, Remote, opened
from penstock.start.cache.places import Place, looked_at, places
from penstock.start.cache.restore import restore
from penstock.start.cache.save import save
from penstock.start.environment import Environment

LIMIT = 1 << 30


def kept(path: str, data: bytes = b"x", place: str = "triton", **more: Any) -> Kept:
    return Kept(place, path, hashlib.sha256(data).hexdigest(), len(data), 5, **more)


def signed(value: object) -> bytes:
    text = json.dumps(value).encode()
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


@pytest.fixture
def location(tmp_path: Path) -> Directory:
    (tmp_path / "starts").mkdir(mode=0o700)
    return Directory(tmp_path / "starts")


def test_an_index_is_read_as_it_was_written() -> None:
    index = Index({"engine": "vllm"}, (kept("a/b.so", executable=True), kept("c.json", placed=True)))
    assert loaded(dumped(index), "here") == index


BAD_NAMES = ["../x", "a/../../x", "/etc/x", "a//b", "a/./b", "", ".", "..", "a/", "a\0b", "x" * 300, "a/" * 2000 + "b"]


@pytest.mark.parametrize("path", BAD_NAMES)
def test_an_index_that_names_what_is_not_below_a_place_is_refused(path: str) -> None:
    value = {"penstock start cache": 1, "of": {}, "files": [asdict(kept("a")) | {"path": path}]}
    with pytest.raises(FormatError, match="leads out of its place"):
        loaded(signed(value), "here")


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "../../etc/passwd"},
        {"digest": "A" * 64},
        {"place": "a/b"},
        {"nbytes": -1},
        {"nbytes": "1"},
        {"nbytes": 1 << 60},
        {"modified": 1 << 70},
        {"executable": 1},
        {"more": 1},
        {"path": 3},
    ],
)
def test_an_index_with_what_cannot_be_is_refused(change: dict[str, object]) -> None:
    value = {"penstock start cache": 1, "of": {}, "files": [asdict(kept("a")) | change]}
    with pytest.raises(FormatError, match="index is refused"):
        loaded(signed(value), "here")


@pytest.mark.parametrize("value", [[], {}, {"penstock start cache": 2, "files": []}, {"penstock start cache": 1}, 7])
def test_what_is_no_index_is_refused(value: object) -> None:
    with pytest.raises(FormatError):
        loaded(signed(value), "here")


def test_an_index_names_a_file_once() -> None:
    value = {"penstock start cache": 1, "of": {}, "files": [asdict(kept("a")), asdict(kept("a", b"y"))]}
    with pytest.raises(FormatError, match="twice"):
        loaded(signed(value), "here")


def test_an_index_that_gets_too_large_loses_its_oldest_files() -> None:
    old, new = replace(kept("old", bytes(600)), modified=1), replace(kept("new", b"1" * 600), modified=2)
    assert Index({}, (old,)).with_files([new], limit=1000).files == (new,)


# Places


def test_places_are_where_their_owners_look() -> None:
    of = {place.name: place.root for place in places({"HOME": "/h", "USER": "u"})}
    assert (of["vllm"], of["triton"]) == ("/h/.cache/vllm", "/h/.triton/cache")
    assert (of["flashinfer"], of["deep_gemm"]) == ("/h/.cache/flashinfer", "/h/.deep_gemm")
    assert of["inductor"].endswith("/torchinductor_u")
    moved = {"HOME": "/h", "VLLM_CACHE_ROOT": "/v", "FLASHINFER_WORKSPACE_BASE": "/f", "TRITON_CACHE_DIR": "/t"}
    of = {place.name: place.root for place in places(moved)}
    assert (of["vllm"], of["flashinfer"], of["triton"]) == ("/v", "/f/.cache/flashinfer", "/t")


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("torch_compile_cache/ab/rank_0_0/model", True),
        ("assets/model_streamer/weights", False),
        ("torch_compile_cache/ab/inductor_cache/locks/a.lock", False),
        ("torch_compile_cache/ab/model.123.tmp", False),
        ("torch_compile_cache/.hidden", False),
        ("deep_gemm/.ninja_log", True),
    ],
)
def test_only_finished_files_of_compilers_count(path: str, counts: bool) -> None:
    [vllm] = [place for place in places({"HOME": "/h"}) if place.name == "vllm"]
    assert vllm.has(path) is counts


# Restoring and saving


def saved(location: Directory, place: Place, limit: int = LIMIT) -> Any:
    return save(looked_at([place]).items(), location, "k", {}, [place], limit)


def restored(location: Directory, place: Place) -> Any:
    data = location.index("k")
    assert data is not None
    return restore(loaded(data, "here"), location, [place])


def test_names_times_and_modes_come_back(tmp_path: Path, location: Directory) -> None:
    one, two = Place("triton", str(tmp_path / "one")), Place("triton", str(tmp_path / "two"))
    path = Path(one.root, "a", "b")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"compiled")
    path.chmod(0o755)
    os.utime(path, ns=(5, 7_000_000_123))
    assert saved(location, one).names == {("triton", "a/b")}
    assert restored(location, two).names == {("triton", "a/b")}
    back = Path(two.root, "a", "b")
    assert (back.read_bytes(), back.stat().st_mtime_ns) == (b"compiled", 7_000_000_123)
    assert back.stat().st_mode & 0o100
    assert restored(location, two).there == 1


def test_text_that_names_its_directory_names_the_new_one(tmp_path: Path, location: Directory) -> None:
    one, two = Place("triton", str(tmp_path / "one")), Place("triton", str(tmp_path / "two"))
    Path(one.root).mkdir()
    Path(one.root, "group.json").write_text(json.dumps({"path": f"{one.root}/kernel.so"}))
    saved(location, one)
    restored(location, two)
    assert json.loads(Path(two.root, "group.json").read_text()) == {"path": f"{two.root}/kernel.so"}


def test_a_symbolic_link_in_a_place_is_not_followed(tmp_path: Path, location: Directory) -> None:
    one, two = Place("triton", str(tmp_path / "one")), Place("triton", str(tmp_path / "two"))
    Path(one.root, "a").mkdir(parents=True)
    Path(one.root, "a", "b").write_bytes(b"compiled")
    saved(location, one)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    Path(two.root).mkdir()
    Path(two.root, "a").symlink_to(elsewhere)
    done = restored(location, two)
    assert (done.names, sum(done.left_out.values())) == (set(), 1)
    assert not list(elsewhere.iterdir())


def test_a_place_that_others_may_write_to_gets_nothing(tmp_path: Path, location: Directory) -> None:
    one, two = Place("triton", str(tmp_path / "one")), Place("triton", str(tmp_path / "two"))
    Path(one.root).mkdir()
    Path(one.root, "a").write_bytes(b"compiled")
    saved(location, one)
    Path(two.root).mkdir()
    Path(two.root).chmod(0o777)
    assert restored(location, two).left_out == {f"{two.root}: others may write to it": 1}


def test_files_of_no_known_place_are_left_out(tmp_path: Path, location: Directory) -> None:
    index = Index({}, (kept("a", place="ssh"), kept("assets/a", place="vllm")))
    done = restore(index, location, [Place("vllm", str(tmp_path / "v"), ("torch_compile_cache",))])
    assert done.left_out == {"not of a place of compiled files": 2}


def test_symbolic_links_and_what_is_unfinished_are_not_saved(tmp_path: Path, location: Directory) -> None:
    place = Place("triton", str(tmp_path / "one"))
    root = Path(place.root)
    root.mkdir()
    (root / "good.bin").write_bytes(b"compiled")
    (root / "link").symlink_to("/etc/passwd")
    python = Path(sys.executable).resolve().read_bytes()
    (root / "cut.so").write_bytes(python[: len(python) // 2])
    (root / "begun.so").write_bytes(bytes(1 << 12))
    with (root / "open.bin").open("wb") as writing:
        writing.write(b"half")
        writing.flush()
        assert saved(location, place).names == {("triton", "good.bin")}
    assert saved(location, place).names == {("triton", "good.bin"), ("triton", "open.bin")}


def test_a_file_that_has_changed_since_it_was_seen_is_not_saved(tmp_path: Path, location: Directory) -> None:
    place = Place("triton", str(tmp_path / "one"))
    Path(place.root).mkdir()
    Path(place.root, "a").write_bytes(b"one")
    seen = looked_at([place])
    Path(place.root, "a").write_bytes(b"another")
    assert save(seen.items(), location, "k", {}, [place], LIMIT).names == set()


def test_saving_waits_for_another_process_that_saves(tmp_path: Path, location: Directory) -> None:
    code = (
        "import sys, time; from pathlib import Path; from penstock.start.cache.location import Directory\n"
        "with Directory(Path(sys.argv[1])).held(): print('held', flush=True); time.sleep(1)"
    )
    command = [sys.executable, "-c", code, location.shown]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with location.held():
            assert process.wait(10) == 0


# Locations


def test_the_directory_of_everyones_temporary_files_may_hold_a_location(tmp_path: Path) -> None:
    sticky = tmp_path / "tmp"
    (sticky / "mine").mkdir(parents=True, mode=0o700)
    sticky.chmod(0o1777)
    assert opened(f"file://{sticky}/mine").index("k") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        opened(str(tmp_path / "theirs"))


def test_links_in_the_place_of_blobs_are_refused(tmp_path: Path, location: Directory) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with location.held():
        pass
    (tmp_path / "starts/start-1/blobs").rmdir()
    (tmp_path / "starts/start-1/blobs").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is no directory"):
        Directory(tmp_path / "starts")


@pytest.mark.stores
def test_a_copy_in_a_bucket_is_restored_from_there(
    tmp_path: Path, location: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = Place("triton", str(tmp_path / "one")), Place("triton", str(tmp_path / "two"))
    Path(one.root).mkdir()
    Path(one.root, "a").write_bytes(b"compiled")
    saved(location, one)
    with servers.s3(tmp_path) as remote:
        for name, value in remote.environment.items():
            monkeypatch.setenv(name, value)
        base = Path(location.shown)
        for path in base.rglob("*"):
            if path.is_file() and path.name != "lock":
                remote.put(f"starts/{path.relative_to(base)}", path.read_bytes())
        bucket = opened(f"{remote.root}/starts/")
        assert isinstance(bucket, Remote)
        assert bucket.index("another") is None
        data = bucket.index("k")
        assert data is not None
        assert restore(loaded(data, bucket.shown), bucket, [two]).names == {("triton", "a")}
    assert Path(two.root, "a").read_bytes() == b"compiled"


# Keys


def model(folder: Path, text: str = "{}") -> str:
    folder.mkdir()
    (folder / "config.json").write_text(text)
    return str(folder)


def test_a_key_is_of_the_models_configuration_and_not_of_its_place(tmp_path: Path) -> None:
    one, two, other = model(tmp_path / "1"), model(tmp_path / "2"), model(tmp_path / "3", '{"a": 1}')
    of = [keys.arguments(["/bin/vllm", "serve", path, "--max-model-len", "8"]) for path in (one, two, other)]
    assert of[0] == of[1] != of[2]
    assert keys.arguments(["vllm", "serve", f"--model={one}"]) == keys.arguments(["vllm", "serve", f"--model={two}"])


def test_a_repository_has_the_key_of_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hub" / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots").mkdir()
    local = model(folder / "snapshots" / "abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert keys.arguments(["vllm", "serve", "org/name"]) == keys.arguments(["vllm", "serve", local])


def test_names_ports_and_secrets_are_not_in_a_key(tmp_path: Path) -> None:
    path = model(tmp_path / "1")
    plain = keys.arguments(["vllm", "serve", path, "--dtype", "float16"])
    options = ["--port", "80", "--api-key=secret", "--served-model-name", "a", "b", "--load-format", "penstock"]
    assert keys.arguments(["vllm", "serve", path, *options, "--dtype", "float16"]) == plain


@pytest.mark.stores
def test_a_bucket_has_the_key_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model(tmp_path / "1")
    with servers.s3(tmp_path) as remote:
        for name, value in remote.environment.items():
            monkeypatch.setenv(name, value)
        remote.put("m/config.json", b"{}")
        of_bucket = keys.arguments(["vllm", "serve", f"{remote.root}/m"])
    assert of_bucket == keys.arguments(["vllm", "serve", path])


def test_versions_processor_and_gpu_make_other_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("flags\t\t: sse avx2\n")
    of = Environment("vllm", "0.32.0", None, libraries=(("torch", "2.13.0"),))
    found = [keys.described(["vllm"], of, Tree(tmp_path))]
    found.append(keys.described(["vllm"], replace(of, version="0.33.0"), Tree(tmp_path)))
    found.append(keys.described(["vllm"], replace(of, libraries=(("torch", "2.14.0"),)), Tree(tmp_path)))
    found.append(keys.described(["vllm", "--dtype", "float16"], of, Tree(tmp_path)))
    (tmp_path / "proc/cpuinfo").write_text("flags\t\t: sse avx2 avx512f\n")
    found.append(keys.described(["vllm"], of, Tree(tmp_path)))
    for capability, driver in (("9.0", "580.1"), ("9.0", "590.2"), ("10.0", "580.1")):
        seen = {"gpus": [f"NVIDIA {capability}"], "driver": driver}
        monkeypatch.setattr(keys, "gpus", lambda _, seen=seen: seen)
        found.append(keys.described(["vllm"], of, Tree(tmp_path)))
    assert len(set(map(keys.key_of, found))) == len(found) == 8


def test_amds_gpus_are_in_a_key(tmp_path: Path) -> None:
    for node, target in (("0", 0), ("1", 90402)):
        folder = tmp_path / "sys/class/kfd/kfd/topology/nodes" / node
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"cpu_cores_count 4\ngfx_target_version {target}\n")
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    (tmp_path / "sys/module/amdgpu/version").write_text("6.8.5\n")
    assert keys.gpus(Tree(tmp_path)) == {"gpus": ["90402"], "driver": "6.8.5"}
