"""Engines on a GPU: the same models, and never a second copy of the weights there."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

import penstock

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from penstock.integrations.transformers import from_pretrained
from tiny_models import QUIET, randomise, saved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.filterwarnings(*QUIET),
]
DEVICE = "cuda:0"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 0.8 GB, most of it in layers of 100 MB."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 6, "vocab_size": 8192}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=4)
    with torch.device(DEVICE):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return saved(model, tmp_path_factory.mktemp("large") / "m", max_shard_size="300MB")


def on_cpu(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def assert_same_on_gpu(ours: Any, theirs: Any) -> None:
    assert {tensor.device for tensor in ours.parameters()} == {torch.device(DEVICE)}
    mine, other = on_cpu(ours), on_cpu(theirs)
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_is_what_transformers_makes_of_it_and_memory_is_the_models(large: Path, dtype: Any) -> None:
    theirs = transformers.LlamaForCausalLM.from_pretrained(large, dtype=dtype, device_map={"": DEVICE})
    kept = on_cpu(theirs)
    del theirs
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ours = from_pretrained("auto", large, dtype=dtype, device=DEVICE)
    final = torch.cuda.memory_allocated() - held
    assert final >= sum(tensor.nbytes for tensor in kept.values())
    assert torch.cuda.max_memory_allocated() - held - final <= 512 << 20
    assert torch.cuda.max_memory_reserved() - torch.cuda.memory_allocated() <= 512 << 20
    mine = on_cpu(ours)
    assert all(torch.equal(mine[name], tensor) for name, tensor in kept.items())
    ids = torch.arange(16, device=DEVICE)[None]
    assert ours(ids).logits.isfinite().all()


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 512}
    config = transformers.MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    path = saved(randomise(transformers.MixtralForCausalLM(config)), tmp_path / "m")
    theirs = transformers.MixtralForCausalLM.from_pretrained(path, device_map={"": DEVICE})
    assert_same_on_gpu(from_pretrained("auto", path, device=DEVICE), theirs)


def test_a_pipeline(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    import test_engine_diffusers as tiny
    from penstock.integrations.diffusers import arguments
    from penstock.integrations.diffusers import pipelines as engine

    randomise(tiny.wan()).save_pretrained(tmp_path / "wan")
    ours = engine.from_pretrained(
        diffusers.WanTransformer3DModel, tmp_path / "wan", device=DEVICE, dtype=torch.bfloat16
    )
    options = {arguments.dtype_keyword(): torch.bfloat16}
    theirs = diffusers.WanTransformer3DModel.from_pretrained(str(tmp_path / "wan"), **options).to(DEVICE)
    assert_same_on_gpu(ours, theirs)


def test_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import test_engine_peft as tiny

    path = tiny.saved("lora", tmp_path / "a")
    with penstock.patch_safetensors():
        ours = peft.PeftModel.from_pretrained(tiny.base().to(DEVICE), path)
    assert_same_on_gpu(ours, peft.PeftModel.from_pretrained(tiny.base().to(DEVICE), path))


def test_safetensors_within_a_patch(large: Path) -> None:
    import safetensors.torch

    (file, *_) = sorted(large.glob("*.safetensors"))
    theirs = safetensors.torch.load_file(file, device=DEVICE)
    with penstock.patch_safetensors():
        ours = safetensors.torch.load_file(file, device=DEVICE)
        with safetensors.safe_open(file, "pt", device=DEVICE) as opened:
            name = opened.offset_keys()[0]
            assert torch.equal(opened.get_slice(name)[:3], theirs[name][:3])
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
