"""diffusers: pipelines and models are what its own loaders make of the same files."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import penstock
from conftest import Remains

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from penstock.integrations.diffusers import arguments, from_pretrained
from penstock.integrations.diffusers import pipelines as engine
from tiny_models import QUIET, assert_same_model, bits, randomise

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings(*QUIET)]
DTYPE = arguments.dtype_keyword()


def unet() -> Any:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(4, 8),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        norm_num_groups=2,
        attention_head_dim=2,
    )


def vae() -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(4, 8),
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=4,
        norm_num_groups=2,
        sample_size=16,
    )


def wan() -> Any:
    # Keeps some of its layers in fp32 whatever the model's dtype.
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip


def text_encoder() -> Any:
    return transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=8,
            max_position_embeddings=12, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


PICKLED = {
    "model": "pytorch_model.bin",
    "diffusion_pytorch_model": "diffusion_pytorch_model.bin",
}
MODELS = {"unet": unet, "vae": vae, "wan": wan}


def tokenizer(path: Path) -> Any:
    words = ["<|startoftext|>", "<|endoftext|>", "a</w>", "b</w>", "c</w>", "a", "b", "c"]
    path.mkdir()
    (path / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (path / "merges.txt").write_text("#version: 0.2\n")
    return transformers.CLIPTokenizer(str(path / "vocab.json"), str(path / "merges.txt"), model_max_length=12)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole pipeline on disk: two models of diffusers, one of transformers, a tokenizer and a scheduler."""
    root = tmp_path_factory.mktemp("pipeline")
    made = diffusers.StableDiffusionPipeline(
        vae=randomise(vae()),
        text_encoder=randomise(text_encoder()),
        tokenizer=tokenizer(root / "tokenizer"),
        unet=randomise(unet()),
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    # In this order, because text encoders are saved with their dtype, which counts where none is asked for.
    made.to(torch.float16).save_pretrained(root / "sd", variant="fp16")
    made.to(torch.float32)
    for part in (made.vae, made.unet, made.text_encoder):
        randomise(part)
    made.save_pretrained(root / "sd")
    return root / "sd"


def image(made: Any) -> torch.Tensor:
    made.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return made("a b", num_inference_steps=2, generator=generator, height=16, width=16, output_type="pt").images


def assert_same_pipeline(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    assert ours.components.keys() == theirs.components.keys()
    for name, component in theirs.components.items():
        if isinstance(component, torch.nn.Module):
            assert_same_model(ours.components[name], component)
        else:
            assert type(ours.components[name]) is type(component), name
    assert dict(ours.config) == dict(theirs.config)


def test_a_path_with_an_at_sign_is_the_pipelines_name_as_it_was_written(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("runs", "2026-11-23T06:20@main")
    path.parent.mkdir()
    path.symlink_to(pipeline)
    loaded = from_pretrained(diffusers.StableDiffusionPipeline, str(path))
    assert loaded.config._name_or_path == loaded.name_or_path == str(path)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("cls", ["StableDiffusionPipeline", "DiffusionPipeline", "AutoPipelineForText2Image"])
def test_a_pipeline_is_what_diffusers_makes_of_it(pipeline: Path, cls: str, dtype: Any) -> None:
    cls = getattr(diffusers, cls)
    theirs = cls.from_pretrained(str(pipeline), **{DTYPE: dtype})
    ours = from_pretrained(cls, pipeline, dtype=dtype)
    assert_same_pipeline(ours, theirs)
    assert ours.unet.config._name_or_path == theirs.unet.config._name_or_path
    if dtype is None:
        assert torch.equal(image(ours), image(theirs))


def test_variants_and_dtypes_by_component(pipeline: Path) -> None:
    dtypes = {"unet": torch.bfloat16, "default": torch.float16}
    theirs = diffusers.DiffusionPipeline.from_pretrained(str(pipeline), variant="fp16", **{DTYPE: dtypes})
    ours = from_pretrained(diffusers.DiffusionPipeline, pipeline, variant="fp16", dtype=dtypes)
    assert_same_pipeline(ours, theirs)
    assert (ours.unet.dtype, ours.vae.dtype, ours.text_encoder.dtype) == (torch.bfloat16, torch.float16, torch.float16)


def test_components_that_exist_are_used_and_none_leaves_one_out(pipeline: Path) -> None:
    mine = randomise(unet())
    ours = from_pretrained(diffusers.StableDiffusionPipeline, pipeline, unet=mine, vae=None)
    assert ours.unet is mine
    assert ours.vae is None


def test_the_pipelines_bytes_are_told_as_one_and_nothing_remains(pipeline: Path) -> None:
    before, threads = Remains.now(), threading.active_count()
    seen: list[tuple[int, int]] = []
    from_pretrained(diffusers.DiffusionPipeline, pipeline, progress=lambda done, total: seen.append((done, total)))
    parts = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "text_encoder": "model"}
    total = sum(penstock.open(pipeline / part / f"{stem}.safetensors").nbytes for part, stem in parts.items())
    assert seen[-1] == (total, total)
    assert Remains.now() == before
    # transformers ends its own threads without waiting for them.
    assert threading.active_count() <= threads + 4


@pytest.mark.parametrize("part", ["unet", "text_encoder"])
def test_one_component_that_fails_ends_the_others(pipeline: Path, tmp_path: Path, part: str) -> None:
    broken = shutil.copytree(pipeline, tmp_path / "sd")
    (file,) = [f for f in (broken / part).glob("*.safetensors") if "fp16" not in f.name]
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 4)
    with pytest.raises(penstock.PenstockError, match=f"{part}.*{file.name}"):
        from_pretrained(diffusers.DiffusionPipeline, broken)


def test_a_component_that_is_not_there_is_told_of_as_by_diffusers(pipeline: Path, tmp_path: Path) -> None:
    shutil.copytree(pipeline, tmp_path / "p")
    shutil.rmtree(tmp_path / "p" / "unet")
    with pytest.raises(OSError, match=r"no file named config\.json") as theirs:
        diffusers.DiffusionPipeline.from_pretrained(str(tmp_path / "p"))
    with pytest.raises(OSError, match=r"no file named config\.json") as ours:
        from_pretrained(diffusers.DiffusionPipeline, tmp_path / "p")
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("index", ["index.fp16.json", "fp16.index.json"])  # as diffusers writes it, and once did
def test_variants_in_shards(pipeline: Path, tmp_path: Path, index: str) -> None:
    made = diffusers.DiffusionPipeline.from_pretrained(str(pipeline), **{DTYPE: torch.float16})
    made.save_pretrained(tmp_path / "p", variant="fp16", max_shard_size="10KB")
    encoder = tmp_path / "p" / "text_encoder"
    shutil.rmtree(encoder)
    made.text_encoder.save_pretrained(encoder, variant="fp16", max_shard_size="1KB")
    assert (tmp_path / "p" / "unet" / "diffusion_pytorch_model.safetensors.index.fp16.json").is_file()
    assert (encoder / "model.safetensors.index.fp16.json").is_file()
    assert not list((tmp_path / "p").rglob("*.safetensors.index.json"))
    for folder in ("unet", "vae"):
        (written,) = (tmp_path / "p" / folder).glob("*.index.*")
        written.rename(written.with_name(f"diffusion_pytorch_model.safetensors.{index}"))
    options = {"variant": "fp16", DTYPE: torch.float16}
    theirs = diffusers.DiffusionPipeline.from_pretrained(str(tmp_path / "p"), **options)
    ours = from_pretrained(diffusers.DiffusionPipeline, tmp_path / "p", variant="fp16", dtype=torch.float16)
    assert_same_pipeline(ours, theirs)


def test_what_is_no_pipeline_says_so(tmp_path: Path) -> None:
    with pytest.raises(penstock.LocationNotFoundError, match="model_index"):
        from_pretrained(diffusers.DiffusionPipeline, tmp_path)
    with pytest.raises(penstock.LocationNotFoundError, match="no such directory"):
        from_pretrained(diffusers.DiffusionPipeline, tmp_path / "absent")


def test_pickled_weights_are_left_to_diffusers(pipeline: Path, tmp_path: Path) -> None:
    old = shutil.copytree(pipeline, tmp_path / "sd")
    for file in (old / "vae").glob("*.safetensors"):
        if "fp16" not in file.name:
            torch.save(penstock.load_file(file), file.with_suffix(".bin"))
        file.unlink()
    theirs = diffusers.DiffusionPipeline.from_pretrained(str(old))
    assert_same_pipeline(from_pretrained(diffusers.DiffusionPipeline, old), theirs)


# ---- models


@pytest.mark.parametrize("files", ["one file", "sharded"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_what_diffusers_makes_of_it(tmp_path: Path, kind: str, wanted: Any, stored: Any, files: str) -> None:
    cls = type(MODELS[kind]())
    size = "10KB" if files == "sharded" else "5GB"
    randomise(MODELS[kind]()).to(stored).save_pretrained(tmp_path / "m", max_shard_size=size)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == 1 or files == "sharded"
    theirs = cls.from_pretrained(str(tmp_path / "m"), **({} if wanted is None else {DTYPE: wanted}))
    ours = from_pretrained(cls, tmp_path / "m", dtype=wanted)
    assert_same_model(ours, theirs)
    assert dict(ours.config) == dict(theirs.config)


def test_names_of_old_checkpoints_are_understood(tmp_path: Path) -> None:
    randomise(vae()).save_pretrained(tmp_path / "m")
    file = tmp_path / "m" / "diffusion_pytorch_model.safetensors"
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = {}
    for name, tensor in penstock.load_file(file).items():
        renamed = name
        for new, before in old.items():
            renamed = renamed.replace(f"attentions.0.{new}.", f"attentions.0.{before}.")
        state[renamed] = tensor
    assert "encoder.mid_block.attentions.0.query.weight" in state
    penstock.save_file(state, file)
    theirs = diffusers.AutoencoderKL.from_pretrained(str(tmp_path / "m"))
    assert_same_model(from_pretrained(diffusers.AutoencoderKL, tmp_path / "m"), theirs)


def test_configurations_can_be_overridden_and_subfolders_named(pipeline: Path) -> None:
    ours = from_pretrained(diffusers.AutoencoderKL, pipeline, subfolder="vae", scaling_factor=0.5)
    assert ours.config.scaling_factor == 0.5
    assert_same_model(ours, diffusers.AutoencoderKL.from_pretrained(pipeline, subfolder="vae", scaling_factor=0.5))


def test_a_model_without_the_variant_is_not_loaded_without_it(tmp_path: Path) -> None:
    randomise(unet()).save_pretrained(tmp_path)
    for load in (diffusers.UNet2DConditionModel.from_pretrained, from_pretrained):
        arguments = () if load is not from_pretrained else (diffusers.UNet2DConditionModel,)
        with pytest.raises(OSError, match=r"\.fp16\."):
            load(*arguments, tmp_path, variant="fp16")


def test_pickles_that_are_asked_for_are_left_to_diffusers(pipeline: Path, tmp_path: Path) -> None:
    path = tmp_path / "sd"
    shutil.copytree(pipeline, path)
    other = randomise(unet())
    torch.save(other.state_dict(), path / "unet" / "diffusion_pytorch_model.bin")
    ours = from_pretrained(diffusers.UNet2DConditionModel, path / "unet", use_safetensors=False)
    assert torch.equal(ours.conv_in.weight, other.conv_in.weight)
    for part in ("vae", "text_encoder"):
        for file in (path / part).glob("*model.safetensors"):
            torch.save(penstock.open(file).load(), file.with_name(PICKLED[file.stem]))
    assembled = from_pretrained(diffusers.DiffusionPipeline, path, use_safetensors=False)
    assert torch.equal(assembled.unet.conv_in.weight, other.conv_in.weight)


def test_other_sizes_are_taken_as_by_diffusers(tmp_path: Path) -> None:
    made = randomise(unet())
    made.save_pretrained(tmp_path)
    ours = from_pretrained(diffusers.UNet2DConditionModel, tmp_path, in_channels=9, ignore_mismatched_sizes=True)
    theirs = diffusers.UNet2DConditionModel.from_pretrained(tmp_path, in_channels=9, ignore_mismatched_sizes=True)
    assert ours.conv_in.weight.device == theirs.conv_in.weight.device
    assert torch.equal(ours.conv_out.weight, theirs.conv_out.weight)


def test_dtypes_may_be_named(tmp_path: Path) -> None:
    randomise(vae()).save_pretrained(tmp_path / "m")
    for wanted, is_then in (("bfloat16", torch.bfloat16), ("torch.float16", torch.float16), ("auto", torch.float32)):
        ours = from_pretrained(diffusers.AutoencoderKL, tmp_path / "m", dtype=wanted)
        theirs = diffusers.AutoencoderKL.from_pretrained(str(tmp_path / "m"), **{DTYPE: is_then})
        assert_same_model(ours, theirs)
    for wrong in ("half a float", "load", 16):
        with pytest.raises(penstock.ConfigError, match="is not a dtype"):
            from_pretrained(diffusers.AutoencoderKL, tmp_path / "m", dtype=wrong)


def test_the_class_of_a_model_may_be_left_to_its_configuration(pipeline: Path) -> None:
    ours = from_pretrained(diffusers.AutoModel, pipeline, subfolder="vae")
    assert_same_model(ours, diffusers.AutoencoderKL.from_pretrained(str(pipeline), subfolder="vae"))
    for folder in ("scheduler", "text_encoder"):
        with pytest.raises(penstock.ConfigError, match="instead of AutoModel"):
            from_pretrained(diffusers.AutoModel, pipeline, subfolder=folder)


def test_keywords_that_only_diffusers_understands_are_left_to_it(tmp_path: Path, monkeypatch: Any) -> None:
    randomise(vae()).save_pretrained(tmp_path / "m")
    file = tmp_path / "m" / "diffusion_pytorch_model.safetensors"
    state = penstock.load_file(file)
    penstock.save_file(state | {"strange": torch.ones(1)}, file)
    model, info = from_pretrained(diffusers.AutoencoderKL, tmp_path / "m", output_loading_info=True)
    assert info["unexpected_keys"] == ["strange"]
    assert_same_model(model, diffusers.AutoencoderKL.from_pretrained(str(tmp_path / "m")))
    penstock.save_file(state | {"decoder.conv_in.bias": torch.ones(1)}, file)
    with pytest.raises(penstock.DestinationError, match=r"decoder\.conv_in\.bias"):
        from_pretrained(diffusers.AutoencoderKL, tmp_path / "m")
    options = {"ignore_mismatched_sizes": True, "low_cpu_mem_usage": False}
    ours = from_pretrained(diffusers.AutoencoderKL, tmp_path / "m", **options)
    assert torch.equal(ours.decoder.conv_in.weight, state["decoder.conv_in.weight"])
    monkeypatch.setattr(engine, "is_url", lambda _: True)
    with pytest.raises(penstock.ConfigError, match=r"ignore_mismatched_sizes= is left to diffusers.*penstock\.pull"):
        from_pretrained(diffusers.AutoencoderKL, tmp_path / "m", ignore_mismatched_sizes=True)


@pytest.mark.parametrize("given", ["meta", {"": "meta"}, torch.device("meta")])
def test_a_device_map_of_one_device_is_that_device(tmp_path: Path, given: Any) -> None:
    randomise(vae()).save_pretrained(tmp_path / "m")
    with pytest.raises(penstock.DeviceError, match="meta"):
        from_pretrained(diffusers.AutoencoderKL, tmp_path / "m", device_map=given)


@pytest.fixture
def lora(pipeline: Path, tmp_path: Path) -> Path:
    """A LoRA whose ``lora_alpha`` is not its rank, which only its file's metadata says."""
    peft = pytest.importorskip("peft")
    made = diffusers.StableDiffusionPipeline.from_pretrained(str(pipeline))
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["to_q", "to_v"], init_lora_weights=False)
    made.unet.add_adapter(config)
    state = peft.utils.get_peft_model_state_dict(made.unet)
    diffusers.StableDiffusionPipeline.save_lora_weights(
        tmp_path / "lora", unet_lora_layers=state, unet_lora_adapter_metadata=config.to_dict()
    )
    return tmp_path / "lora"


# ---- diffusers' own loaders, within patch_safetensors


def test_its_own_loaders_give_the_same_through_penstock(pipeline: Path, lora: Path) -> None:
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(str(pipeline))
    theirs.load_lora_weights(lora)
    with penstock.patch_safetensors():
        ours = diffusers.StableDiffusionPipeline.from_pretrained(str(pipeline))
        ours.load_lora_weights(lora)
    assert_same_pipeline(ours, theirs)
    assert bits(image(ours)) == bits(image(theirs))
