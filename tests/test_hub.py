"""Repositories of the Hugging Face hub: one commit, the cache where it holds the file, refusals that help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from conftest import Raw, assert_bits, raw_bytes, write_raw
from hub import Hub, hub

pytestmark = pytest.mark.stores

GOOD = {"token": "hf_good"}


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in os.environ:
        if name.startswith(("HF_", "HUGGING", "TRANSFORMERS_OFFLINE")):
            monkeypatch.delenv(name)
    with hub() as made:
        monkeypatch.setenv("HF_ENDPOINT", made.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield made


def sharded(tmp_path: Path, seed: int = 0) -> tuple[dict[str, bytes], dict[str, Raw]]:
    """The files of a model of three shards, and its tensors."""
    files, tensors, weight_map = {}, {}, {}
    for number in range(3):
        shape = (500, 301 + number)
        held = {f"w{number}.{i}": Raw("F32", shape, raw_bytes("F32", shape, seed + 10 * number + i)) for i in range(2)}
        name = f"model-{number}.safetensors"
        files[name] = write_raw(tmp_path / name, held, {"format": "pt"}).read_bytes()
        tensors |= held
        weight_map |= dict.fromkeys(held, name)
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    files["config.json"] = b"{}"
    files["text/encoder/model.safetensors"] = files["model-0.safetensors"]
    return files, tensors


def test_a_repository_is_opened_by_its_name_and_loaded_bit_by_bit(running: Hub, tmp_path: Path) -> None:
    files, tensors = sharded(tmp_path)
    commit = running.push("org/model", files)
    ckpt = penstock.open("hf://org/model")
    assert [where for where, _ in ckpt.files] == [f"hf://org/model@{commit}/model-{n}.safetensors" for n in range(3)]
    assert_bits(ckpt.load(framework="np"), tensors)
    assert ckpt.stats is not None
    assert (ckpt.stats.storage, ckpt.stats.network_bytes) == (ckpt.storage, ckpt.nbytes)
    assert "hf" in ckpt.storage
    folder = penstock.open("hf://org/model@main/text/encoder")
    assert len(folder) == 2
    assert len(penstock.open("hf://org/model/model-1.safetensors")) == 2


def test_a_push_in_between_changes_nothing(running: Hub, tmp_path: Path) -> None:
    files, tensors = sharded(tmp_path)
    running.push("org/model", files)
    ckpt = penstock.open("hf://org/model/model.safetensors.index.json")
    running.push("org/model", {**sharded(tmp_path, 100)[0], "model-2.safetensors": b"x"})
    assert_bits(ckpt.load(framework="np"), tensors)
    assert_bits(dict(ckpt.stream(framework="np")), tensors)


def test_what_the_hubs_own_client_cached_is_read_from_there(
    running: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, tensors = sharded(tmp_path)
    running.push("org/model", files)
    # In a process of its own, since it reads its variables when it is imported.
    script = "import huggingface_hub, sys; print(huggingface_hub.snapshot_download(sys.argv[1]))"
    environment = {**os.environ, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", script, "org/model"]
    downloaded = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout.strip()
    # The imitation is good enough for the real client.
    assert {str(path.relative_to(downloaded)) for path in Path(downloaded).rglob("*") if path.is_file()} == set(files)
    running.requests.clear()
    ckpt = penstock.open("hf://org/model")
    assert_bits(ckpt.load(framework="np"), tensors)
    assert ckpt.stats is not None
    assert ckpt.stats.network_bytes == 0
    assert "hf" not in ckpt.storage  # the disk's
    assert not [request for request in running.requests if "/resolve/" in request[2]]
    assert_bits(ckpt.load(framework="np", mmap=True), tensors)
    # Without the network at all.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    running.requests.clear()
    assert_bits(penstock.open("hf://org/model").load(framework="np"), tensors)
    assert running.requests == []
    with pytest.raises(penstock.LocationNotFoundError, match="HF_HUB_OFFLINE"):
        penstock.open("hf://org/other")


def test_the_disk_cache_knows_a_file_again_in_the_next_commit(running: Hub, tmp_path: Path) -> None:
    files, tensors = sharded(tmp_path)
    running.push("org/model", files)
    cache = tmp_path / "disk-cache"
    assert_bits(penstock.open("hf://org/model", cache_dir=cache).load(framework="np"), tensors)
    assert penstock.flush_disk_cache()
    other, changed = sharded(tmp_path, 100)
    running.push("org/model", {**files, "model-2.safetensors": other["model-2.safetensors"]})
    ckpt = penstock.open("hf://org/model", cache_dir=cache)
    expected = {name: changed[name] if name.startswith("w2") else tensor for name, tensor in tensors.items()}
    assert_bits(ckpt.load(framework="np"), expected)
    assert ckpt.stats is not None
    assert 0 < ckpt.stats.network_bytes <= len(other["model-2.safetensors"])


def test_refusals_are_exceptions_that_say_what_to_do(
    running: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, _ = sharded(tmp_path)
    running.push("org/gated", files, gated=True, **GOOD)
    running.push("org/private", files, **GOOD)
    with pytest.raises(penstock.LocationAccessError) as raised:
        penstock.open("hf://org/gated")
    assert f"accept its conditions at {running.endpoint}/org/gated" in (raised.value.remedy or "")
    with pytest.raises(penstock.LocationNotFoundError, match="RepoNotFound") as missing:
        penstock.open("hf://org/private")
    assert "hf auth login" in (missing.value.remedy or "")
    monkeypatch.setenv("HF_TOKEN", "hf_SENTINEL")
    with pytest.raises(penstock.LocationAccessError) as raised:
        penstock.open("hf://org/gated")
    assert "SENTINEL" not in f"{raised.value!r} {raised.value} {vars(raised.value)}"
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_good\n")
    running.requests.clear()
    for name in ("gated", "private"):
        assert len(penstock.open(f"hf://org/{name}")) == 6
    # The token stays at home.
    assert {authorization for who, *_, authorization in running.requests if who == "network"} == {""}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("modle.safetensors", "model.safetensors"),
        ("unte", "unet"),
    ],
)
def test_a_name_that_is_nearly_one_of_the_repository_is_suggested(
    running: Hub, tmp_path: Path, written: str, meant: str
) -> None:
    write_raw(tmp_path / "model.safetensors", {"w": Raw("F32", (4,), raw_bytes("F32", (4,), 0))})
    body = (tmp_path / "model.safetensors").read_bytes()
    running.push("org/m", {"model.safetensors": body, "unet/model.safetensors": body})
    with pytest.raises(penstock.LocationNotFoundError) as raised:
        penstock.open(f"hf://org/m/{written}")
    assert f"Did you mean hf://org/m/{meant}" in (raised.value.remedy or "")


def test_directories_below_one_without_weights_are_named(running: Hub) -> None:
    running.push("org/pipeline", {"model_index.json": b"{}", "unet/model.safetensors": b"x", "vae/config.json": b"{}"})
    with pytest.raises(penstock.LocationNotFoundError, match=r"holds model_index.json and the directories unet, vae"):
        penstock.open("hf://org/pipeline")


def test_a_repository_is_pulled_and_the_command_shows_it(running: Hub, tmp_path: Path) -> None:
    files, _ = sharded(tmp_path)
    commit = running.push("org/model", files)
    to = tmp_path / "pulled"
    pulled = penstock.pull("hf://org/model", to, ignore_patterns=["text/"])
    expected = {name: body for name, body in files.items() if not name.startswith("text/")}
    assert {file.path for file in pulled.files} == set(expected)
    assert {name: (to / name).read_bytes() for name in expected} == expected
    assert pulled.fetched_bytes == pulled.nbytes == sum(map(len, expected.values()))
    command = [sys.executable, "-m", "penstock.cli", "inspect", "--json", "hf://org/model"]
    shown = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert shown["files"][0]["location"] == f"hf://org/model@{commit}/model-0.safetensors"


def test_an_endpoint_with_a_password_is_refused_and_never_shown(running: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", running.endpoint.replace("://", "://me:SENTINEL@"))
    with pytest.raises(penstock.ConfigError, match="is not the URL of a hub") as raised:
        penstock.open("hf://org/model")
    assert "SENTINEL" not in f"{raised.value} {raised.value!r} {vars(raised.value)}"
    assert running.requests == []


def test_a_path_that_looks_like_a_pattern_is_read_to_the_letter(running: Hub, tmp_path: Path) -> None:
    files, _ = sharded(tmp_path)
    body = files["model-0.safetensors"]
    running.push("org/model", {"a[1]/m[fp16].safetensors": body, "a[1]/mf.safetensors": files["model-1.safetensors"]})
    assert set(penstock.open("hf://org/model/a[1]/m[fp16].safetensors")) == {"w0.0", "w0.1"}
    assert set(penstock.open("hf://org/model/a[1]/m[f].safetensors")) == {"w1.0", "w1.1"}
    assert len(penstock.open("hf://org/model/a[1]")) == 4


@pytest.mark.parametrize(
    "page",
    [
        "https://huggingface.co/org/model",
        "https://huggingface.co/org/model/tree/main",
        "https://huggingface.co/org/model/blob/main/a.safetensors",
    ],
)
def test_the_address_of_a_page_is_told_from_that_of_a_file(running: Hub, page: str) -> None:
    with pytest.raises(penstock.LocationNotFoundError, match="a page of the Hugging Face hub") as raised:
        penstock.open(page)
    assert "Write hf://org/name" in (raised.value.remedy or "")
    assert running.requests == []


def test_a_file_by_its_url_is_read_and_its_refusal_says_how_to_send_the_token(running: Hub, tmp_path: Path) -> None:
    files, _ = sharded(tmp_path)
    running.push("org/model", files)
    running.push("org/gated", files, gated=True, **GOOD)
    assert len(penstock.open(f"{running.endpoint}/org/model/resolve/main/model-0.safetensors?download=true")) == 2
    with pytest.raises(penstock.LocationAccessError, match="GatedRepo") as raised:
        penstock.open(f"{running.endpoint}/org/gated/resolve/main/model-0.safetensors")
    assert "hf://org/name" in (raised.value.remedy or "")
