"""``--load-format penstock`` in a real vLLM: what it generates and what is in its parameters are the stock loader's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from conftest import Run  # noqa: E402

AGAIN = ["figures", "zero", "reload", "tokens"]
"""Load, spoil the weights, load again."""
MODELS = ["dense", "converted", "experts", "tied"]


@pytest.fixture(scope="module")
def alone(vllm: Run, models: dict[str, Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """Results of one process without tensor parallelism, by model and format."""
    cases = [(model, load_format) for model in MODELS for load_format in ("auto", "penstock")]
    results = vllm(*(
        {"model": str(models[model]), "load_format": load_format, "calls": AGAIN if load_format == "penstock" else []}
        for model, load_format in cases
    ))  # fmt: skip
    return dict(zip(cases, results, strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_the_stock_loader(alone: Any, model: str) -> None:
    assert alone[model, "penstock"]["tokens"] == alone[model, "auto"]["tokens"]


@pytest.mark.parametrize("model", MODELS)
def test_weights_can_be_reloaded_in_place(alone: Any, model: str) -> None:
    assert alone[model, "penstock"]["tokens after"] == alone[model, "auto"]["tokens"]


@pytest.mark.parametrize("model", MODELS)
def test_everything_is_recorded_and_read_as_one_plan(alone: Any, model: str) -> None:
    [figures] = alone[model, "penstock"]["figures"]
    assert (figures["materialised"], figures["ordinary"], figures["plans"]) == ({}, 0, 1)
    assert figures["bytes"] == figures["available_bytes"]
    # Weights of another dtype than the model's are converted on their way, the others go straight to their places.
    assert (figures["converted"] == 0) == (model != "converted")


def test_what_people_look_for_in_the_log_is_there(alone: Any) -> None:
    log = alone["dense", "penstock"]["log"]
    assert "Loading weights took " in log
    assert "Penstock: 0.00" in log
    assert "GB (100% of the checkpoint)" in log


@pytest.fixture(scope="module")
def shared(vllm: Run, models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Results of two ranks."""
    loaded = [["loaded", "safetensors"], ["loaded", "penstock"]]
    cases = {
        "wide": {"model": "wide", "load_format": "dummy", "calls": loaded},
        "experts": {"model": "experts", "load_format": "penstock", "calls": loaded},
        "dense": {"model": "dense", "load_format": "penstock", "calls": loaded},
    }
    settings = ({**case, "model": str(models[case["model"]]), "tensor_parallel_size": 2} for case in cases.values())
    return dict(zip(cases, vllm(*settings), strict=True))


@pytest.mark.parametrize("model", ["wide", "dense", "experts"])
def test_each_rank_has_the_shards_of_the_stock_loader(shared: Any, model: str) -> None:
    stock, ours = (shared[model][json.dumps(["loaded", f])] for f in ("safetensors", "penstock"))
    assert len(stock) == len(ours) == 2
    assert [rank["sums"] for rank in ours] == [rank["sums"] for rank in stock]
    assert ours[0]["sums"] != ours[1]["sums"]


def test_each_rank_of_two_reads_its_share(shared: Any) -> None:
    for rank in shared["wide"][json.dumps(["loaded", "penstock"])]:
        figures = rank["figures"]
        assert (figures["materialised"], figures["plans"]) == ({}, 1)
        assert figures["bytes"] <= 0.51 * figures["available_bytes"], "what is asked for"
        assert figures["read_bytes"] <= 0.55 * figures["available_bytes"], "what leaves the storage"


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_tokens_of_two_ranks_are_those_of_one(alone: Any, shared: Any, model: str) -> None:
    assert shared[model]["tokens"] == alone[model, "auto"]["tokens"]


def test_unknown_settings_are_refused_with_the_known_ones(vllm: Run, models: dict[str, Path]) -> None:
    case = {"model": str(models["dense"]), "load_format": "penstock", "model_loader_extra_config": {"readrs": 4}}
    log = vllm(case, fails=True)
    assert "does not know 'readrs'" in log
    assert "block_bytes, cache, enable_weights_track, read_ahead_bytes, readers, record, staging_bytes" in log
