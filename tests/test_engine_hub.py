"""Models by their names on the Hub: what is fetched is what the library would load, and for tokenizers no weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from hub import Hub, hub

pytestmark = pytest.mark.libraries

pytest.importorskip("huggingface_hub")
torch = pytest.importorskip("torch")

Fetched = Callable[..., set[str]]


@pytest.fixture
def server() -> Iterator[Hub]:
    with hub() as made:
        yield made


@pytest.fixture
def fetched(server: Hub, tmp_path: Path) -> Fetched:
    """Runs code in a process with an empty cache; gives the names of all files that are in there then."""

    def run(code: str, fails: str | None = None, **environment: str) -> set[str]:
        script = f"from penstock.integrations.shared.files import local_files, locate, open_weights\n{code}"
        own = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **own, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert (done.returncode == 0) == (fails is None), done.stderr
        assert fails is None or fails in done.stderr, done.stderr
        snapshots = list((tmp_path / "home").glob("hub/models--org--*/snapshots/*"))
        return {str(file.relative_to(root)) for root in snapshots for file in root.rglob("*") if file.is_file()}

    return run


def weights(tmp_path: Path, *names: str) -> bytes:
    path = tmp_path / "written.safetensors"
    penstock.save_file({name: torch.arange(6.0) for name in names}, path)
    return path.read_bytes()


def model(tmp_path: Path, *, sharded: bool) -> dict[str, bytes]:
    """A repository with everything that authors put beside a model."""
    one, two = weights(tmp_path, "a"), weights(tmp_path, "b")
    files = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "consolidated.safetensors": one,
        "model.fp16.safetensors": one,
        "pytorch_model.bin": b"pickle",
        "original/model.safetensors": one,
        "original/params.json": b"{}",
        "onnx/model.onnx": b"x",
    }
    if not sharded:
        return files | {"model.safetensors": one}
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = json.dumps({"metadata": {}, "weight_map": shards}).encode()
    stray = {"model-00003-of-00003.safetensors": one}
    return files | stray | {shards["a"]: one, shards["b"]: two, "model.safetensors.index.json": index}


OPENED = "place = locate('org/model')\nprint(sorted(open_weights(place, 'model')))"


def test_for_a_tokenizer_no_weights_are_fetched(server: Hub, fetched: Fetched, tmp_path: Path) -> None:
    server.push("org/model", model(tmp_path, sharded=True))
    found = fetched("import os; assert os.path.isfile(local_files('org/model') + '/tokenizer.json')")
    assert found == {"config.json", "tokenizer.json", "model.safetensors.index.json"}


@pytest.mark.parametrize("sharded", [True, False])
def test_of_weights_only_those_that_the_library_names_are_fetched(
    server: Hub, fetched: Fetched, tmp_path: Path, sharded: bool
) -> None:
    server.push("org/model", model(tmp_path, sharded=sharded))
    found = {name for name in fetched(OPENED) if name.endswith(".safetensors")}
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert found == (shards if sharded else {"model.safetensors"})


def test_a_variant_is_fetched_where_it_is_asked_for(server: Hub, fetched: Fetched, tmp_path: Path) -> None:
    server.push("org/model", model(tmp_path, sharded=True))
    found = fetched("open_weights(locate('org/model'), 'model', 'fp16')")
    assert {name for name in found if name.endswith(".safetensors")} == {"model.fp16.safetensors"}


def test_a_folder_s_weights_are_fetched_alone(server: Hub, fetched: Fetched, tmp_path: Path) -> None:
    parts = {f"{part}/{name}": body for part in ("unet", "vae") for name, body in model(tmp_path, sharded=True).items()}
    server.push("org/model", parts)
    found = fetched("open_weights(locate('org/model', subfolder='unet'), 'model')")
    shards = {"unet/model-00001-of-00002.safetensors", "unet/model-00002-of-00002.safetensors"}
    assert {name for name in found if name.endswith(".safetensors")} == shards


def test_for_a_library_s_own_loader_its_folder_s_files_are_fetched(
    server: Hub, fetched: Fetched, tmp_path: Path
) -> None:
    server.push("org/model", model(tmp_path, sharded=False))
    found = fetched("locate('org/model').fetch_weights()")
    assert {name for name in found if name.endswith(".safetensors")} == {"model.safetensors"}
    found = fetched("locate('org/model').fetch_weights('fp16')")
    assert "model.fp16.safetensors" in found
    assert found.isdisjoint({"consolidated.safetensors", "original/model.safetensors"})


def test_weights_are_of_the_commit_that_the_small_files_are_of(server: Hub, fetched: Fetched, tmp_path: Path) -> None:
    server.push("org/model", model(tmp_path, sharded=True))
    then = json.dumps({name: list(body) for name, body in model(tmp_path, sharded=False).items()})
    # The branch moves on in between.
    code = f"place = locate('org/model')\nopen({str(tmp_path / 'ready')!r}, 'w').close()\n"
    code += f"import os, time\nwhile os.path.exists({str(tmp_path / 'ready')!r}): time.sleep(0.01)\n"
    code += "assert sorted(open_weights(place, 'model')) == ['a', 'b']"
    import threading

    def moves_on() -> None:
        while not (tmp_path / "ready").exists():
            threading.Event().wait(0.01)
        server.push("org/model", {name: bytes(body) for name, body in json.loads(then).items()})
        (tmp_path / "ready").unlink()

    other: Any = threading.Thread(target=moves_on, daemon=True)
    other.start()
    assert "model.safetensors" not in fetched(code)
    other.join(60)


def test_what_is_in_the_cache_needs_no_hub(server: Hub, fetched: Fetched, tmp_path: Path) -> None:
    server.push("org/model", model(tmp_path, sharded=True))
    fetched(OPENED)
    asked = len(server.requests)
    fetched(OPENED, HF_HUB_OFFLINE="1")
    assert len(server.requests) == asked


def test_a_model_that_is_not_there_is_not_found(server: Hub, fetched: Fetched) -> None:
    assert server.repositories == {}
    fetched("locate('org/absent')", fails="LocationNotFoundError: org/absent")
