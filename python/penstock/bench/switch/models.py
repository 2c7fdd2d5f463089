"""Models of real shapes with weights that nobody trained: Flux-dev with its text encoders, and Llama-3-8B.

``plain`` needs torch only: stacks of linear layers, a small and a large component. Modules are built on the meta device
and filled with bytes of one random block, at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Build = Callable[[], Any]
FLUX, LLAMA, PLAIN = "flux", "llama", "plain"
KINDS = {FLUX: ("diffusers", "transformers"), LLAMA: ("transformers",), PLAIN: ()}
"""What each needs to be installed, besides torch."""
_LLAMA_MODULES = ("safetensors.torch", "transformers.models.llama.modeling_llama")
MODULES = {
    FLUX: (
        *_LLAMA_MODULES, "diffusers.pipelines.flux.pipeline_flux", "transformers.models.t5.modeling_t5",
        "transformers.models.clip.modeling_clip",
    ),
    LLAMA: _LLAMA_MODULES,
    PLAIN: ("safetensors.torch",),
}  # fmt: skip
"""What building each imports."""
WHOLE_GB = {FLUX: 33.6, LLAMA: 16.1, PLAIN: 8.0}
OTHER = {FLUX: LLAMA, LLAMA: LLAMA, PLAIN: PLAIN}
"""The model that takes turns with each."""


def sizes_for(kind: str, gb: float) -> tuple[float, int]:
    """The share of the layers, and what widths are divided by, for a model of about ``gb`` GB."""
    narrow = 1
    while gb * narrow**2 < WHOLE_GB[kind] / 8 and narrow < 8:
        narrow *= 2
    return min(1.0, gb * narrow**2 / WHOLE_GB[kind]), narrow


def builders(model: str, scale: float, narrow: int) -> dict[str, Build]:
    """For each component a function that builds it. ``scale`` is of the numbers of layers; widths are divided."""

    def layers(count: int) -> int:
        return max(1, round(count * scale))

    if model == PLAIN:
        return {"encoder": lambda: _stack(layers(4), narrow), "model": lambda: _stack(layers(26), narrow)}
    if model == LLAMA:
        return {"model": lambda: _llama(layers(32), narrow)}
    return {
        "text_encoder": lambda: _clip(layers(12), narrow),
        "text_encoder_2": lambda: _t5(layers(24), narrow),
        "transformer": lambda: _flux(layers(19), layers(38), narrow),
    }


def filled(build: Build, seed: int) -> Any:
    """The module with memory of its own, in bfloat16 where it holds floating-point numbers."""
    import torch

    with torch.device("meta"):
        module = build().to(torch.bfloat16)
    module = module.to_empty(device="cpu").eval().requires_grad_(False)
    if hasattr(module, "tie_weights"):
        module.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    block = torch.randint(0, 255, (1 << 24,), dtype=torch.uint8, generator=generator)
    for tensor in {id(tensor): tensor for tensor in module.state_dict().values()}.values():
        whole = tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        for start in range(0, whole.numel(), block.numel()):
            part = whole[start : start + block.numel()]
            part.copy_(block[: part.numel()])
    return module


def nbytes(module: Any) -> int:
    """Of its parameters and buffers."""
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])


def save(kind: str, modules: dict[str, Any], directory: Path) -> list[Path]:
    """Writes a model as its library does, a directory for each component. Returns its files of weights."""
    if kind == FLUX:
        pipeline(modules).save_pretrained(directory)
    for of, module in modules.items() if kind != FLUX else ():
        (directory / of).mkdir(parents=True)
        if kind == LLAMA:
            module.save_pretrained(directory / of)
        else:
            from safetensors.torch import save_file

            save_file(module.state_dict(), directory / of / "model.safetensors")
    return files(directory)


def files(directory: Path) -> list[Path]:
    """The files of weights of a model that was written."""
    return sorted(directory.rglob("*.safetensors"))


def sample(modules: dict[str, Any]) -> list[Any]:
    """The beginning and the end of some tensors of each component: what tells that it is the right one."""
    import torch

    found = []
    for module in modules.values():
        tensors = list(module.parameters())
        for tensor in (tensors[0], tensors[len(tensors) // 2], tensors[-1]):
            bits = tensor.detach().reshape(-1).view(torch.uint8)
            found.append([*bits[:16].tolist(), *bits[-16:].tolist()])
    return found


def compute(modules: dict[str, Any]) -> float:
    """A pass over all matrices with a batch of 8: every weight is used once. Returns a number that depends on them."""
    import torch

    total = 0.0
    for module in modules.values():
        for weight in module.parameters():
            if weight.ndim == 2:
                ones = torch.ones(8, weight.shape[1], dtype=weight.dtype, device=weight.device)
                total += float((ones @ weight.T).float().sum())
    return total


def pipeline(modules: dict[str, Any]) -> Any:
    """Diffusers' pipeline of Flux's components, without what holds few bytes."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    return FluxPipeline(FlowMatchEulerDiscreteScheduler(), vae=None, tokenizer=None, tokenizer_2=None, **modules)


def _stack(layers: int, narrow: int) -> Any:
    """Layers of 268 MB, as they are."""
    from torch.nn import LayerNorm, Linear, Sequential

    width = 4096 // narrow
    made = (Sequential(LayerNorm(width), Linear(width, 4 * width), Linear(4 * width, width)) for _ in range(layers))
    return Sequential(*made)


def _flux(double: int, single: int, narrow: int) -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        num_layers=double, num_single_layers=single, num_attention_heads=max(24 // narrow, 1), guidance_embeds=True,
        joint_attention_dim=4096 // narrow, pooled_projection_dim=768 // narrow,
    )  # fmt: skip


def _t5(layers: int, narrow: int) -> Any:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        d_model=4096 // narrow, d_ff=10240 // narrow, num_layers=layers, num_heads=max(64 // narrow, 1), d_kv=64,
        vocab_size=32128 // narrow, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return T5EncoderModel(config)


def _clip(layers: int, narrow: int) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    heads = 12 if narrow == 1 else 1
    config = CLIPTextConfig(
        hidden_size=768 // narrow, intermediate_size=3072 // narrow, num_hidden_layers=layers,
        num_attention_heads=heads, vocab_size=49408 // narrow,
    )  # fmt: skip
    return CLIPTextModel(config)


def _llama(layers: int, narrow: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = 32 if narrow == 1 else 1
    config = LlamaConfig(
        hidden_size=4096 // narrow, intermediate_size=14336 // narrow, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(heads // 4, 1), vocab_size=128256 // narrow,
    )  # fmt: skip
    return LlamaForCausalLM(config)
