"""Loads a tiny model of each class that is named, in one process, and prints what came of it, a line of JSON for each.

    python vllm_classes.py CLASS …

Each is loaded by the stock loader and by Penstock with ``{"record": "verify"}``: whole, and as rank 1 of two whose
other is not there, since a model's loading code asks others for nothing. Then once more with one place of what was
recorded left out, which verifying has to find.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from leaving_out import one_place_left_out
from tiny_configurations import tiny
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.models import registry
from vllm.plugins import load_general_plugins

from penstock.recording import VerificationError, differing

POOLING = {"Gemma2Model", "LlamaModel", "MistralModel", "Qwen2Model"}
"""Which vLLM takes for what generates, if it is not told."""
LARGEST = 30_000_000
"""Elements of a model that is still tiny."""


class Kept(logging.Handler):
    """What Penstock logs."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def taken(self) -> list[str]:
        messages, self.messages = self.messages, []
        return messages


def save(name: str, directory: Path) -> None:
    """A model of random weights, in several shards."""
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        config = tiny(model_class)
        with torch.device("meta"):
            elements = sum(parameter.numel() for parameter in model_class(config).parameters())
        assert elements <= LARGEST, f"{elements} elements are not tiny"
        model = model_class(config)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        # Ones and zeros, which a constructor has made of norms and biases, would be right without a weight too.
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(0, 0.05)
    model.config.architectures = [name]
    model.save_pretrained(directory, max_shard_size="400KB")


def configured(model: Path | str, load_format: str, **extra: Any) -> VllmConfig:
    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=64,
        load_format=load_format, model_loader_extra_config=extra,
        runner="pooling" if Path(model).name in POOLING else "auto",
    ).create_engine_config()  # fmt: skip


def loaded(config: VllmConfig) -> torch.nn.Module:
    """A model as its weights leave it: not yet repacked for the processor."""
    loader = get_model_loader(config.load_config)
    with (
        set_current_vllm_config(config),
        mock.patch("vllm.model_executor.model_loader.base_loader.process_weights_after_loading"),
        # Which collects twice for each load, most of its time for models of this size.
        mock.patch("vllm.model_executor.model_loader.base_loader.gc", create=True),
    ):
        return loader.load_model(vllm_config=config, model_config=config.model_config)


@contextmanager
def rank_one_of_two() -> Iterator[None]:
    with mock.patch.multiple(parallel_state.get_tp_group(), world_size=2, rank_in_group=1):
        yield


def verified(config: VllmConfig, log: Kept) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model that was recorded and verified, and what Penstock says of that."""
    from penstock.integrations.vllm import last_load

    log.taken()
    # vLLM takes handlers away when it configures its own.
    logging.getLogger("vllm.penstock").addHandler(log)
    model = loaded(config)
    statistics = last_load()
    assert statistics is not None
    said = [message for message in log.taken() if "verified" in message]
    figures = statistics.as_dict()
    names = ("tensors", "in_place", "converted", "fallback", "plans", "eager", "notes")
    return model, {"said": said, **{name: figures[name] for name in names}}


def failure(directory: Path) -> str:
    """What the stock loader raises."""
    try:
        loaded(configured(directory, "auto"))
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return ""


def result(name: str, directory: Path, log: Kept) -> dict[str, Any]:
    save(name, directory)
    config = configured(directory, "penstock", record="verify", share=False)
    found: dict[str, Any] = {}
    stock = loaded(configured(directory, "auto"))
    ours, found["whole"] = verified(config, log)
    found["layers of experts"] = config.compilation_config.static_all_moe_layers
    found["differs from the stock loader's"] = differing(ours, stock)
    with rank_one_of_two():
        config = configured(directory, "penstock", record="verify", share=False)
        try:
            _, found["rank 1 of 2"] = verified(config, log)
        except (RuntimeError, AssertionError) as error:
            # Some have no shards. The stock loader says so in the same words.
            found["rank 1 of 2"] = {"error": str(error), "the stock loader's": failure(directory)}
    config = configured(directory, "penstock", record="verify", share=False)
    with one_place_left_out(len(name)) as left_out:
        try:
            loaded(config)
        except VerificationError as error:
            found["left out"] = [left_out, error.differing]
        else:
            found["left out"] = [left_out, []]
    return found


def begin() -> None:
    """vLLM with its plugins, in a group of one process."""
    load_general_plugins()
    # New memory does not hold what was there before, which are these very weights: models of a class come and go.
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    # In processes of their own, of which each imports vLLM anew, since CUDA must not be initialised by an import.
    registry._run_in_subprocess = lambda function: function()
    with set_current_vllm_config(VllmConfig()), tempfile.TemporaryDirectory() as home:
        parallel_state.init_distributed_environment(1, 0, Path(home, "meeting").as_uri(), 0, "gloo")
        parallel_state.initialize_model_parallel()


def main(names: list[str]) -> None:
    begin()
    log = Kept()
    for name in names:
        with tempfile.TemporaryDirectory() as home:
            try:
                found = result(name, Path(home, name), log)
            except Exception as error:  # noqa: BLE001 - a result too
                place = traceback.extract_tb(error.__traceback__)[-1]
                found = {"error": f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"}
        print("RESULT " + json.dumps([name, found]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
