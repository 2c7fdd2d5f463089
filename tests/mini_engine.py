"""A small engine: modules and loading code in the shapes of vLLM's and SGLang's, without either.

A decoder with what makes their weight loaders hard: fused QKV with replicated KV heads, merged gate and up, row and
column shards, a padded vocabulary, experts, scales of FP8 weights, transposed and dequantised weights, a tied head.
Weights come as ``(name, tensor)`` pairs; loaders cut, convert and copy them as the engines' do.

As a program it is one rank: ``python mini_engine.py RANK RANKS STORE MODEL STYLE SHARING``. It prints a line of JSON:
checksums of its parameters, and the recording's statistics.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

HIDDEN, HEADS, KV_HEADS, HEAD, LAYERS = 1024, 8, 1, 128, 2
INNER, VOCABULARY, EXPERTS, EXPERT_INNER = 3072, 4000, 4, 1024
PAD_VOCABULARY = 64
_FUSED = [("qkv", "q_proj", "q"), ("qkv", "k_proj", "k"), ("qkv", "v_proj", "v")]
_FUSED += [("gate_up", "gate_proj", 0), ("gate_up", "up_proj", 1)]


@functools.cache
def checkpoint_tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """A checkpoint of the model, as Hugging Face names tensors."""
    random = np.random.default_rng(16)

    def made(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape, dtype=np.float32)).to(dtype)

    tensors = {"model.embed_tokens.weight": made(VOCABULARY, HIDDEN), "model.norm.weight": made(HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS, "v_proj": KV_HEADS}
        for name, count in heads.items():
            tensors[f"{at}.self_attn.{name}.weight"] = made(count * HEAD, HIDDEN)
            tensors[f"{at}.self_attn.{name}.bias"] = made(count * HEAD)
        tensors[f"{at}.self_attn.o_proj.weight"] = made(HIDDEN, HEADS * HEAD)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{at}.mlp.{name}.weight"] = made(INNER, HIDDEN, dtype=torch.float8_e4m3fn)
            tensors[f"{at}.mlp.{name}.weight_scale"] = made(1, dtype=torch.float32)[0]
        tensors[f"{at}.mlp.down_proj.weight"] = made(HIDDEN, INNER)
        tensors[f"{at}.router.weight"] = made(EXPERTS, HIDDEN, dtype=torch.float32)
        for expert in range(EXPERTS):
            for name, shape in (
                ("w1", (EXPERT_INNER, HIDDEN)),
                ("w2", (HIDDEN, EXPERT_INNER)),
                ("w3", (EXPERT_INNER, HIDDEN)),
            ):
                tensors[f"{at}.experts.{expert}.{name}.weight"] = made(*shape)
        tensors[f"{at}.input_layernorm.weight"] = made(HIDDEN)
    tensors["rotary_emb.inv_freq"] = made(8, dtype=torch.float32)  # which engines leave out
    return tensors


class Engine(nn.Module):
    """One rank's part of the model.

    Args:
        rank, ranks: of tensor parallelism.
        style: ``"vllm"`` or ``"sglang"``: how its loaders cut and copy.
    """

    def __init__(self, rank: int = 0, ranks: int = 1, style: str = "vllm", dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.rank, self.ranks, self.style = rank, ranks, style
        self.heads, self.kv_heads = HEADS // ranks, max(KV_HEADS // ranks, 1)
        padded = -(-VOCABULARY // PAD_VOCABULARY) * PAD_VOCABULARY
        self._add("model.embed_tokens.weight", (padded // ranks, HIDDEN), dtype, self._vocabulary)
        for layer in range(LAYERS):
            at = f"model.layers.{layer}"
            rows = (self.heads + 2 * self.kv_heads) * HEAD
            self._add(f"{at}.self_attn.qkv.weight", (rows, HIDDEN), dtype, self._qkv)
            self._add(f"{at}.self_attn.qkv.bias", (rows,), dtype, self._qkv)
            self._add(f"{at}.self_attn.o_proj.weight", (HIDDEN, self.heads * HEAD), dtype, self._columns)
            self._add(f"{at}.mlp.gate_up.weight", (2 * INNER // ranks, HIDDEN), torch.float8_e4m3fn, self._merged)
            self._add(f"{at}.mlp.gate_up.weight_scale", (2,), torch.float32, self._scale)
            # Kept transposed, as kernels want it.
            self._add(f"{at}.mlp.down_proj.weight", (INNER // ranks, HIDDEN), torch.float32, self._transposed)
            self._add(f"{at}.router.weight", (EXPERTS, HIDDEN), torch.float32, self._whole)
            inner = EXPERT_INNER // ranks
            self._add(f"{at}.experts.w13_weight", (EXPERTS, 2 * inner, HIDDEN), dtype, self._expert)
            self._add(f"{at}.experts.w2_weight", (EXPERTS, HIDDEN, inner), dtype, self._expert)
            self._add(f"{at}.input_layernorm.weight", (HIDDEN,), torch.float32, self._norm)
        self._add("model.norm.weight", (HIDDEN,), dtype, self._whole)
        self.lm_head = self.get("model.embed_tokens.weight")

    def _add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, loader: Callable[..., None]) -> None:
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        parameter.weight_loader = loader
        self.register_parameter(name.replace(".", "/"), parameter)

    def get(self, name: str) -> nn.Parameter:
        return self.get_parameter(name.replace(".", "/"))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The model's own code, as engines' models have it. Returns the names of the parameters that were loaded."""
        loaded = set()
        for name, weight in weights:
            if "rotary_emb.inv_freq" in name:
                continue
            into, arguments = self._destination(name)
            parameter = self.get(into)
            parameter.weight_loader(parameter, weight, *arguments)
            loaded.add(into)
        return loaded

    def _destination(self, name: str) -> tuple[str, tuple[Any, ...]]:
        for fused, stored, shard in _FUSED:
            if f".{stored}." in name:
                return name.replace(stored, fused), (shard,)
        if ".experts." in name:
            at, _, rest = name.partition(".experts.")
            expert, stored, _ = rest.split(".")
            return f"{at}.experts.{'w2' if stored == 'w2' else 'w13'}_weight", (int(expert), stored)
        return name, ()

    def _shard(
        self, weight: torch.Tensor, dimension: int, part: int | None = None, of: int | None = None
    ) -> torch.Tensor:
        of = self.ranks if of is None else of
        size = weight.shape[dimension] // of
        start = (self.rank if part is None else part) * size
        if self.style == "vllm":
            return weight.narrow(dimension, start, size)
        return weight[(slice(None),) * dimension + (slice(start, start + size),)]

    # Loaders, each of (parameter, weight, what tells the part).

    @staticmethod
    def _whole(parameter: nn.Parameter, weight: torch.Tensor) -> None:
        assert parameter.shape == weight.shape
        parameter.data.copy_(weight)

    def _norm(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        # Gemma's norms are stored without their one.
        parameter.data.copy_(weight.to(torch.float32) + 1 if self.style == "vllm" else weight.float().add(1.0))

    def _columns(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        parameter.data.copy_(self._shard(weight, 1))

    def _vocabulary(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        rows = parameter.shape[0]
        start = min(self.rank * rows, weight.shape[0])
        part = weight[start : min(start + rows, weight.shape[0])]
        parameter.data[: part.shape[0]].copy_(part)
        parameter.data[part.shape[0] :].fill_(0)

    def _qkv(self, parameter: nn.Parameter, weight: torch.Tensor, shard: str) -> None:
        offset, count = {
            "q": (0, self.heads),
            "k": (self.heads, self.kv_heads),
            "v": (self.heads + self.kv_heads, self.kv_heads),
        }[shard]
        # A KV head that there are fewer of than ranks is had by several.
        replicas = 1 if shard == "q" else max(self.ranks // KV_HEADS, 1)
        part = self._shard(weight, 0, self.rank // replicas, self.ranks // replicas)
        parameter.data.narrow(0, offset * HEAD, count * HEAD).copy_(part)

    def _merged(self, parameter: nn.Parameter, weight: torch.Tensor, shard: int) -> None:
        size = parameter.shape[0] // 2
        into = parameter.data[shard * size : (shard + 1) * size]
        part = self._shard(weight, 0)
        if self.style == "sglang":
            # As where a kernel cannot take the format: to bytes and back.
            part = part.view(torch.uint8).contiguous().view(torch.float8_e4m3fn)
        into.copy_(part)

    def _scale(self, parameter: nn.Parameter, weight: torch.Tensor, shard: int) -> None:
        if self.style == "vllm":
            parameter.data[shard] = weight
        else:
            parameter.data[shard].copy_(weight.reshape(1)[0])

    def _transposed(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        parameter.data.copy_(self._shard(weight, 1).t().contiguous() * 0.5)

    def _expert(self, parameter: nn.Parameter, weight: torch.Tensor, expert: int, shard: str) -> None:
        into = parameter.data[expert]
        if shard == "w2":
            into.copy_(self._shard(weight, 1))
            return
        inner = into.shape[0] // 2
        into.narrow(0, 0 if shard == "w1" else inner, inner).copy_(self._shard(weight, 0))

    def checksums(self) -> dict[str, str]:
        return {
            name.replace("/", "."): hashlib.sha256(
                tensor.data.contiguous().view(torch.uint8).numpy().tobytes()
            ).hexdigest()
            for name, tensor in self.named_parameters()
        }


def main() -> None:
    rank, ranks, store, model, style, sharing = sys.argv[1:]
    from torch import distributed

    import penstock
    from penstock.distributed import Peers, Sharing
    from penstock.recording import Recorder

    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(store, int(ranks)),
        rank=int(rank),
        world_size=int(ranks),
        timeout=timedelta(seconds=60),
    )
    distributed.barrier()
    together = Sharing(Peers(distributed.group.WORLD), always=True) if sharing == "yes" else None
    checkpoint = penstock.open(Path(model))
    engine = Engine(int(rank), int(ranks), style)
    with Recorder(sharing=together) as recorder:
        engine.load_weights(recorder.weights(checkpoint))
    sys.stdout.write(json.dumps({"sums": engine.checksums(), **recorder.statistics.as_dict()}) + "\n")
    sys.stdout.flush()
    # Another that is still talking is not to see this one go in an orderly way.
    os._exit(0)


if __name__ == "__main__":
    main()
