"""Loads models with SGLang's loaders, in a process that is one rank of them, and prints what came of each.

    python sglang_ranks.py '{"rank": 0, "ranks": 1, "port": 29500}' '{"model": DIRECTORY, "load_format": "auto", …}' …

The first argument is the process's place; each other one a load: ``model``, ``load_format``, ``dtype``, ``extra`` (of
``--model-loader-extra-config``), ``how`` (what the model's own loading code does besides, or a dict of that by rank),
``logged`` (what is logged at INFO is printed), ``leaving_out`` (which of the places that are recorded is not read to),
``unprocessed`` (weights stay as they were loaded: this processor has no kernels that would want them in another form),
``updated_by`` (a rank that updates the model from its files, while the others do not), ``environment``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

from leaving_out import one_place_left_out

import penstock
from penstock import checkpoint

RANK = json.loads(sys.argv[1])["rank"]
KEPT: list[Any] = []
"""Models, so that none has memory in which another's weights were."""


def arguments(model: str, load_format: str, **more: Any) -> Any:
    """What ``sglang serve`` makes of its arguments, the small files of a model on an object store fetched."""
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=model,
        load_format=load_format,
        device="cpu",
        attention_backend="torch_native",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        **more,
    )
    args.resolve_once()
    return args


def start(rank: int, ranks: int, port: int, **parallel: Any) -> None:
    """SGLang's own start of a rank, up to where it has a model to load; it finds plugins by itself."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish

    load_plugins()
    args = arguments(json.loads(sys.argv[2])["model"], "penstock", **parallel)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    init_distributed_environment(
        world_size=ranks, rank=rank, distributed_init_method=f"tcp://127.0.0.1:{port}", local_rank=rank, backend="gloo"
    )
    initialize_model_parallel()
    initialize_dp_attention(args)


def weights_of(model: Any) -> dict[str, str]:
    """A checksum of every parameter."""
    import torch

    return {
        name: hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        + str(tuple(tensor.shape))
        for name, tensor in model.named_parameters()
        if tensor.numel()
    }


def refusing(*_: Any, **__: Any) -> Any:
    """In the place of ``penstock.checkpoint.open``."""
    raise penstock.StorageError("the disk is broken")


def in_threads(loads: Any, model: Any, weights: Any) -> None:
    """What some models do: each weight is copied by whichever thread is free."""
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(loads, model, [pair]) for pair in weights]:
            future.result()


def in_silent_threads(loads: Any, model: Any, weights: Any) -> None:
    """The same, where nobody asks what became of it."""
    with ThreadPoolExecutor(2) as pool:
        for pair in weights:
            pool.submit(loads, model, [pair])


def writing(loads: Any, model: Any, weights: Any) -> None:
    """Weights are changed in place before they are copied."""
    loads(model, ((name, weight.detach().mul_(1)) for name, weight in weights))


def failing(loads: Any, model: Any, weights: Any) -> None:
    """Nothing is loaded, with lazy tensors or without."""
    del loads, model, weights
    raise ValueError("a model's own")


HOW = {"failing": failing, "in threads": in_threads, "in silent threads": in_silent_threads, "writing": writing}


def load(case: dict[str, Any]) -> dict[str, Any]:
    import torch
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model_loader
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.models import llama

    from penstock.integrations.sglang import last_load
    from penstock.integrations.sglang import loader as sglang_loader

    if case.get("logged"):
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, force=True)
    load_format = case["load_format"]
    if "://" in case["model"]:
        load_format = resolving_view(arguments(case["model"], load_format)).load_format
    model_config = ModelConfig(case["model"], dtype=case.get("dtype", "float32"))
    config = LoadConfig(load_format=load_format, model_loader_extra_config=case.get("extra", {}))
    loader = get_model_loader(config, model_config)
    opens = checkpoint.open
    device = sglang_loader._device
    own, processes = llama.LlamaForCausalLM.load_weights, DefaultModelLoader.postprocess_weights
    if case.get("unprocessed"):
        DefaultModelLoader.postprocess_weights = staticmethod(lambda *_: None)
    how = case.get("how")
    how = how.get(str(RANK)) if isinstance(how, dict) else how
    if how == "cannot open":
        checkpoint.open = refusing
    elif how == "on another device":
        sglang_loader._device = lambda _: ("cpu", "devices of type xpu are filled by the model's own code")
    elif how:
        llama.LlamaForCausalLM.load_weights = lambda model, weights: HOW[how](own, model, weights)
    leaving_out = one_place_left_out(case["leaving_out"]) if "leaving_out" in case else nullcontext()
    try:
        with leaving_out:
            model = loader.load_model(model_config=model_config, device_config=DeviceConfig("cpu", 0))
    finally:
        llama.LlamaForCausalLM.load_weights = own
        DefaultModelLoader.postprocess_weights = staticmethod(processes)
        checkpoint.open = opens
        sglang_loader._device = device
    KEPT.append(model)
    if case.get("updated_by") == RANK:
        # As SGLang's own updates do it, with a loader of their own.
        for parameter in model.parameters():
            parameter.data.zero_()
        loader = get_model_loader(LoadConfig(load_format=load_format), model_config)
        weights = loader._get_weights_iterator(DefaultModelLoader.Source.init_new(model_config, model))
        loader.load_weights_and_postprocess(model, weights, torch.device("cpu"))
    statistics = last_load() if type(loader).__name__ == "PenstockModelLoader" else None
    return {
        "loader": type(loader).__name__,
        "sums": weights_of(model),
        "figures": statistics.as_dict() if statistics else None,
    }


if __name__ == "__main__":
    start(**json.loads(sys.argv[1]))
    for argument in sys.argv[2:]:
        case = json.loads(argument)
        os.environ.update(case.get("environment", {}))
        try:
            result = load(case)
        except Exception as error:  # noqa: BLE001 - a result too
            result = {"error": f"{type(error).__name__}: {error}"}
        print("\nRESULT " + json.dumps(result), flush=True)
