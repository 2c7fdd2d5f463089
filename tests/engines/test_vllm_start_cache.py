"""``penstock run --start-cache`` with a real vLLM: another home, another directory of the model, nothing compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from conftest import SETTINGS, save

GENERATE = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=128, seed=0, skip_tokenizer_init=True)
    prompt, sampling = {"prompt_token_ids": [3, 4, 5, 6]}, SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    from torch._dynamo.utils import counters

    tokens = llm.generate([prompt], sampling)[0].outputs[0].token_ids
    cached = counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]
    print("RESULT", list(tokens), *cached)
"""
KEY = """
import sys
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

load_general_plugins()
print("RESULT", EngineArgs(model=sys.argv[1], skip_tokenizer_init=True).create_model_config().compute_hash())
"""


def result(command: list[str], **environment: str) -> str:
    # torch names its cache there when it has been asked for it in this process.
    elsewhere = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT"}
    kept = {name: value for name, value in os.environ.items() if name not in elsewhere}
    done = subprocess.run(
        command, capture_output=True, text=True, env=kept | SETTINGS | environment, check=False, timeout=550
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")] or [done.stderr[-4000:]]
    return line


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model, the same elsewhere, and one of another configuration."""
    folder = tmp_path_factory.mktemp("models")
    model = save("Llama", folder / "model", "float32")
    shutil.copytree(model, folder / "elsewhere")
    return model, folder / "elsewhere", save("Llama", folder / "other", "float32", num_hidden_layers=1)


def test_the_key_of_compiled_graphs_is_of_the_configuration_where_a_start_cache_is_used(
    models: tuple[Path, Path, Path],
) -> None:
    def key(model: Path, **environment: str) -> str:
        return result([sys.executable, "-c", KEY, str(model)], **environment)

    in_use = {"_PENSTOCK_START_CACHE": "1"}
    model, elsewhere, other = models
    ours = key(model, **in_use)
    assert ours.startswith("RESULT ")
    assert key(elsewhere, **in_use) == ours
    assert key(other, **in_use) != ours
    assert key(model) not in {ours, key(elsewhere)}


@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_start_elsewhere_compiles_nothing(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    location = tmp_path / "starts"
    location.mkdir(mode=0o700)
    program = tmp_path / "generate.py"
    program.write_text(GENERATE)

    def started(home: str, model: Path) -> list[str]:
        (tmp_path / home).mkdir()
        here = {"HOME": str(tmp_path / home), "TMPDIR": str(tmp_path / home)}
        # This vLLM cannot load on a CPU what it has compiled ahead of time: no 'finalize_loading'.
        here |= {"VLLM_USE_AOT_COMPILE": "0"}
        run = [sys.executable, "-m", "penstock.cli", "run", "--start-cache", str(location), "--"]
        return result([*run, sys.executable, str(program), str(model)], **here).rsplit(" ", 2)

    tokens, *cached = started("one", models[0])
    assert cached == ["0", "1"]
    shutil.rmtree(tmp_path / "one")
    assert started("two", models[1]) == [tokens, "1", "0"]
