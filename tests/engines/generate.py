"""Runs a model in vLLM, in a process of its own, and prints what came of it as one line of JSON.

    python generate.py '{"model": DIRECTORY, "load_format": "penstock", …}' …

Each argument is one engine's keywords, besides ``prompts`` and ``calls`` (methods of ``Looks`` to call in the workers).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from typing import Any


class Looks:
    """What is looked at inside the workers. Functions, since they travel there."""

    @staticmethod
    def weights(worker: Any, of: str = "model") -> dict[str, str]:
        """A checksum of every parameter and buffer, of the model or of the one that drafts."""
        import torch

        runner = worker.model_runner
        model = runner.drafter.model if of == "draft" else runner.get_model()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        # Parts of a parameter that nobody loads (padding) are whatever memory held; there is none in these models.
        return {
            name: hashlib.sha256(
                tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            ).hexdigest()
            + str(tuple(tensor.shape))
            for name, tensor in tensors.items()
            if tensor.numel()
        }

    @staticmethod
    def figures(worker: Any) -> dict[str, Any] | None:
        """What Penstock counted."""
        del worker
        from penstock.integrations.vllm import last_load

        statistics = last_load()
        return None if statistics is None else statistics.as_dict()

    @staticmethod
    def loaded(
        worker: Any,
        load_format: str,
        other: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        *how: str,
    ) -> dict[str, Any]:
        """A checksum of every parameter of a second model, as its loader leaves them, and Penstock's figures.

        The engine's own model does not do for that: vLLM repacks weights for the processor, and drops the originals.
        """
        import copy

        import torch
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        if other is None:
            config = copy.copy(worker.vllm_config)
        else:
            # Another model, which this processor need not be able to compute, in the place of the engine's own.
            config = EngineArgs(skip_tokenizer_init=True, enforce_eager=True, **other).create_engine_config()
            config.parallel_config = worker.vllm_config.parallel_config
        config.load_config = copy.copy(config.load_config)
        config.load_config.load_format = load_format
        config.load_config.model_loader_extra_config = extra or {}
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        config.compilation_config.static_all_moe_layers = []
        loader = get_model_loader(config.load_config)
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(vllm_config=config, model_config=config.model_config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            if "writes to its weights" in how:
                loads = model.load_weights
                model.load_weights = lambda weights: loads((name, weight.detach().mul_(1)) for name, weight in weights)
            if "rank 1 does not record" in how and worker.rank == 1:
                loader.extra = dataclasses.replace(loader.extra, record=False)
            if "is processed while it loads" in how:
                # As vLLM marks layers that it processes one by one.
                def online_process_loader(*_: Any) -> None:
                    """Takes no weight."""

                next(model.parameters()).weight_loader = online_process_loader
                loader._built = config, ""
                loads = model.load_weights
                model.load_weights = lambda weights: loads(list(weights))
            loader.load_weights(model, config.model_config)
        sums = {
            name: hashlib.sha256(
                tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            ).hexdigest()
            for name, tensor in model.named_parameters()
        }
        return {"sums": sums, "figures": Looks.figures(worker) if load_format == "penstock" else None}

    @staticmethod
    def zero(worker: Any) -> None:
        """Spoils all weights."""
        import torch

        with torch.no_grad():
            for parameter in worker.model_runner.get_model().parameters():
                parameter.zero_()

    @staticmethod
    def reload(worker: Any, path: str | None = None) -> None:
        """Loads them again, or another model's."""
        worker.model_runner.reload_weights(weights_path=path)


def run(settings: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    calls = settings.pop("calls", ["weights", "figures"])
    usual = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "max_model_len": 128, "seed": 0}
    llm = LLM(**usual | settings)

    def tokens() -> list[int]:
        prompt: Any = {"prompt_token_ids": list(range(3, 20))}
        made = llm.generate([prompt], SamplingParams(max_tokens=12, temperature=0, detokenize=False), use_tqdm=False)
        return list(made[0].outputs[0].token_ids)

    found: dict[str, Any] = {} if settings["load_format"] == "dummy" else {"tokens": tokens()}
    for call in calls:
        name, *arguments = [call] if isinstance(call, str) else call
        if name == "tokens":
            found["tokens after"] = tokens()
        else:
            found[json.dumps(call) if arguments else name] = llm.collective_rpc(
                getattr(Looks, name), args=tuple(arguments)
            )
    llm.llm_engine.engine_core.shutdown()
    return found


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print("RESULT " + json.dumps(run(json.loads(argument))), flush=True)
