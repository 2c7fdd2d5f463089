"""peft: adapters are what its own loaders make of the same files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import penstock

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from penstock.engines.peft import from_pretrained, load_adapter
from tiny_models import QUIET, assert_same_model, randomise

pytestmark = pytest.mark.filterwarnings(*QUIET)


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
        # peft copies into layers that it made in the model's dtype; here the file's tensors are adopted, of the same.
        assert {p.dtype for n, p in ours.named_parameters() if "lora" in n} == {dtype}
    assert_same_model(ours, theirs)


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
    with pytest.raises(penstock.ObjectNotFoundError, match="adapter_model"):
        from_pretrained(base(), tmp_path / "a")
    with pytest.raises(TypeError, match="revisoin"):
        from_pretrained(base(), tmp_path / "a", revisoin="main")


def test_its_own_loader_gives_the_same_through_penstock(tmp_path: Path) -> None:
    path = saved("lora", tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(base(), path)
    with penstock.patch_safetensors():
        ours = peft.PeftModel.from_pretrained(base(), path)
    assert_same_model(ours, theirs)
