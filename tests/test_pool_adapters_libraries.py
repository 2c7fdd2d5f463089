"""Adapters of a pool beside peft's and diffusers' own: the same files give the same weights, and the same images.

Where adapters are in fp32, as peft keeps them by default, weights are equal to the bit: both work the product out in
fp32, scale it, and add it with one rounding for each adapter. Convolutions of more than one pixel are summed in another
order by ``conv2d``, which peft uses for their product: they differ by a unit in the last place.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("accelerate")
safetensors_torch = pytest.importorskip("safetensors.torch")

import penstock
from pool_books import check_books
from test_engine_diffusers import image, text_encoder, tokenizer, unet, vae
from test_engine_peft import LAYERS, base, logits
from tiny_models import QUIET, randomise

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings(*QUIET)]
SIZES = {"host_budget": "64MiB", "device_budget": "64MiB"}


def trained(model: Any, config: Any, seed: int = 5, adapter: str = "default") -> Any:
    """A model with a LoRA whose matrices are random."""
    made = peft.get_peft_model(model, config, adapter_name=adapter)
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1
    return made


CONFIGS: dict[str, dict[str, Any]] = {
    "alpha": {"r": 4, "lora_alpha": 12},
    "rslora": {"r": 4, "lora_alpha": 12, "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 12,
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 8},
        "alpha_pattern": {"v_proj": 3, r"layers\.0\..*q_proj": 5},
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_merged_weights_are_those_of_merge_and_unload(tmp_path: Path, kind: str, dtype: Any) -> None:
    config = peft.LoraConfig(**CONFIGS[kind], target_modules=LAYERS, task_type="CAUSAL_LM")
    trained(base(dtype), config).save_pretrained(tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(base(dtype), tmp_path / "a").merge_and_unload()
    with penstock.ModelPool("cpu", **SIZES) as pool:
        pool.adopt("m", base(dtype))
        pool.load_adapter("m", tmp_path / "a")
        pool.set_adapters("m", ["a"], merge=True)
        with pool.use("m") as model:
            ours = model["model"].state_dict()
            for name, tensor in theirs.state_dict().items():
                assert torch.equal(ours[name], tensor), name
            assert torch.equal(logits(model["model"]), logits(theirs))
        check_books(pool)


def test_several_with_weights_are_those_of_peft(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        config = peft.LoraConfig(r=4 + seed, lora_alpha=12, target_modules=LAYERS)
        trained(base(torch.bfloat16), config, seed).save_pretrained(tmp_path / name)
    theirs = peft.PeftModel.from_pretrained(base(torch.bfloat16), tmp_path / "a", adapter_name="a")
    theirs.load_adapter(tmp_path / "b", "b")
    theirs.base_model.set_adapter(["a", "b"])
    for layer in theirs.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.set_scale("a", 0.7)
            layer.set_scale("b", -1.3)
    with penstock.ModelPool("cpu", **SIZES) as pool:
        pool.adopt("m", base(torch.bfloat16))
        for name in "ab":
            pool.load_adapter("m", tmp_path / name)
        pool.set_adapters("m", {"a": 0.7, "b": -1.3})
        with pool.use("m") as model:
            # Both add branches in the adapters' precision, one after the other: equal to the bit.
            assert torch.equal(logits(model["model"]), logits(theirs))
            pool.set_adapters("m", {"a": 0.7, "b": -1.3}, merge=True)
            theirs = theirs.merge_and_unload()
            for name, tensor in theirs.state_dict().items():
                assert torch.equal(model["model"].state_dict()[name], tensor), name
        check_books(pool)


def test_convolutions_are_those_of_peft(tmp_path: Path) -> None:
    from pool_adapters import SHAPES, inputs, net

    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=list(SHAPES))
    trained(net(), config).save_pretrained(tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(net(), tmp_path / "a")
    with penstock.ModelPool("cpu", **SIZES) as pool, torch.no_grad():
        pool.adopt("m", net())
        pool.load_adapter("m", tmp_path / "a")
        pool.set_adapters("m", ["a"])
        with pool.use("m") as model:
            for one, other in zip(model["model"](*inputs()), theirs(*inputs()), strict=True):
                assert torch.equal(one, other)
            pool.set_adapters("m", ["a"], merge=True)
            merged = theirs.merge_and_unload().state_dict()
            for name, tensor in model["model"].state_dict().items():
                assert torch.equal(tensor, merged[name]) or name == "conv.weight", name
            # A unit in the last place of numbers below 1.
            torch.testing.assert_close(model["model"].conv.weight, merged["conv.weight"], rtol=0, atol=2**-24)


# diffusers


@pytest.fixture
def pipeline(tmp_path: Path) -> Any:
    return diffusers.StableDiffusionPipeline(
        unet=randomise(unet()),
        vae=randomise(vae()),
        text_encoder=randomise(text_encoder()),
        tokenizer=tokenizer(tmp_path / "tokenizer"),
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


UNET = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "ff.net.0.proj", "conv1"]
TEXT = ["q_proj", "out_proj", "fc1"]


def layers_of(pipeline: Any, seed: int = 5, **settings: Any) -> dict[str, dict[str, Any]]:
    """LoRA of both networks, in peft's names."""
    found = {}
    for of, targets in (("unet", UNET), ("text_encoder", TEXT)):
        config = peft.LoraConfig(r=4, target_modules=targets, **settings)
        made = trained(copy.deepcopy(getattr(pipeline, of)), config, seed)
        state = peft.get_peft_model_state_dict(made)
        found[of] = {name.removeprefix("base_model.model."): tensor.contiguous() for name, tensor in state.items()}
    return found


