"""README.md and the manual run as they are written: every block of Python and shell, in order, in an empty directory.

A page about a store runs against a server of it. A block of Python whose first line is a comment with a file's name is
written to that file, for the commands below it. Blocks that need what is not here (a GPU, a cluster, an engine) say so
in a comment above them: Python is then compiled only, and a shell only parses its commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
import servers
from conftest import Raw, raw_bytes, write_raw
from hub import hub
from tiny_models import QUIET

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"(<!-- needs [^\n]*-->\n)?```(python|bash)\n(.*?)```", re.DOTALL)
# Commands that are indented are code blocks too, which nothing here would run.
INDENTED = re.compile(r"\n\n    (?:sudo |[A-Z_]+=\S+ )?(?:pip|penstock|vllm|sglang|make|python|cargo|kubectl|cp) ")
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md"))]
STORES = {
    "docs/s3.md": ("moto", "bucket"),
    "docs/gcs.md": ("gcs", "bucket"),
    "docs/azure.md": ("azure", "container"),
    "docs/pull.md": ("moto", "bucket"),
    "docs/saving.md": ("moto", "bucket"),
    "docs/remote.md": ("moto", "models"),
    "docs/engines/index.md": ("moto", "bucket"),
    "docs/engines/transformers.md": ("moto", "bucket"),
}
# What blocks may need that is not here: engines run in tests/engines, wheels in tools/try_wheel.py.
NEEDS = {
    *("vLLM and a model", "vLLM and a bucket", "vLLM, a model and a bucket", "SGLang and a model"),
    *(
        "the package index",
        "the release page",
        "Rust",
        "minutes",
        "minutes, and a model",
        "a LoRA",
        "the file of a model",
    ),
    "prometheus_client",
    *("a GPU", "a GPU and an image", "docker", "a cluster", "a project of Google Cloud", "a subscription of Azure"),
}
# Addresses of servers that are nobody's.
ELSEWHERE = "https://minio.example.com:9000"
FILE = re.compile(r"# ([\w/]+\.\w+)\n")
# Pages that take a model.safetensors for granted.
WITH_A_FILE = {"docs/engines/runai.md", "docs/observe.md", "docs/slow.md", "docs/trust.md"}


def _tier(page: str) -> list[pytest.MarkDecorator]:
    if page.startswith("docs/engines/") or page == "docs/switching.md":
        return [pytest.mark.libraries]
    return [pytest.mark.stores] if page in STORES or page == "docs/huggingface.md" else []


def blocks(page: str) -> list[tuple[str, str, str]]:
    return BLOCK.findall((ROOT / page).read_text())


def _sample(path: Path) -> Path:
    shape = (64, 32)
    return write_raw(path, {f"experts.{i}.weight": Raw("F32", shape, raw_bytes("F32", shape, i)) for i in range(4)})


def _llama() -> Iterator[tuple[str, bytes]]:
    """The files of a model of transformers, with a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    words = WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")  # noqa: S106
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(directory)
        for file in Path(directory).iterdir():
            yield file.name, file.read_bytes()


@contextlib.contextmanager
def _stores(page: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment that leads to what the page's locations name: a model at each name that the manual uses."""
    body = _sample(tmp_path / "sample").read_bytes()
    quiet = {"AWS_EC2_METADATA_DISABLED": "true", "GCE_METADATA_HOST": "127.0.0.1:1"}
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(hub())
        made.push("org/name", {"model.safetensors": body, "config.json": b"{}"})
        environment = quiet | {"HF_ENDPOINT": made.endpoint, "HF_HOME": str(tmp_path / "hf")}
        if page in STORES:
            server, bucket = STORES[page]
            (tmp_path / "server").mkdir()
            remote = stack.enter_context(servers.ALL[server](tmp_path / "server", bucket=bucket))
            of_model = {"model.safetensors": body, "config.json": b"{}"}
            if page.startswith("docs/engines/") or page == "docs/switching.md":
                of_model = dict(_llama())
            for prefix in ("llama-3-8b", "model"):
                for name, content in of_model.items():
                    remote.put(f"{prefix}/{name}", content)
            environment |= remote.environment
        yield environment


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=_tier(page)) for page in PAGES if any(not needs for needs, *_ in blocks(page))]
)
@pytest.mark.filterwarnings(*QUIET)
def test_the_page_runs_as_it_is_written(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.startswith("docs/engines/") or page == "docs/switching.md":
        for library in ("transformers", "diffusers", "peft", "accelerate"):
            pytest.importorskip(library)
    # The commands and the interpreter of this environment, by the names that people have them under.
    names, here = tmp_path / "bin", tmp_path / "here"
    names.mkdir()
    here.mkdir()
    commands = {"penstock": "-m penstock", "python": "", "torchrun": "-m torch.distributed.run"}
    commands["model_signing"] = "-m model_signing"
    for name, arguments in commands.items():
        (names / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (names / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{names}:{os.environ['PATH']}")
    monkeypatch.chdir(here)
    if page in WITH_A_FILE:
        _sample(here / "model.safetensors")
    namespace: dict[str, object] = {"__name__": page}
    with _stores(page, tmp_path) as environment:
        for name in os.environ:
            if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR", "HF_", "PENSTOCK_")):
                monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        for needs, language, text in blocks(page):
            if needs:
                continue
            text = text.replace(ELSEWHERE, environment.get("AWS_ENDPOINT_URL", ELSEWHERE))  # noqa: PLW2901
            if language == "python" and (file := FILE.match(text)):
                (here / file[1]).write_text(text)
                continue
            if language == "python":
                exec(compile(text, page, "exec"), namespace)  # noqa: S102
                continue
            command = ["bash", "-euo", "pipefail", "-c", text]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            assert done.stdout.strip(), text


@pytest.mark.parametrize("page", PAGES)
def test_what_the_page_does_not_run_is_well_formed(page: str) -> None:
    text = (ROOT / page).read_text()
    assert not INDENTED.search(text), "commands go into a fenced block"
    for needs, language, block in blocks(page):
        assert not needs or needs.removeprefix("<!-- needs ").removesuffix(" -->\n") in NEEDS
        if language == "python":
            compile(block, page, "exec")
        else:
            parsed = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
            assert parsed.returncode == 0, parsed.stderr
    for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL):
        json.loads(block)
    for block in re.findall(r"```dockerfile\n(.*?)```", text, re.DOTALL):
        assert block in (ROOT / "examples" / "kubernetes" / "Dockerfile").read_text()


@pytest.mark.parametrize(
    "page",
    [*PAGES, *(page.name for page in ROOT.glob("[A-Z]*.md") if page.name != "README.md"), "benchmarks/NOTEBOOK.md"],
)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {_anchor(title) for title in titles}, f"{target}#{anchor}"


def test_every_page_of_the_manual_is_in_its_table_of_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in DOCS.rglob("*.md") if f" {page.relative_to(DOCS)}\n" not in contents] == []


def _anchor(title: str) -> str:
    """What a heading is called in links: as GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower())
    return kept.replace(" ", "-")
