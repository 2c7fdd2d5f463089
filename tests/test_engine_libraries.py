"""A library that is absent, too old or too new is one clear sentence."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from conftest import Raw, raw_bytes, write_raw
from penstock import optional as libraries

pytestmark = pytest.mark.libraries

ENGINES = {
    "transformers": ("transformers", "from_pretrained('auto', 'm')"),
    "diffusers": ("diffusers", "from_pretrained(None, 'm')"),
    "peft": ("peft", "from_pretrained(None, 'm')"),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_without_its_library_says_what_to_install(engine: str) -> None:
    library, call = ENGINES[engine]
    code = (
        f"import sys; sys.modules[{library!r}] = None\n"
        f"from penstock.integrations import {engine}\nimport penstock\n"
        f"try:\n    {engine}.{call}\n"
        "except penstock.MissingDependencyError as error:\n    print(error, '|', error.remedy)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    remedy = rf"pip install '{library}>=[\d.]+'"
    sentence = (
        rf"penstock\.integrations\.{engine} needs the package '{library}', "
        rf"which is not installed\. Install it: {remedy}"
    )
    assert re.fullmatch(rf"{sentence} \| {remedy}\n", done.stdout)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("call", "by"),
    [
        ("penstock.load_model(dict, sys.argv[1])", r"penstock\.load_model"),
        ("penstock.model.no_init().__enter__()", r"penstock\.model\.no_init"),
        ("penstock.open(sys.argv[1]).load_into(type('M', (), {'state_dict': dict})())", "load_into with a module"),
    ],
)
def test_models_without_torch_say_what_to_install(tmp_path: Path, call: str, by: str) -> None:
    path = write_raw(tmp_path / "m.safetensors", {"a": Raw("F32", (2,), raw_bytes("F32", (2,)))})
    code = (
        "import sys; sys.modules['torch'] = None\nimport penstock, penstock.model\n"
        f"try:\n    {call}\nexcept penstock.MissingDependencyError as error:\n    print(error, '|', error.remedy)"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    remedy = r"pip install 'torch>=[\d.]+'"
    sentence = rf"{by} needs the package 'torch', which is not installed\. Install it: {remedy}"
    assert re.fullmatch(rf"{sentence} \| {remedy}\n", done.stdout)


class _Model:
    pass


@pytest.mark.parametrize(
    ("engine", "call"),
    [
        ("transformers", "from_pretrained"),
        ("diffusers", "from_pretrained"),
        ("peft", "from_pretrained"),
        ("peft", "load_adapter"),
    ],
)
def test_arguments_that_were_swapped_are_told_apart(engine: str, call: str) -> None:
    pytest.importorskip(engine)
    function = getattr(importlib.import_module(f"penstock.integrations.{engine}"), call)
    more = ["name"] if call == "load_adapter" else []
    secret = "https://me:SENTINEL@host/m"  # noqa: S105 - it is looked for
    for first, second, told in (
        (secret, _Model, r"given were str and the class _Model\. Swap the two"),
        (secret, _Model(), r"given were str and _Model\. Swap the two"),
        (_Model, _Model(), r"given were the class _Model and _Model\. Give the .* first, its path or URL second"),
        (secret, secret, r"given were str and str\. Give the"),
    ):
        with pytest.raises(penstock.ConfigError, match=f"{call} takes the .*, then its path or URL; {told}") as raised:
            function(first, second, *more)
        assert "SENTINEL" not in str(raised.value)


def test_auto_comes_before_the_path() -> None:
    pytest.importorskip("transformers")
    from penstock.integrations.transformers import from_pretrained

    with pytest.raises(penstock.ConfigError, match=r"given were str and str\. Swap the two"):
        from_pretrained("some/model", "auto")


def test_importing_an_engine_imports_no_library() -> None:
    names = [*ENGINES, "torch", "accelerate", "safetensors", "huggingface_hub"]
    code = "import sys\n" + "".join(f"import penstock.integrations.{engine}\n" for engine in ENGINES)
    code += f"print([name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_one_that_is_too_old_is_named_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.setattr(libraries.importlib.metadata, "version", lambda _: "0.3.9")
    with pytest.raises(penstock.MissingDependencyError, match=r"needs safetensors>=0\.4; version 0\.3\.9 is installed"):
        libraries.required("safetensors", by="penstock.integrations.x")


def test_the_manual_has_the_versions() -> None:
    table = (Path(__file__).parent.parent / "docs" / "engines" / "index.md").read_text()
    for name, minimum in libraries.MINIMUM.items():
        assert re.search(rf"^\| {name} \| {re.escape(libraries.dotted(minimum))} \|", table, re.MULTILINE), name
