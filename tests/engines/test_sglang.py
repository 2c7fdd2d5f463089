"""``--load-format penstock`` in a real SGLang: its parameters, and what it generates, are the stock loader's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

import conftest

sys.path.insert(0, str(Path(__file__).parents[1]))
import hub
import servers

HERE = Path(__file__).parent
MODELS = ["dense", "converted", "tied", "experts"]
QUANTISED = ["awq", "gptq", "fp8"]
UNUSUAL = ["in threads", "in silent threads", "writing"]
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "key": (
        {"readrs": 4},
        "does not know 'readrs'. It knows block_bytes, cache, readers, record, share",
    ),
    "type": ({"readers": "4"}, "'readers' must be of type int, not '4'"),
}
OWN = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Torch for the CPU may lie beside a library of that name that does not work.
    "SGLANG_NCCL_SO_PATH": "/nonexistent",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_REGION": "us-east-1",
}


class Script:
    """A script that runs in a process of its own, and prints results."""

    def __init__(self, name: str, *arguments: Any, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, str(HERE / name), *map(json.dumps, arguments)]
        self._process = subprocess.Popen(
            command,
            env=os.environ | OWN | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ends(self) -> tuple[bool, str]:
        """Whether it went well, and all that it printed."""
        try:
            log, _ = self._process.communicate(timeout=400)
        finally:
            self._process.kill()
        return self._process.returncode == 0, log

    def results(self) -> list[dict[str, Any]]:
        went_well, log = self.ends()
        assert went_well, log[-6000:]
        return [json.loads(line[7:]) | {"log": log} for line in log.splitlines() if line.startswith("RESULT ")]


def ranks(
    count: int, cases: list[dict[str, Any]], environment: dict[str, str] | None = None, **parallel: Any
) -> list[list[dict[str, Any]]]:
    """Results of loads by so many ranks, rank by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = ({"rank": rank, "ranks": count, "port": port, **parallel} for rank in range(count))
    scripts = [Script("sglang_ranks.py", place, *cases, environment=environment) for place in places]
    return [script.results() for script in scripts]


def case(model: Any, load_format: str, **other: Any) -> dict[str, Any]:
    return {"model": str(model), "load_format": load_format, **other}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Any:
    """An S3 server that holds a model, beside a file in another format that is to be left alone."""
    with servers.s3(tmp_path_factory.mktemp("s3")) as remote:
        for file in models["dense"].iterdir():
            remote.put(f"dense/{file.name}", file.read_bytes())
        remote.put("dense/consolidated.safetensors", b"another format")
        yield remote


