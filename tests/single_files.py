"""Tiny image models as single files, in the layouts of their authors, each with a directory of a pipeline's settings.

Written by the inverse of what ``from_single_file`` of diffusers does: that it reads them back proves them right.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import safetensors.torch
import torch
import transformers

from tiny_models import randomise

Tensors = dict[str, torch.Tensor]
PREFIX = "model.diffusion_model."


class Model(NamedTuple):
    """One file."""

    kind: str
    pipeline: Any
    """Of diffusers, with the weights that the file has."""
    tensors: Tensors
    """As the file has them."""

    def save(self, root: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[Path, Path]:
        """The file, and the directory of settings, which has no weights."""
        self.pipeline.to("meta").save_config(root / "config")
        for name, part in self.pipeline.components.items():
            if isinstance(part, torch.nn.Module):
                (part.save_config if hasattr(part, "save_config") else part.config.save_pretrained)(
                    root / "config" / name
                )
            elif part is not None:
                part.save_pretrained(root / "config" / name)
        path = root / f"{self.kind}.safetensors"
        tensors = {name: tensor.to(dtype).contiguous().clone() for name, tensor in self.tensors.items()}
        safetensors.torch.save_file(tensors, path)
        return path, root / "config"


def renamed(tensors: Tensors, rules: dict[str, str]) -> Tensors:
    """With patterns in names replaced, one after the other."""
    found = {}
    for name, tensor in tensors.items():
        for old, new in rules.items():
            name = re.sub(old, new, name)  # noqa: PLW2901
        found[name] = tensor
    return found


def prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


RESNET = {
    r"norm1\.": "in_layers.0.",
    r"conv1\.": "in_layers.2.",
    r"time_emb_proj\.": "emb_layers.1.",
    r"norm2\.": "out_layers.0.",
    r"conv2\.": "out_layers.3.",
    r"conv_shortcut\.": "skip_connection.",
}


def ldm_unet(unet: Any) -> Tensors:
    layers = unet.config.layers_per_block
    found = {}
    for name, tensor in unet.state_dict().items():
        where, _, rest = name.partition("resnets.")
        if rest:
            number, _, rest = rest.partition(".")
            rest = renamed({rest: tensor}, RESNET).popitem()[0]
            name = f"{where}resnets.{number}.{rest}"  # noqa: PLW2901
        match = re.match(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.*)", name)
        if match is not None:
            side, block, what, layer, rest = match.groups()
            each = layers + 1
            if side == "down":
                at = int(block) * each + 1 + (layers if what == "downsamplers" else int(layer))
                inner = {"resnets": "0.", "attentions": "1.", "downsamplers": "0."}[what]
                name = f"input_blocks.{at}.{inner}{rest.replace('conv.', 'op.') if what == 'downsamplers' else rest}"  # noqa: PLW2901
            else:
                at = int(block) * each + (layers if what == "upsamplers" else int(layer))
                has_attention = hasattr(unet.up_blocks[int(block)], "attentions")
                after = "2." if has_attention else "1."
                inner = {"resnets": "0.", "attentions": "1.", "upsamplers": after}[what]
                name = f"output_blocks.{at}.{inner}{rest}"  # noqa: PLW2901
        found[name] = tensor
    rules = {
        r"^mid_block\.resnets\.0\.": "middle_block.0.",
        r"^mid_block\.attentions\.0\.": "middle_block.1.",
        r"^mid_block\.resnets\.1\.": "middle_block.2.",
        r"^time_embedding\.linear_1\.": "time_embed.0.",
        r"^time_embedding\.linear_2\.": "time_embed.2.",
        r"^add_embedding\.linear_1\.": "label_emb.0.0.",
        r"^add_embedding\.linear_2\.": "label_emb.0.2.",
        r"^conv_in\.": "input_blocks.0.0.",
        r"^conv_norm_out\.": "out.0.",
        r"^conv_out\.": "out.2.",
    }
    return prefixed(PREFIX, renamed(found, rules))


def ldm_vae(vae: Any) -> Tensors:
    last = len(vae.config.block_out_channels) - 1
    rules = {
        r"down_blocks\.(\d+)\.resnets\.": r"down.\1.block.",
        r"down_blocks\.(\d+)\.downsamplers\.0\.": r"down.\1.downsample.",
        r"mid_block\.resnets\.0\.": "mid.block_1.",
        r"mid_block\.resnets\.1\.": "mid.block_2.",
        r"mid_block\.attentions\.0\.group_norm": "mid.attn_1.norm",
        r"mid_block\.attentions\.0\.to_out\.0": "mid.attn_1.proj_out",
        r"mid_block\.attentions\.0\.to_": "mid.attn_1.",
        r"conv_norm_out\.": "norm_out.",
        r"conv_shortcut": "nin_shortcut",
    }
    for block in range(last + 1):
        rules[rf"up_blocks\.{block}\.resnets\."] = f"up.{last - block}.block."
        rules[rf"up_blocks\.{block}\.upsamplers\.0\."] = f"up.{last - block}.upsample."
    found = renamed(vae.state_dict(), rules)
    as_convolution = r"mid\.attn_1\.(q|k|v|proj_out)\.weight"
    found = {
        name: tensor[..., None, None] if re.search(as_convolution, name) else tensor for name, tensor in found.items()
    }
    return prefixed("first_stage_model.", found)


def clip(prefix: str, text: Any) -> Tensors:
    state = text.state_dict()
    wrapped = any(name.startswith("text_model.") for name in state)
    return prefixed(prefix if wrapped else f"{prefix}text_model.", state)


def open_clip(prefix: str, text: Any) -> Tensors:
    state = {name.removeprefix("text_model."): tensor for name, tensor in text.state_dict().items()}
    rules = {
        r"^encoder\.layers\.": "transformer.resblocks.",
        r"layer_norm(\d)": r"ln_\1",
        r"\.fc1\.": ".c_fc.",
        r"\.fc2\.": ".c_proj.",
        r"\.self_attn": ".attn",
        r"^embeddings\.position_embedding\.weight": "positional_embedding",
        r"^embeddings\.": "",
        r"^final_layer_norm": "ln_final",
        r"^text_projection\.weight": "text_projection",
    }
    found = renamed(state, rules)
    if "text_projection" in found:
        found["text_projection"] = found["text_projection"].T
    for name in [name for name in found if ".attn.q_proj." in name]:
        parts = [found.pop(name.replace("q_proj", f"{one}_proj")) for one in "qkv"]
        found[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    return prefixed(prefix, found)


def fused(found: Tensors, into: str, *parts: str) -> None:
    """Makes one tensor of several."""
    for kind in ("weight", "bias"):
        found[f"{into}.{kind}"] = torch.cat([found.pop(f"{part}.{kind}") for part in parts])


def swapped(found: Tensors, name: str) -> None:
    """Shift before scale."""
    for kind in ("weight", "bias"):
        scale, shift = found[f"{name}.{kind}"].chunk(2)
        found[f"{name}.{kind}"] = torch.cat([shift, scale])


def original_sd3(transformer: Any) -> Tensors:
    found = dict(transformer.state_dict())
    layers = len(transformer.transformer_blocks)
    for layer in range(layers):
        block = f"transformer_blocks.{layer}"
        fused(found, f"{block}.attn.qkv", *(f"{block}.attn.to_{one}" for one in "qkv"))
        fused(found, f"{block}.attn.context_qkv", *(f"{block}.attn.add_{one}_proj" for one in "qkv"))
    swapped(found, f"transformer_blocks.{layers - 1}.norm1_context.linear")
    swapped(found, "norm_out.linear")
    rules = {
        r"^transformer_blocks\.": "joint_blocks.",
        r"\.attn\.qkv": ".x_block.attn.qkv",
        r"\.attn\.context_qkv": ".context_block.attn.qkv",
        r"\.attn\.norm_added_(.)\.": r".context_block.attn.ln_\1.",
        r"\.attn\.norm_(.)\.": r".x_block.attn.ln_\1.",
        r"\.attn\.to_out\.0\.": ".x_block.attn.proj.",
        r"\.attn\.to_add_out\.": ".context_block.attn.proj.",
        r"\.norm1\.linear\.": ".x_block.adaLN_modulation.1.",
        r"\.norm1_context\.linear\.": ".context_block.adaLN_modulation.1.",
        r"\.ff\.net\.0\.proj\.": ".x_block.mlp.fc1.",
        r"\.ff\.net\.2\.": ".x_block.mlp.fc2.",
        r"\.ff_context\.net\.0\.proj\.": ".context_block.mlp.fc1.",
        r"\.ff_context\.net\.2\.": ".context_block.mlp.fc2.",
        r"^pos_embed\.pos_embed": "pos_embed",
        r"^pos_embed\.proj": "x_embedder.proj",
        r"^time_text_embed\.timestep_embedder\.linear_1": "t_embedder.mlp.0",
        r"^time_text_embed\.timestep_embedder\.linear_2": "t_embedder.mlp.2",
        r"^time_text_embed\.text_embedder\.linear_1": "y_embedder.mlp.0",
        r"^time_text_embed\.text_embedder\.linear_2": "y_embedder.mlp.2",
        r"^proj_out": "final_layer.linear",
        r"^norm_out\.linear": "final_layer.adaLN_modulation.1",
    }
    return prefixed(PREFIX, renamed(found, rules))


def original_flux(transformer: Any, prefix: str = PREFIX) -> Tensors:
    found = dict(transformer.state_dict())
    for layer in range(len(transformer.transformer_blocks)):
        block = f"transformer_blocks.{layer}"
        fused(found, f"{block}.img_attn.qkv", *(f"{block}.attn.to_{one}" for one in "qkv"))
        fused(found, f"{block}.txt_attn.qkv", *(f"{block}.attn.add_{one}_proj" for one in "qkv"))
    for layer in range(len(transformer.single_transformer_blocks)):
        block = f"single_transformer_blocks.{layer}"
        fused(found, f"{block}.linear1", *(f"{block}.attn.to_{one}" for one in "qkv"), f"{block}.proj_mlp")
    swapped(found, "norm_out.linear")
    rules = {
        r"^(single_transformer_blocks\.\d+)\.attn\.norm_q\.weight": r"\1.norm.query_norm.scale",
        r"^(single_transformer_blocks\.\d+)\.attn\.norm_k\.weight": r"\1.norm.key_norm.scale",
        r"^(single_transformer_blocks\.\d+)\.norm\.linear": r"\1.modulation.lin",
        r"^(single_transformer_blocks\.\d+)\.proj_out": r"\1.linear2",
        r"\.attn\.norm_added_q\.weight": ".txt_attn.norm.query_norm.scale",
        r"\.attn\.norm_added_k\.weight": ".txt_attn.norm.key_norm.scale",
        r"\.attn\.norm_q\.weight": ".img_attn.norm.query_norm.scale",
        r"\.attn\.norm_k\.weight": ".img_attn.norm.key_norm.scale",
        r"\.attn\.to_out\.0\.": ".img_attn.proj.",
        r"\.attn\.to_add_out\.": ".txt_attn.proj.",
        r"\.norm1\.linear\.": ".img_mod.lin.",
        r"\.norm1_context\.linear\.": ".txt_mod.lin.",
        r"\.ff\.net\.0\.proj\.": ".img_mlp.0.",
        r"\.ff\.net\.2\.": ".img_mlp.2.",
        r"\.ff_context\.net\.0\.proj\.": ".txt_mlp.0.",
        r"\.ff_context\.net\.2\.": ".txt_mlp.2.",
        r"^single_transformer_blocks\.": "single_blocks.",
        r"^transformer_blocks\.": "double_blocks.",
        r"^time_text_embed\.timestep_embedder\.linear_1": "time_in.in_layer",
        r"^time_text_embed\.timestep_embedder\.linear_2": "time_in.out_layer",
        r"^time_text_embed\.text_embedder\.linear_1": "vector_in.in_layer",
        r"^time_text_embed\.text_embedder\.linear_2": "vector_in.out_layer",
        r"^time_text_embed\.guidance_embedder\.linear_1": "guidance_in.in_layer",
        r"^time_text_embed\.guidance_embedder\.linear_2": "guidance_in.out_layer",
        r"^context_embedder": "txt_in",
        r"^x_embedder": "img_in",
        r"^proj_out": "final_layer.linear",
        r"^norm_out\.linear": "final_layer.adaLN_modulation.1",
    }
    return prefixed(prefix, renamed(found, rules))


# Models


def _vae(channels: int = 4) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=16,
    )


def _text(width: int = 16, layers: int = 2, cls: Any = None, **more: Any) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=99,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
        **more,
    )
    return (cls or transformers.CLIPTextModel)(config)


def _t5(width: int = 16) -> Any:
    sizes = {"d_model": width, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 99}
    return transformers.T5EncoderModel(transformers.T5Config(**sizes, feed_forward_proj="gated-gelu"))


def _tokenizer(root: Path) -> Any:
    root.mkdir(parents=True, exist_ok=True)
    words = [
        "<|startoftext|>",
        "<|endoftext|>",
        *(chr(97 + n) for n in range(26)),
        *(f"{chr(97 + n)}</w>" for n in range(26)),
    ]
    (root / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (root / "merges.txt").write_text("#version: 0.2\n")
    return transformers.CLIPTokenizer(str(root / "vocab.json"), str(root / "merges.txt"), model_max_length=77)


def _unet(width: int, down: str, layers: int, **more: Any) -> Any:
    """With attention (``"a"``) in these blocks, and none (``"-"``) in those."""
    attention = tuple("CrossAttnDownBlock2D" if one == "a" else "DownBlock2D" for one in down)
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, *(16,) * (len(down) - 1)),
        layers_per_block=layers,
        norm_num_groups=4,
        down_block_types=attention,
        up_block_types=tuple(one.replace("Down", "Up") for one in reversed(attention)),
        attention_head_dim=4,
        cross_attention_dim=width,
        **more,
    )


def sd1(root: Path) -> Model:
    parts = {"unet": _unet(16, "aaa-", 2), "vae": _vae(), "text_encoder": _text()}
    for part in parts.values():
        randomise(part)
    pipeline = diffusers.StableDiffusionPipeline(
        **parts,
        tokenizer=_tokenizer(root / "tokenizer"),
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    tensors = (
        ldm_unet(parts["unet"]) | ldm_vae(parts["vae"]) | clip("cond_stage_model.transformer.", parts["text_encoder"])
    )
    return Model("v1", pipeline, tensors)


def sd2(root: Path) -> Model:
    # Its width tells it from version 1.
    unet = _unet(1024, "aa-", 2, use_linear_projection=True)
    parts = {"unet": unet, "vae": _vae(), "text_encoder": _text(1024, 1)}
    for part in parts.values():
        randomise(part)
    pipeline = diffusers.StableDiffusionPipeline(
        **parts,
        tokenizer=_tokenizer(root / "tokenizer"),
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    tensors = ldm_unet(unet) | ldm_vae(parts["vae"]) | open_clip("cond_stage_model.model.", parts["text_encoder"])
    # Of a layer that diffusers leaves out.
    tensors["cond_stage_model.model.transformer.resblocks.23.ln_1.bias"] = torch.zeros(1024)
    return Model("v2", pipeline, tensors)


def sdxl(root: Path) -> Model:
    projected = transformers.CLIPTextModelWithProjection
    unet = _unet(
        16 + 24,
        "-aa",
        2,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 24,
        transformer_layers_per_block=(1, 1, 2),
    )
    second = _text(24, 10, projected, projection_dim=24, hidden_act="gelu")
    parts = {"unet": unet, "vae": _vae(), "text_encoder": _text(), "text_encoder_2": second}
    for part in parts.values():
        randomise(part)
    pipeline = diffusers.StableDiffusionXLPipeline(
        **parts,
        tokenizer=_tokenizer(root / "tokenizer"),
        tokenizer_2=_tokenizer(root / "tokenizer_2"),
        scheduler=diffusers.EulerDiscreteScheduler(),
    )
    tensors = (
        ldm_unet(unet)
        | ldm_vae(parts["vae"])
        | clip("conditioner.embedders.0.transformer.", parts["text_encoder"])
        | open_clip("conditioner.embedders.1.model.", second)
    )
    return Model("xl_base", pipeline, tensors)


def sd3(root: Path) -> Model:
    """Stable Diffusion 3.5 Large, which its number of layers tells from others."""
    projected = transformers.CLIPTextModelWithProjection
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=38,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=40,
        caption_projection_dim=16,
        pooled_projection_dim=16 + 24,
        out_channels=4,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    parts = {
        "transformer": transformer,
        "vae": _vae(),
        "text_encoder": _text(cls=projected, projection_dim=16),
        "text_encoder_2": _text(24, 2, projected, projection_dim=24),
        "text_encoder_3": _t5(40),
    }
    for part in parts.values():
        randomise(part)
    # What no file of this kind has, and diffusers puts there.
    parts["text_encoder"].text_projection.weight.data = torch.eye(16)
    pipeline = diffusers.StableDiffusion3Pipeline(
        **parts,
        **{f"tokenizer{number}": _tokenizer(root / f"tokenizer{number}") for number in ("", "_2")},
        tokenizer_3=_tokenizer(root / "tokenizer_3"),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )
    first = clip("text_encoders.clip_l.transformer.", parts["text_encoder"])
    del first["text_encoders.clip_l.transformer.text_projection.weight"]
    tensors = (
        original_sd3(transformer)
        | ldm_vae(parts["vae"])
        | first
        | clip("text_encoders.clip_g.transformer.", parts["text_encoder_2"])
        | prefixed("text_encoders.t5xxl.transformer.", dict(parts["text_encoder_3"].state_dict()))
    )
    return Model("sd35_large", pipeline, tensors)


FLUX_WIDTH = 16
"""In the place of the 3072 that diffusers' conversion counts on."""


def flux(root: Path, *, guidance: bool = True) -> Model:
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        guidance_embeds=guidance,
        axes_dims_rope=(2, 2, 4),
    )
    parts = {"transformer": transformer, "vae": _vae(), "text_encoder": _text(), "text_encoder_2": _t5()}
    for part in parts.values():
        randomise(part)
    pipeline = diffusers.FluxPipeline(
        **parts,
        tokenizer=_tokenizer(root / "tokenizer"),
        tokenizer_2=_tokenizer(root / "tokenizer_2"),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )
    tensors = (
        original_flux(transformer)
        | ldm_vae(parts["vae"])
        | clip("text_encoders.clip_l.transformer.", parts["text_encoder"])
        | prefixed("text_encoders.t5xxl.transformer.", dict(parts["text_encoder_2"].state_dict()))
    )
    return Model("flux-dev" if guidance else "flux-schnell", pipeline, tensors)


def schnell(root: Path) -> Model:
    return flux(root, guidance=False)


ALL = (sd1, sd2, sdxl, sd3, flux, schnell)
