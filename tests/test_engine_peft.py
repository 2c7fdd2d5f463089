"""peft: adapters are what its own loaders make of the same files."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

import penstock

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from penstock.integrations.peft import from_pretrained, load_adapter
from tiny_models import QUIET, assert_same_model, randomise

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings(*QUIET)]


def base(dtype: Any = torch.float32) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return randomise(transformers.LlamaForCausalLM(config)).to(dtype)


LAYERS = ["q_proj", "v_proj", "down_proj"]
KINDS = {
    "lora": lambda: peft.LoraConfig(r=4, lora_alpha=12, target_modules=LAYERS, task_type="CAUSAL_LM"),
    "lora with a whole layer": lambda: peft.LoraConfig(r=4, target_modules=LAYERS, modules_to_save=["lm_head"]),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=LAYERS, use_dora=True, task_type="CAUSAL_LM"),
    "ia3": lambda: peft.IA3Config(target_modules=LAYERS, feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=LAYERS),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
}


def saved(kind: str, path: Path, dtype: Any = torch.float32) -> Path:
    made = peft.get_peft_model(base(), KINDS[kind]())
    generator = torch.Generator().manual_seed(5)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype) * 0.1
    made.save_pretrained(path)
    return path


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(8)[None]).logits


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_what_peft_makes_of_it(tmp_path: Path, kind: str, trainable: bool) -> None:
    path = saved(kind, tmp_path / "a")
    if kind == "prompt" and trainable:
        with pytest.raises(ValueError, match="cannot be trained"):
            from_pretrained(base(), path, is_trainable=True)
        return
    theirs = peft.PeftModel.from_pretrained(base(), path, is_trainable=trainable)
    ours = from_pretrained(base(), path, is_trainable=trainable)
    assert_same_model(ours, theirs)
    assert torch.equal(logits(ours), logits(theirs))
    assert not torch.equal(logits(ours)[:, -8:], logits(base()))


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_of_adapters_are_treated_as_peft_does(tmp_path: Path, dtype: Any, autocast: bool) -> None:
    path = saved("lora", tmp_path / "a", dtype)
    theirs = peft.PeftModel.from_pretrained(base(dtype), path, autocast_adapter_dtype=autocast)
    ours = from_pretrained(base(dtype), path, autocast_adapter_dtype=autocast)
    if not autocast:
        assert {p.dtype for n, p in ours.named_parameters() if "lora" in n} == {dtype}
    assert_same_model(ours, theirs)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("kind", ["lora", "lora with a whole layer"])
@pytest.mark.parametrize(("of_adapter", "of_model"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_adapters_of_another_dtype_than_the_models_keep_their_precision_as_with_peft(
    tmp_path: Path, of_adapter: str, of_model: str, kind: str, autocast: bool
) -> None:
    path = saved(kind, tmp_path / "a", getattr(torch, of_adapter))
    model = getattr(torch, of_model)
    theirs = peft.PeftModel.from_pretrained(base(model), path, autocast_adapter_dtype=autocast)
    assert_same_model(from_pretrained(base(model), path, autocast_adapter_dtype=autocast), theirs)
    mine, other = (loads(base(model), path) for loads in (from_pretrained, peft.PeftModel.from_pretrained))
    load_adapter(mine, path, "second", autocast_adapter_dtype=autocast)
    other.load_adapter(path, "second", autocast_adapter_dtype=autocast)
    assert_same_model(mine, other)


@pytest.mark.parametrize("way", ["pissa", "olora"])
def test_an_adapter_that_is_initialised_from_the_models_weights_is_what_peft_makes_of_it(
    tmp_path: Path, way: str
) -> None:
    settings = peft.LoraConfig(r=4, target_modules=LAYERS, init_lora_weights=way)
    peft.get_peft_model(base(), settings).save_pretrained(tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(base(), tmp_path / "a")
    ours = from_pretrained(base(), tmp_path / "a")
    assert_same_model(ours, theirs)
    load_adapter(ours, tmp_path / "a", "second")
    theirs.load_adapter(tmp_path / "a", "second")
    assert_same_model(ours, theirs)


@pytest.mark.parametrize("added", [False, True])
def test_what_an_adapter_lacks_is_initialised_and_named(tmp_path: Path, added: bool) -> None:
    path = saved("lora with a whole layer", tmp_path / "a")
    kept = penstock.load_file(path / "adapter_model.safetensors")
    lost = [name for name in kept if "q_proj.lora_B" in name]
    assert len(lost) == 2
    for name in lost:
        del kept[name]
    penstock.save_file(kept | {"extra": torch.ones(2)}, path / "adapter_model.safetensors")
    if added:
        ours = from_pretrained(base(), saved("lora", tmp_path / "first"))
        theirs = peft.PeftModel.from_pretrained(base(), tmp_path / "first")
        result, expected = load_adapter(ours, path, "second"), theirs.load_adapter(path, "second")
        assert (result.missing_keys, result.unexpected_keys) == (expected.missing_keys, expected.unexpected_keys)
    else:
        with pytest.warns(UserWarning, match=r"layers\.0\.self_attn\.q_proj\.lora_B\.default\.weight"):
            ours = from_pretrained(base(), path)
        theirs = peft.PeftModel.from_pretrained(base(), path)
    # This half of a LoRA begins with zeros.
    assert_same_model(ours, theirs)
    assert ours.active_adapter == "default"


def test_keywords_of_pefts_own_are_taken(tmp_path: Path) -> None:
    path = saved("lora", tmp_path / "a")
    settings = peft.PeftConfig.from_pretrained(path)
    settings.lora_alpha = 3
    names = {"^model.strata": "model.layers", "^never": "x"}
    tensors = penstock.load_file(path / "adapter_model.safetensors")
    renamed = {name.replace("layers", "strata"): tensor for name, tensor in tensors.items()}
    penstock.save_file(renamed, path / "adapter_model.safetensors")
    keywords = {"low_cpu_mem_usage": True, "torch_device": "cpu", "ephemeral_gpu_offload": True, "key_mapping": names}
    theirs = peft.PeftModel.from_pretrained(base(), path, config=settings, **keywords)
    ours = from_pretrained(base(), path, config=settings, **keywords)
    assert_same_model(ours, theirs)
    assert torch.equal(logits(ours), logits(theirs))
    assert ours.peft_config["default"].runtime_config.ephemeral_gpu_offload

    class Renamed(transformers.LlamaForCausalLM):
        _checkpoint_conversion_mapping = names

    of_itself = Renamed(base().config)
    of_itself.load_state_dict(base().state_dict())
    ours = from_pretrained(of_itself.eval(), path)
    assert any(bool(p.any()) for name, p in ours.named_parameters() if "lora_B" in name)


def test_an_adapter_that_is_whole_is_loaded_without_a_word(tmp_path: Path, caplog: Any) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for kind in ("lora", "prompt"):
            from_pretrained(base(), saved(kind, tmp_path / kind))
    assert "initialised" not in caplog.text
    assert not [warning for warning in told if "missing" in str(warning.message)]


@pytest.mark.parametrize("variant", ["layer_replication", "kasa_config", "monteclora_config"])
def test_variants_that_compute_something_are_built_as_by_peft(tmp_path: Path, variant: str) -> None:
    given: dict[str, Any] = {"init_lora_weights": True}
    if variant == "layer_replication":
        given[variant] = [[0, 2], [1, 2]]
    else:
        kind = {"kasa_config": "KasaConfig", "monteclora_config": "MontecloraConfig"}[variant]
        found = getattr(peft, kind, None) or getattr(peft.tuners.lora.config, kind, None)
        if found is None:
            pytest.skip(f"this peft has no {kind}")
        given[variant] = found()
    made = peft.get_peft_model(base(), peft.LoraConfig(r=4, target_modules=LAYERS, task_type="CAUSAL_LM", **given))
    made.save_pretrained(tmp_path)
    ours, theirs = from_pretrained(base(), tmp_path), peft.PeftModel.from_pretrained(base(), tmp_path)
    assert torch.equal(logits(ours.eval()), logits(theirs.eval()))
    ours.save_pretrained(tmp_path / "again")
    again = penstock.load_file(tmp_path / "again" / "adapter_model.safetensors")
    kept = penstock.load_file(tmp_path / "adapter_model.safetensors")
    assert again.keys() == kept.keys()
    assert all(torch.equal(again[name], kept[name]) for name in kept)


def test_a_model_on_several_devices_is_left_to_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # peft writes what it offloads below the current directory, whatever it is told.
    monkeypatch.chdir(tmp_path)
    path = saved("lora", tmp_path / "a")
    base().save_pretrained(tmp_path / "m")
    parts = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    parts |= {f"model.layers.{n}": "disk" if n else "cpu" for n in range(base().config.num_hidden_layers)}

    def spread() -> Any:
        folder = str(tmp_path / "off")
        return transformers.LlamaForCausalLM.from_pretrained(tmp_path / "m", device_map=parts, offload_folder=folder)

    inside = {f"base_model.model.{name}": device for name, device in parts.items()}
    where = {"device_map": inside, "offload_dir": str(tmp_path / "off2")}
    ours = from_pretrained(spread(), path, **where)
    theirs = peft.PeftModel.from_pretrained(spread(), path, **where)
    assert torch.equal(logits(ours), logits(theirs))
    devices = [{name: p.device for name, p in model.named_parameters()} for model in (ours, theirs)]
    assert devices[0] == devices[1]


def test_layers_of_another_size_can_be_left_out(tmp_path: Path) -> None:
    path = saved("lora", tmp_path / "a")
    tensors = penstock.load_file(path / "adapter_model.safetensors")
    wrong = next(name for name in tensors if "lora_B" in name)
    penstock.save_file(tensors | {wrong: torch.ones(3, 4)}, path / "adapter_model.safetensors")
    with pytest.raises(RuntimeError, match="size mismatch"):
        from_pretrained(base(), path)
    theirs = peft.PeftModel.from_pretrained(base(), path, ignore_mismatched_sizes=True)
    assert_same_model(from_pretrained(base(), path, ignore_mismatched_sizes=True), theirs)


def test_a_second_adapter_is_added_and_can_be_chosen(tmp_path: Path) -> None:
    first, second = saved("lora", tmp_path / "a"), saved("dora", tmp_path / "b")
    ours, theirs = from_pretrained(base(), first), peft.PeftModel.from_pretrained(base(), first)
    result = load_adapter(ours, second, "second")
    expected = theirs.load_adapter(second, "second")
    assert (result.missing_keys, result.unexpected_keys) == (expected.missing_keys, expected.unexpected_keys)
    assert ours.active_adapter == theirs.active_adapter == "default"
    assert_same_model(ours, theirs)
    for model in (ours, theirs):
        model.set_adapter("second")
    assert torch.equal(logits(ours), logits(theirs))


def test_subfolders_are_found_and_what_is_missing_is_named(tmp_path: Path) -> None:
    shutil.copytree(saved("lora", tmp_path / "a"), tmp_path / "repo" / "step-7")
    theirs = peft.PeftModel.from_pretrained(base(), tmp_path / "repo" / "step-7")
    assert_same_model(from_pretrained(base(), tmp_path / "repo", subfolder="step-7"), theirs)
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(penstock.LocationNotFoundError, match="adapter_model"):
        from_pretrained(base(), tmp_path / "a")
    with pytest.raises(TypeError, match="revisoin"):
        from_pretrained(base(), tmp_path / "a", revisoin="main")


def test_its_own_loader_gives_the_same_through_penstock(tmp_path: Path) -> None:
    path = saved("lora", tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(base(), path)
    with penstock.patch_safetensors():
        ours = peft.PeftModel.from_pretrained(base(), path)
    assert_same_model(ours, theirs)