@pytest.fixture(scope="module")
def alone(
    models: dict[str, Path], bucket: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], dict[str, Any]]:
    """Results of one rank, by model (or what is special) and format."""
    half = {"dtype": "float16", "unprocessed": True}
    loads = {
        **{(model, how): case(models[model], how) for model in MODELS for how in ("auto", "penstock")},
        **{(model, how): case(models[model], how, **half) for model in QUANTISED for how in ("auto", "penstock")},
        **{(how, "penstock"): case(models["dense"], "penstock", how=how) for how in UNUSUAL},
        ("plain", "penstock"): case(models["dense"], "penstock", extra={"record": False, "readers": 2}),
        ("shouted", "penstock"): case(models["dense"], "PENSTOCK"),
        **{(wrong, "penstock"): case(models["dense"], "penstock", extra=extra) for wrong, (extra, _) in WRONG.items()},
        ("left", "auto"): case(f"{bucket.root}/dense", "auto"),
        ("s3", "penstock"): case(f"{bucket.root}/dense", "penstock"),
    }
    with hub.hub() as repositories:
        repositories.push("org/dense", {file.name: file.read_bytes() for file in models["dense"].iterdir()})
        there = {"HF_ENDPOINT": repositories.endpoint, "HF_HUB_OFFLINE": "0"}
        for name, asked in (("hf left", "auto"), ("hf", "penstock")):
            loads[name, asked] = case("hf://org/dense", asked, environment=there)
        environment = bucket.environment | {"SGLANG_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
        [results] = ranks(1, list(loads.values()), environment=environment)
    return dict(zip(loads, results, strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_weights_are_those_of_the_stock_loader(alone: Any, model: str) -> None:
    ours, stock = alone[model, "penstock"], alone[model, "auto"]
    assert (ours["loader"], stock["loader"]) == ("PenstockModelLoader", "DefaultModelLoader")
    assert ours["sums"] == stock["sums"]
    assert len(ours["sums"]) > 10


@pytest.mark.parametrize("model", MODELS)
def test_everything_is_recorded_and_read_as_one_plan(alone: Any, model: str) -> None:
    figures = alone[model, "penstock"]["figures"]
    assert (figures["eager"], figures["fallback"], figures["plans"]) == ({}, 0, 1)
    assert figures["bytes"] == figures["available_bytes"]
    # Weights of another dtype than the model's are converted on their way, the others go straight to their places.
    assert (figures["converted"] == 0) == (model != "converted")


@pytest.mark.parametrize("method", QUANTISED)
def test_quantised_weights_are_those_of_the_stock_loader(alone: Any, method: str) -> None:
    ours, stock = alone[method, "penstock"], alone[method, "auto"]
    assert ours["sums"] == stock["sums"]
    assert (ours["figures"]["eager"], ours["figures"]["fallback"]) == ({}, 0)


VERIFY: dict[str, Any] = {"record": "verify"}


def verifying(models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    half = {"dtype": "float16", "unprocessed": True}
    return {
        model: case(models[model], "penstock", extra=VERIFY, logged=True, **(half if model in QUANTISED else {}))
        for model in (*MODELS, *QUANTISED)
    }


@pytest.mark.parametrize("count", [1, 2])
def test_every_model_is_verified_and_what_is_recorded_wrongly_is_found(models: dict[str, Path], count: int) -> None:
    loads = verifying(models)
    # Each is recorded with another place left out. (Not the `g_idx` of GPTQ: constructors make it what is loaded.)
    wrong = [load | {"leaving_out": number} for number, load in enumerate(loads.values(), 1)]
    for results in ranks(count, [*loads.values(), *wrong], tp_size=count):
        right, found = results[: len(loads)], results[len(loads) :]
        assert [result["figures"]["fallback"] for result in right] == [0] * len(loads)
        assert results[0]["log"].count("Penstock: verified: all ") == len(loads)
        for result in found:
            assert result["error"].startswith("VerificationError: 1 of ")


def test_verifying_says_where_nothing_is_recorded(models: dict[str, Path]) -> None:
    [[result]] = ranks(1, [case(models["dense"], "penstock", extra=VERIFY, logged=True, how="on another device")])
    assert "has nothing to compare, since nothing is recorded: devices of type xpu" in result["log"]
    assert "verified: all" not in result["log"]


@pytest.mark.parametrize("how", UNUSUAL)
def test_a_model_that_copies_in_threads_or_writes_to_its_weights_loads_once(alone: Any, how: str) -> None:
    result = alone[how, "penstock"]
    assert result["sums"] == alone["dense", "auto"]["sums"]
    assert not any("eager tensors:" in note for note in result["figures"]["notes"])


def test_ordinary_tensors_can_be_asked_for(alone: Any) -> None:
    result = alone["plain", "penstock"]
    assert result["sums"] == alone["dense", "auto"]["sums"]
    assert "record is False" in result["figures"]["notes"][0]
    assert result["figures"]["fallback"] == result["figures"]["tensors"]


def test_the_format_may_be_written_in_capitals(alone: Any) -> None:
    assert alone["shouted", "penstock"]["loader"] == "PenstockModelLoader"


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_set_wrongly_is_refused_with_what_is_known(alone: Any, wrong: str) -> None:
    assert WRONG[wrong][1] in alone[wrong, "penstock"]["error"]


AFTER_0_5_23 = """
import torch
from penstock.integrations.sglang.loader import DefaultModelLoader, PenstockModelLoader
from sglang.srt.configs.load_config import LoadConfig

calls = []
for name in ("load_weights_only", "pre_weight_processing_hook", "postprocess_weights"):
    setattr(DefaultModelLoader, name, staticmethod(lambda *_, name=name: calls.append(name)))
loader = PenstockModelLoader(LoadConfig())
loader.load_weights_and_postprocess("model", iter(()), torch.device("cpu"), model_config="its")
loader.load_weights_and_postprocess("model", iter(()), torch.device("cpu"), model_config=None)
print(*calls)
"""


def test_a_later_sglangs_hook_is_called_where_it_calls_it() -> None:
    command = [sys.executable, "-c", AFTER_0_5_23]
    done = subprocess.run(command, env=os.environ | OWN, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    at_start, update = ["load_weights_only", "pre_weight_processing_hook", "postprocess_weights"], slice(0, 3, 2)
    assert done.stdout.split()[-5:] == [*at_start, *at_start[update]]


@pytest.mark.parametrize("where", ["s3", "hf"])
def test_models_elsewhere_are_loaded_from_there(alone: Any, where: str) -> None:
    result = alone[where, "penstock"]
    assert (result["loader"], result["sums"]) == ("PenstockModelLoader", alone["dense", "auto"]["sums"])
    figures = result["figures"]
    assert (figures["plans"], figures["fallback"]) == (1, 0)
    assert sum(load["network_bytes"] for load in figures["loads"]) == figures["available_bytes"]


def test_object_stores_are_left_to_sglang_unless_penstock_is_asked_for(alone: Any) -> None:
    assert "No module named 'runai_model_streamer'" in alone["left", "auto"]["error"]
    assert "error" in alone["hf left", "auto"]


# For those who do not ask for the format

PLUGIN = """
import json, sys
if "broken" in sys.argv:
    import penstock.integrations.sglang.hooks as hooks
    def fails(*_, **__):
        raise TypeError("SGLang wants another argument")
    hooks.register = fails
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader.loader import get_model_loader
found = {}
for load_format in ("auto", "safetensors", "nonsense", "penstock"):
    try:
        found[load_format] = type(get_model_loader(LoadConfig(load_format=load_format), None)).__name__
    except Exception as error:
        found[load_format] = f"{type(error).__name__}: {error}"
from sglang.srt.utils.runai_utils import is_runai_obj_uri
found["objects"] = [is_runai_obj_uri(place) for place in ("s3://b/m", "hf://o/m", "https://h/m", "/m")]
print("RESULT", json.dumps(found))
"""


@pytest.mark.parametrize("how", ["broken", "off"])
def test_a_plugin_that_cannot_register_or_is_turned_off_leaves_sglang_as_it_is(how: str, tmp_path: Path) -> None:
    def formats(how: str, **environment: str) -> dict[str, Any]:
        own = os.environ | OWN | {"SGLANG_CACHE_DIR": str(tmp_path)} | environment
        command = [sys.executable, "-c", PLUGIN, how]
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        found: dict[str, Any] = json.loads(line[7:])
        return found

    ours = formats("registered")
    without = formats("absent", SGLANG_PLUGINS="another")
    left = formats(how, **({"PENSTOCK_DISABLE": "1"} if how == "off" else {}))
    assert ours.pop("penstock") == "PenstockModelLoader"
    assert left == without
    assert "Error" in without.pop("penstock")
    assert ours == without
    assert ours["auto"] == "DefaultModelLoader"


# Two ranks


@pytest.fixture(scope="module")
def shared(models: dict[str, Path]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Results of two ranks, by model and format."""
    loads = {(model, how): case(models[model], how) for model in (*MODELS, "wide") for how in ("auto", "penstock")}
    results = ranks(2, list(loads.values()), tp_size=2)
    return dict(zip(loads, map(list, zip(*results, strict=True)), strict=True))


@pytest.mark.parametrize("model", [*MODELS, "wide"])
def test_each_rank_has_the_shards_of_the_stock_loader(shared: Any, model: str) -> None:
    ours, stock = shared[model, "penstock"], shared[model, "auto"]
    assert [rank["sums"] for rank in ours] == [rank["sums"] for rank in stock]
    assert ours[0]["sums"] != ours[1]["sums"]
    for rank in ours:
        assert (rank["figures"]["eager"], rank["figures"]["plans"]) == ({}, 1)


def test_each_rank_of_two_reads_its_share(shared: Any) -> None:
    for rank in shared["wide", "penstock"]:
        figures = rank["figures"]
        assert figures["bytes"] <= 0.51 * figures["available_bytes"], "what is asked for"
        assert figures["read_bytes"] <= 0.55 * figures["available_bytes"], "what leaves the storage"


@pytest.mark.parametrize(
    ("model", "parallel"), [("dense", {"pp_size": 2}), ("experts", {"tp_size": 2, "ep_size": 2})], ids=["pp", "ep"]
)
def test_layers_and_experts_of_other_ranks_are_not_read(
    alone: Any, models: dict[str, Path], model: str, parallel: dict[str, int]
) -> None:
    whole = alone[model, "penstock"]["figures"]["bytes"]
    for stock, ours in ranks(2, [case(models[model], "auto"), case(models[model], "penstock")], **parallel):
        assert ours["sums"] == stock["sums"]
        assert (ours["figures"]["eager"], ours["figures"]["plans"]) == ({}, 1)
        assert ours["figures"]["bytes"] < 0.7 * whole


# What several ranks want is read by one of them

SHARED: dict[str, Any] = {"extra": {"share": True}}
COLUMNS = ["columns", "columns of experts"]
UNABLE = {
    "failing": "ValueError: a model's own",
    "cannot open": "StorageError: the disk is broken",
}
"""What may be wrong with rank 1, and what the other says of it."""


def checkpoint_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


@pytest.fixture(scope="module")
def together(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Results of two ranks of models whose rows lie close, loaded in several ways, one after the other.

    What an S3 server sent for those that are loaded from there is counted in ``served``.
    """
    model, home = models["columns"], tmp_path_factory.mktemp("together")
    loads = {
        "stock": case(model, "auto"),
        "stock of experts": case(models["columns of experts"], "auto"),
        "shared": case(model, "penstock", **SHARED),
        "apart": case(model, "penstock", extra={"share": False}),
        "cached": case(model, "penstock"),
        **{how: case(model, "penstock", how={"1": how}, **SHARED) for how in UNABLE},
        "updated": case(model, "penstock", updated_by=1, **SHARED),
        "ordinary": case(model, "penstock", extra={"share": True, "record": False}),
        "again": case(model, "penstock", **SHARED),
    }
    with servers.s3(home) as remote:
        for number, name in enumerate(COLUMNS):
            for file in models[name].iterdir():
                remote.put(f"{number}/{file.name}", file.read_bytes())
            loads[f"{name} from s3"] = case(f"{remote.root}/{number}", "penstock")
        counted = servers.Counted(int(remote.environment["AWS_ENDPOINT_URL"].rpartition(":")[2]))
        there = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{counted.port}", "SGLANG_CACHE_DIR": str(home / "cache")}
        results = ranks(2, list(loads.values()), environment=remote.environment | there, tp_size=2)
        counted.close()
    found = dict(zip(loads, map(list, zip(*results, strict=True)), strict=True))
    return {**found, "served": [{"bytes": sum(counted.served.values())}]}


def sums(of_ranks: list[dict[str, Any]]) -> list[Any]:
    return [rank.get("sums") for rank in of_ranks]


@pytest.mark.parametrize("when", ["shared", "again"])
def test_two_ranks_read_each_byte_once_and_have_the_shards_of_the_stock_loader(
    together: Any, models: dict[str, Path], when: str
) -> None:
    assert sums(together[when]) == sums(together["stock"])
    size = checkpoint_bytes(models["columns"])
    for rank in together[when]:
        figures = rank["figures"]
        assert (figures["eager"], figures["fallback"], figures["plans"], figures["notes"]) == ({}, 0, 1, [])
        assert figures["shared"] == 4, "o_proj and down_proj of two layers"
        assert figures["read_bytes"] <= 0.55 * size
    assert sum(rank["figures"]["read_bytes"] for rank in together[when]) <= 1.1 * size


@pytest.mark.parametrize("when", ["apart", "cached", "ordinary"])
def test_ranks_read_for_themselves_where_they_are_to_or_where_it_costs_little(
    together: Any, models: dict[str, Path], when: str
) -> None:
    assert sums(together[when]) == sums(together["stock"])
    for rank in together[when]:
        assert (rank["figures"]["shared"], rank["figures"]["received_bytes"]) == (0, 0)
        assert rank["figures"]["read_bytes"] > 0.6 * checkpoint_bytes(models["columns"])


@pytest.mark.parametrize("how", UNABLE)
def test_where_one_rank_cannot_the_other_reads_for_itself(together: Any, how: str) -> None:
    able, unable = together[how]
    assert able["sums"] == together["stock"][0]["sums"]
    assert (able["figures"]["shared"], able["figures"]["plans"]) == (0, 1)
    [note] = able["figures"]["notes"]
    assert note.startswith(f"each rank read for itself: rank 1 does: {UNABLE[how]}")
    assert UNABLE[how] in unable["error"]


def test_an_update_is_a_matter_of_each_rank(together: Any) -> None:
    assert sums(together["updated"]) == sums(together["stock"])
    began, updated = (rank["figures"] for rank in together["updated"])
    assert (began["shared"], updated["shared"], updated["notes"]) == (4, 0, [])


@pytest.mark.parametrize(("model", "stock"), [("columns", "stock"), ("columns of experts", "stock of experts")])
def test_a_model_on_s3_is_served_once_to_two_ranks(
    together: Any, models: dict[str, Path], model: str, stock: str
) -> None:
    ours = together[f"{model} from s3"]
    assert sums(ours) == sums(together[stock])
    for rank in ours:
        figures = rank["figures"]
        assert (figures["notes"], figures["plans"]) == ([], 1)
        assert figures["shared"] >= 4, "o_proj, and what is multiplied last"
        assert sum(load["network_bytes"] for load in figures["loads"]) <= 0.55 * checkpoint_bytes(models[model])
    [served] = together["served"]
    assert served["bytes"] <= 1.1 * sum(checkpoint_bytes(models[name]) for name in COLUMNS), "of both models"


@pytest.mark.parametrize(
    ("model", "count", "parallel"),
    [("columns", 4, {"tp_size": 2, "pp_size": 2}), ("attention", 2, {"tp_size": 2, "dp_size": 2})],
    ids=["stages", "data-parallel attention"],
)
def test_ranks_share_within_their_stage_and_whatever_part_of_attention_they_have(
    models: dict[str, Path], model: str, count: int, parallel: dict[str, int]
) -> None:
    is_spread = "dp_size" in parallel
    loads = [case(models[model], "auto"), case(models[model], "penstock", **SHARED)]
    found = ranks(count, loads, **parallel, **({"enable_dp_attention": True} if is_spread else {}))
    for stock, ours in found:
        assert ours["sums"] == stock["sums"]
        assert (ours["figures"]["notes"], ours["figures"]["plans"]) == ([], 1)
        # o_proj and down_proj of a stage's layer; or the words, and of two layers attention and down_proj.
        assert ours["figures"]["shared"] == (11 if is_spread else 2)
    read = sum(ours["figures"]["read_bytes"] for _, ours in found)
    assert read <= 1.1 * checkpoint_bytes(models[model])


# The whole engine


@pytest.fixture(scope="module")
def served(
    models: dict[str, Path], bucket: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], dict[str, Any]]:
    """What engines generated, by model and format; first as they began, then with another model in its place."""
    home = tmp_path_factory.mktemp("others")
    others = {
        "dense": conftest.save("Llama", home / "dense", "float32", seed=1),
        "experts": conftest.save("Mixtral", home / "experts", "float32", seed=1, **conftest.EXPERTS),
    }
    for file in others["experts"].iterdir():
        bucket.put(f"others/{file.name}", file.read_bytes())
    environment = bucket.environment | {"SGLANG_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    # From a bucket, and then from a directory; and the other way round.
    engines = {
        ("dense", "auto"): (models["dense"], "auto", others["dense"]),
        ("dense", "penstock"): (f"{bucket.root}/dense", "penstock", others["dense"]),
        ("experts", "auto"): (models["experts"], "auto", others["experts"]),
        ("experts", "penstock"): (models["experts"], "penstock", f"{bucket.root}/others"),
    }
    settings = [
        {"model_path": str(first), "load_format": load_format, "updates": [str(then)]}
        for first, load_format, then in engines.values()
    ]
    # Two at a time: most of an engine's start is imports.
    scripts = [Script("sglang_engine.py", *settings[half : half + 2], environment=environment) for half in (0, 2)]
    return dict(zip(engines, [result for script in scripts for result in script.results()], strict=True))


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_tokens_are_those_of_the_stock_loader(served: Any, model: str) -> None:
    first, then = served[model, "penstock"]["tokens"]
    assert [first, then] == served[model, "auto"]["tokens"]
    assert first != then, "what took the first one's place"
    [update] = served[model, "penstock"]["updated"]
    assert "Succeeded to update model weights" in update


def test_what_people_look_for_in_the_log_is_there(served: Any) -> None:
    log = served["dense", "penstock"]["log"]
    assert log.count("Loading weights took ") >= 2, "the load and the update"
    assert log.count("Penstock: 0.002 GB (100% of the checkpoint)") >= 2