def in_diffusers_names(pipeline: Any, path: Path, seed: int = 5, *, alpha: int | None = None) -> Path:
    settings = {} if alpha is None else {"lora_alpha": alpha}
    layers = layers_of(pipeline, seed, **settings)
    metadata = {}
    if alpha is not None:
        metadata = {
            f"{of}_lora_adapter_metadata": {"r": 4, "lora_alpha": alpha, "target_modules": targets}
            for of, targets in (("unet", UNET), ("text_encoder", TEXT))
        }
    pipeline.save_lora_weights(
        path,
        unet_lora_layers=layers["unet"],
        text_encoder_lora_layers=layers["text_encoder"],
        weight_name=f"{path.name}.safetensors",
        **metadata,
    )
    return path / f"{path.name}.safetensors"


def in_kohya_names(pipeline: Any, path: Path, alpha: float) -> Path:
    """As kohya's trainer writes SD 1.x, whose layers have diffusers' names."""
    tensors = {}
    for of, prefix in (("unet", "lora_unet_"), ("text_encoder", "lora_te_")):
        for name, tensor in layers_of(pipeline)[of].items():
            layer, _, half = name.partition(".lora_")
            if of == "text_encoder" and not layer.startswith("text_model."):
                layer = f"text_model.{layer}"
            flat = prefix + layer.replace(".", "_")
            tensors[f"{flat}.lora_{'down' if half.startswith('A') else 'up'}.weight"] = tensor
            tensors[f"{flat}.alpha"] = torch.tensor(alpha)
    path.mkdir()
    safetensors_torch.save_file(tensors, path / f"{path.name}.safetensors")
    return path / f"{path.name}.safetensors"


FORMATS: dict[str, Any] = {
    "diffusers": in_diffusers_names,
    "diffusers with alpha": lambda pipeline, path: in_diffusers_names(pipeline, path, alpha=6),
    "kohya": lambda pipeline, path: in_kohya_names(pipeline, path, alpha=3.0),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_pipelines_are_those_that_diffusers_makes_of_the_same_file(pipeline: Any, tmp_path: Path, kind: str) -> None:
    file = FORMATS[kind](pipeline, tmp_path / "a")
    theirs = copy.deepcopy(pipeline)
    plain = image(theirs)
    theirs.load_lora_weights(file.parent, weight_name=file.name, adapter_name="a")
    theirs.set_adapters(["a"], [0.8])
    beside = image(theirs)
    theirs.fuse_lora(adapter_names=["a"])
    theirs.unload_lora_weights()
    with penstock.ModelPool("cpu", **SIZES) as pool:
        pool.adopt("m", pipeline)
        pool.load_adapter("m", file)
        pool.set_adapters("m", {"a": 0.8}, merge=True)
        with pool.use("m") as model:
            for of in ("unet", "text_encoder"):
                fused = getattr(theirs, of).state_dict()
                for name, tensor in model[of].state_dict().items():
                    # Convolutions of nine pixels are summed in another order: a unit in the last place.
                    assert torch.equal(tensor, fused[name]) or tensor.shape[-1:] == (3,), name
                    torch.testing.assert_close(tensor, fused[name], rtol=0, atol=2**-22)
            torch.testing.assert_close(image(model.wait()), image(theirs), rtol=1e-4, atol=1e-4)
        check_books(pool)
        pool.set_adapters("m", {"a": 0.8})
        with pool.use("m") as model:
            assert torch.equal(image(model.wait()), beside)
        pool.set_adapters("m")
        with pool.use("m") as model:
            assert torch.equal(image(model.wait()), plain)
        check_books(pool)


def test_registered_components_are_enough(pipeline: Any, tmp_path: Path) -> None:
    pipeline.save_pretrained(tmp_path / "m")
    files = [in_diffusers_names(pipeline, tmp_path / "a"), in_kohya_names(pipeline, tmp_path / "k", 4.0)]
    parts = {"unet": unet, "text_encoder": text_encoder}
    with penstock.ModelPool("cpu", **SIZES) as pool:
        pool.register("m", {part: tmp_path / "m" / part for part in parts}, build=parts)
        found = []
        for file in files:
            name = pool.load_adapter("m", file)
            pool.set_adapters("m", [name], merge=True)
            with pool.use("m") as model:
                found.append({part: {k: v.clone() for k, v in model[part].state_dict().items()} for part in parts})
        for part in parts:
            for name, tensor in found[0][part].items():
                assert torch.equal(tensor, found[1][part][name]), (part, name)
        # Without its text encoder, a part of the file has no layers.
        pool.register("n", {"unet": tmp_path / "m" / "unet"}, build={"unet": unet})
        for name, file in zip("ak", files, strict=True):
            pool.load_adapter("n", file, name=name)
            with pytest.raises(penstock.AdapterError, match="strict=False"):
                pool.set_adapters("n", [name])
            pool.load_adapter("n", file, name=f"{name}2", strict=False)
            pool.set_adapters("n", [f"{name}2"])
        check_books(pool)


def test_names_of_sdxls_trainers_are_converted(tmp_path: Path) -> None:
    """Blocks under the numbers of the original UNet, which only diffusers' converter knows."""
    made = diffusers.UNet2DConditionModel(
        block_out_channels=(4, 8),
        layers_per_block=2,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        norm_num_groups=2,
        attention_head_dim=2,
        transformer_layers_per_block=(1, 1),
        use_linear_projection=True,
    )
    layer = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    weight = made.get_submodule(layer).weight.detach().clone()
    down, up = torch.randn(2, 8), torch.randn(8, 2)
    flat = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    tensors = {f"{flat}.lora_down.weight": down, f"{flat}.lora_up.weight": up, f"{flat}.alpha": torch.tensor(1.0)}
    safetensors_torch.save_file(tensors, tmp_path / "a.safetensors")
    strange = {key.replace("input_blocks_4_1", "input_blocks_9_1"): tensor for key, tensor in tensors.items()}
    safetensors_torch.save_file(strange, tmp_path / "b.safetensors")
    with penstock.ModelPool("cpu", **SIZES) as pool:
        pool.adopt("m", made)
        for name in "ab":
            pool.load_adapter("m", tmp_path / f"{name}.safetensors")
        pool.set_adapters("m", ["a"], merge=True)
        with pool.use("m") as model:
            assert torch.equal(model["model"].get_submodule(layer).weight, weight + (up @ down) * 0.5)
        with pytest.raises(penstock.AdapterError, match="another architecture"):
            pool.set_adapters("m", ["b"], merge=True)
        check_books(pool)
