"""transformers: a model is what its own ``from_pretrained`` makes of the same files."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import penstock
from conftest import Remains, python_threads

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from penstock.integrations.safetensors import patching
from penstock.integrations.transformers import from_pretrained
from penstock.integrations.transformers.supplied import unreserved as without_reservation
from penstock.supply import streamed as supply
from tiny_models import QUIET, addresses, assert_same_model, randomise, saved

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.filterwarnings(*QUIET),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
VERSION = int(transformers.__version__.split(".")[0])


def text(**extra: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
    return sizes | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64} | extra


def llama(**extra: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**text(**extra)))


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=96, n_positions=64)
    )


def bert() -> Any:
    config = text()
    config.pop("num_key_value_heads")
    return transformers.BertForMaskedLM(transformers.BertConfig(**config))


def t5() -> Any:
    # Some of its layers stay in fp32 whatever the model's dtype.
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8, vocab_size=96)
    )


def mixtral() -> Any:
    # Its experts lie one by one in files, and are merged by version 5.
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**text(num_local_experts=4, num_experts_per_tok=2))
    )


def vit() -> Any:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
        )
    )


MODELS = {
    # Its layers come in another order in files (0, 1, 10, 11, 2) than they are asked for.
    "llama": lambda: llama(num_hidden_layers=12),
    "tied llama": lambda: llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "mixtral": mixtral,
    "vit": vit,
}


def outputs(model: Any) -> torch.Tensor:
    ids = torch.arange(12)[None]
    if isinstance(model, transformers.ViTForImageClassification):
        given = {"pixel_values": torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16).to(model.dtype)}
    elif model.config.is_encoder_decoder:
        given = {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    else:
        given = {"input_ids": ids}
    with torch.inference_mode():
        return model(**given).logits


@pytest.mark.parametrize("files", ["sharded", "one file"])
@pytest.mark.parametrize("family", MODELS)
def test_a_model_is_what_transformers_makes_of_it(tmp_path: Path, family: str, files: str) -> None:
    size = "60KB" if files == "sharded" else "5GB"
    model = MODELS[family]()
    path = saved(randomise(model), tmp_path / "m", max_shard_size=size)
    assert (path / "model.safetensors.index.json").exists() == (files == "sharded")
    theirs = type(model).from_pretrained(path)
    ours = from_pretrained(type(theirs), path)
    assert_same_model(ours, theirs)
    assert torch.equal(outputs(ours), outputs(theirs))
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.name_or_path == theirs.name_or_path == str(path)


def test_a_path_with_an_at_sign_is_the_models_name_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = "runs/2026-11-23T06:20@main"
    saved(randomise(next(iter(MODELS.values()))()), Path(path))
    for given in (path, path.encode()):
        ours = from_pretrained("auto", given)
        assert ours.name_or_path == ours.config.name_or_path == path
    # What is left to transformers is called the same.
    assert from_pretrained("auto", path, device_map={"": "cpu", "lm_head": "cpu"}).name_or_path == path


@pytest.mark.parametrize("wanted", ["auto", torch.float32, torch.bfloat16, "float16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "t5", "mixtral"])
def test_dtypes_are_converted_as_transformers_does(tmp_path: Path, family: str, stored: Any, wanted: Any) -> None:
    model = randomise(llama() if family == "llama" else MODELS[family]())
    path = saved(model.to(stored), tmp_path / "m")
    theirs = type(model).from_pretrained(path, dtype=wanted)
    ours = from_pretrained("auto", path, dtype=wanted)
    assert_same_model(ours, theirs)
    assert torch.equal(outputs(ours), outputs(theirs))


@pytest.mark.skipif(VERSION < 5, reason="transformers 4 has no dtypes by part")
def test_dtypes_may_be_given_by_part(tmp_path: Path) -> None:
    path = saved(randomise(llama()), tmp_path / "m")
    wanted = {"": torch.bfloat16}
    assert_same_model(
        from_pretrained("auto", path, dtype=wanted), transformers.LlamaForCausalLM.from_pretrained(path, dtype=wanted)
    )


def test_what_conversion_is_asked_for_in_small_groups_comes_out_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    path = saved(randomise(llama(num_hidden_layers=12)).to(torch.float16), tmp_path / "m", max_shard_size="60KB")
    monkeypatch.setattr(supply.small_groups, "__defaults__", (20_000,))
    ours = from_pretrained("auto", path, dtype=torch.float32)
    assert_same_model(ours, transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32))


@pytest.mark.skipif(VERSION < 5, reason="transformers 4 reads FP8 on a GPU only")
def test_fp8_weights_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**text())
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    state = {}
    for name, tensor in randomise(llama()).state_dict().items():
        if "_proj" in name:
            state[name] = tensor.to(torch.float8_e4m3fn)
            rows, columns = tensor.shape
            state[f"{name}_scale_inv"] = torch.rand(rows // 16, columns // 16)
        else:
            state[name] = tensor.to(torch.bfloat16)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    penstock.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = from_pretrained("auto", tmp_path, dtype=torch.bfloat16)
    assert_same_model(ours, theirs)
    assert torch.equal(outputs(ours), outputs(theirs))


@pytest.mark.skipif(VERSION < 5, reason="transformers 4 saves these as pickles")
@pytest.mark.parametrize("embeddings", [False, True])
def test_what_torchao_has_quantised_is_quantised_and_read_as_by_transformers(tmp_path: Path, embeddings: bool) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    path = saved(randomise(llama()).bfloat16(), tmp_path / "m")
    how = transformers.TorchAoConfig(
        quantization.Int8WeightOnlyConfig(), include_input_output_embeddings=embeddings, modules_to_not_convert=[]
    )
    theirs = transformers.LlamaForCausalLM.from_pretrained(path, quantization_config=how, dtype=torch.bfloat16)
    ours = from_pretrained("auto", path, quantization_config=how, dtype=torch.bfloat16)
    quantised = type(ours.model.layers[0].mlp.up_proj.weight)
    assert quantised.__module__.startswith("torchao")
    assert torch.equal(outputs(ours), outputs(theirs))
    theirs.save_pretrained(tmp_path / "quantised", max_shard_size="20KB")
    again = from_pretrained("auto", tmp_path / "quantised")
    assert type(again.model.layers[0].mlp.up_proj.weight) is quantised
    assert torch.equal(outputs(again), outputs(theirs))


def test_parameters_are_the_memory_that_was_read_into(tmp_path: Path, monkeypatch: Any) -> None:
    path = saved(randomise(llama()), tmp_path / "m")
    handed_out = set()
    take = supply.Supply.take

    def noted(self: Any, name: str) -> Any:
        tensor = take(self, name)
        handed_out.add(tensor.data_ptr())
        return tensor

    monkeypatch.setattr(supply.Supply, "take", noted)
    assert addresses(from_pretrained("auto", path)) == handed_out


@pytest.fixture
def _nothing_remains_in_the_end() -> Any:
    """As ``nothing_remains``, but transformers does not wait for its threads, so they are waited for here."""
    before, threads = Remains.now(), python_threads()
    yield
    for _ in range(200):
        if python_threads() <= threads:
            break
        time.sleep(0.05)
    assert python_threads() <= threads
    assert Remains.now() == before


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16])
@pytest.mark.parametrize("family", ["tied llama", "t5"])
def test_parameters_may_be_pages_of_the_files(tmp_path: Path, family: str, dtype: Any) -> None:
    model = MODELS[family]()
    path = saved(randomise(model), tmp_path / "m")
    ours, theirs = from_pretrained("auto", path, dtype=dtype, mmap=True), type(model).from_pretrained(path, dtype=dtype)
    assert_same_model(ours, theirs)
    assert torch.equal(outputs(ours), outputs(theirs))
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [[int(bound, 16) for bound in line.split()[0].split("-")] for line in maps if str(path) in line]
    mapped = {at for at in addresses(ours) if any(start <= at < end for start, end in spans)}
    assert bool(mapped) == (dtype == "auto")


@pytest.mark.usefixtures("_nothing_remains_in_the_end")
def test_every_byte_is_read_once_and_nothing_remains(tmp_path: Path, monkeypatch: Any) -> None:
    path = saved(randomise(llama()), tmp_path / "m", max_shard_size="60KB")
    kept: list[Any] = []
    close = supply.Supply.close
    monkeypatch.setattr(supply.Supply, "close", lambda self: (kept.append(self), close(self)))
    seen: list[tuple[int, int]] = []
    from_pretrained("auto", path, progress=lambda done, total: seen.append((done, total)))
    total = penstock.open(path).nbytes
    assert kept[0].bytes == total == sum(stats.bytes for stats in kept[0].stats)
    assert seen[-1] == (total, total)


def test_no_memory_is_reserved_on_top_of_what_is_read_meanwhile(tmp_path: Path, monkeypatch: Any) -> None:
    path = saved(randomise(llama()).to(torch.bfloat16), tmp_path / "m")
    reserved: list[str] = []
    monkeypatch.setattr(transformers.modeling_utils, "caching_allocator_warmup", lambda *_: reserved.append("once"))
    from_pretrained("auto", path)
    assert reserved == []
    # What is converted is read later, and takes what was reserved. Other threads' models have theirs.
    from_pretrained("auto", path, dtype=torch.float32)
    assert len(reserved) == 1
    with without_reservation() as unreserved:
        assert unreserved
        thread = threading.Thread(target=transformers.modeling_utils.caching_allocator_warmup, args=(None, None, None))
        thread.start()
        thread.join()
    assert len(reserved) == 2
    monkeypatch.delattr(transformers.modeling_utils, "caching_allocator_warmup")
    with without_reservation() as unreserved:
        assert not unreserved


@pytest.mark.parametrize("name", ["AutoModelForCausalLM", "AutoModel", "LlamaModel", "LlamaForSequenceClassification"])
def test_classes_that_take_more_or_less_than_the_checkpoint_has(tmp_path: Path, name: str) -> None:
    path = saved(randomise(llama()), tmp_path / "m")
    cls = getattr(transformers, name)
    torch.manual_seed(3)
    theirs, their_info = cls.from_pretrained(path, output_loading_info=True)
    torch.manual_seed(3)
    ours, our_info = from_pretrained(cls, path, output_loading_info=True)
    assert_same_model(ours, theirs)
    for kind in ("missing_keys", "unexpected_keys"):
        assert sorted(our_info[kind]) == sorted(their_info[kind])


def test_generation_settings_come_from_beside_the_weights(tmp_path: Path) -> None:
    model = randomise(llama())
    model.generation_config.temperature = 0.25
    model.generation_config.do_sample = True
    path = saved(model, tmp_path / "m")
    for own in (True, False):
        if not own:
            (path / "generation_config.json").unlink()
        ours, theirs = from_pretrained("auto", path), transformers.LlamaForCausalLM.from_pretrained(path)
        assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
        assert (ours.generation_config.temperature == 0.25) == own
        ids = torch.arange(5)[None]
        settings = {"max_new_tokens": 8, "do_sample": False, "temperature": None}
        assert torch.equal(ours.generate(ids, **settings), theirs.generate(ids, **settings))


def test_keywords_reach_the_configuration_and_the_model(tmp_path: Path) -> None:
    path = saved(randomise(llama()), tmp_path / "m")
    keywords = {"attn_implementation": "eager", "output_hidden_states": True}
    ours = from_pretrained("auto", path, **keywords)
    theirs = transformers.LlamaForCausalLM.from_pretrained(path, **keywords)
    assert ours.config._attn_implementation == theirs.config._attn_implementation == "eager"
    assert ours(torch.arange(4)[None]).hidden_states is not None
    smaller = transformers.LlamaConfig(**text(num_hidden_layers=1))
    assert len(from_pretrained(transformers.LlamaForCausalLM, path, config=smaller).model.layers) == 1


def test_variants_and_subfolders_are_found_and_other_checkpoints_are_not_mixed_in(tmp_path: Path) -> None:
    path = saved(randomise(llama()), tmp_path / "repo" / "sub")
    saved(randomise(llama()).half(), path, variant="fp16")
    penstock.save_file({"base_model.x": torch.zeros(2)}, path / "adapter_model.safetensors")
    ours = from_pretrained("auto", tmp_path / "repo", subfolder="sub", variant="fp16", dtype=torch.float16)
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "repo", subfolder="sub", variant="fp16", dtype=torch.float16
    )
    assert_same_model(ours, theirs)
    theirs = transformers.LlamaForCausalLM.from_pretrained(path, dtype="auto")
    assert_same_model(from_pretrained("auto", path), theirs)


def test_models_of_the_hubs_cache_are_found_by_name_and_by_directory(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / ("a" * 40)
    model = saved(randomise(llama()), tmp_path / "m")
    shutil.copytree(model, snapshot)
    refs = tmp_path / "models--org--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    theirs = transformers.LlamaForCausalLM.from_pretrained(model)
    by_name = from_pretrained("auto", "org/tiny", cache_dir=tmp_path, local_files_only=True)
    assert_same_model(by_name, theirs)
    assert by_name.name_or_path == "org/tiny"
    assert_same_model(from_pretrained("auto", tmp_path / "models--org--tiny"), theirs)
    with pytest.raises(penstock.LocationNotFoundError, match="org/absent"):
        from_pretrained("auto", "org/absent", cache_dir=tmp_path, local_files_only=True)


def test_code_beside_the_weights_runs_only_where_it_is_trusted(tmp_path: Path) -> None:
    path = saved(randomise(llama(num_hidden_layers=1)), tmp_path / "m")
    code = (
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own-llama'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    (path / "own.py").write_text(code)
    config = json.loads((path / "config.json").read_text())
    config["model_type"] = "own-llama"
    config["architectures"] = ["OwnModel"]
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (path / "config.json").write_text(json.dumps(config))
    ours = from_pretrained(transformers.AutoModelForCausalLM, path, trust_remote_code=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    assert type(ours).__name__ == "OwnModel"
    assert [p.sum() for p in ours.parameters()] == [p.sum() for p in theirs.parameters()]
    with pytest.raises(ValueError, match="trust_remote_code"):
        from_pretrained(transformers.AutoModelForCausalLM, path, trust_remote_code=False)


# ---- what goes wrong


@pytest.mark.usefixtures("_nothing_remains_in_the_end")
def test_what_storage_says_is_not_wrapped(tmp_path: Path) -> None:
    path = saved(randomise(llama()), tmp_path / "m", max_shard_size="20KB")
    shard = sorted(path.glob("model-*"))[3]
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 8)
    with pytest.raises(penstock.PenstockError, match=shard.name):
        from_pretrained("auto", path)


@pytest.mark.usefixtures("_nothing_remains_in_the_end")
def test_a_shard_that_fails_while_it_is_read_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    path = saved(randomise(llama()), tmp_path / "m", max_shard_size="20KB")
    shard = sorted(path.glob("model-*"))[3]
    built = supply.Supply.__init__

    def change_then_build(self: Any, *arguments: Any, **keywords: Any) -> None:
        # After the headers were read, before the bytes are.
        data = shard.read_bytes()
        shard.unlink()
        shard.write_bytes(data)
        built(self, *arguments, **keywords)

    monkeypatch.setattr(supply.Supply, "__init__", change_then_build)
    with pytest.raises(penstock.LocationChangedError, match=shard.name):
        from_pretrained("auto", path)


def adapter(path: Path, base: Path, names: str | None) -> Path:
    """An adapter of peft that nothing initialised to do nothing, with the name of its model."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(base), settings).save_pretrained(path)
    found = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(found | {"base_model_name_or_path": names}))
    return path


def test_an_adapter_beside_a_model_is_put_on_it_under_the_name_that_is_asked_for(tmp_path: Path) -> None:
    base = saved(randomise(llama()), tmp_path / "m")
    without = outputs(from_pretrained("auto", base))
    adapter(base, base, str(base))
    theirs, told = transformers.LlamaForCausalLM.from_pretrained(
        base, dtype="auto", adapter_name="x", output_loading_info=True
    )
    ours, info = from_pretrained("auto", base, adapter_name="x", output_loading_info=True)
    assert_same_model(ours, theirs)
    assert list(ours.peft_config) == ["x"]
    assert info == told
    assert not torch.equal(outputs(ours), without)


def test_where_the_configuration_is_may_be_said(tmp_path: Path) -> None:
    path = saved(randomise(llama()), tmp_path / "m")
    for given in (path, str(path / "config.json"), transformers.LlamaConfig.from_pretrained(path)):
        ours = from_pretrained(transformers.LlamaForCausalLM, path, config=given)
        assert_same_model(ours, transformers.LlamaForCausalLM.from_pretrained(path, config=given, dtype="auto"))


def test_weights_are_those_that_the_configuration_names(tmp_path: Path) -> None:
    path = saved(randomise(llama()), tmp_path / "m")
    wanted = dict(from_pretrained("auto", path).named_parameters())
    (path / "model.safetensors").rename(path / "odd.safetensors")
    saved(randomise(llama()), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"transformers_weights": "odd.safetensors"}))
    found = dict(from_pretrained("auto", path).named_parameters())
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    (path / "config.json").write_text(json.dumps(config | {"transformers_weights": "../other/model.safetensors"}))
    with pytest.raises(penstock.ConfigError, match="no safetensors file in there"):
        from_pretrained("auto", path)


def test_of_one_file_and_shards_the_file_counts_as_in_transformers(tmp_path: Path) -> None:
    path = saved(randomise(llama()), tmp_path / "m", max_shard_size="20KB")
    saved(randomise(llama()), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(path, dtype="auto")
    assert_same_model(from_pretrained("auto", path), theirs)


def test_generation_takes_keywords_as_in_transformers(tmp_path: Path) -> None:
    model = randomise(llama())
    model.generation_config.max_length = 77
    path = saved(model, tmp_path / "m")
    for finder in (transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM):
        theirs = finder.from_pretrained(path, pad_token_id=3, use_cache=False)
        ours = from_pretrained(finder, path, pad_token_id=3, use_cache=False)
        assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()


def test_code_beside_the_weights_is_saved_with_the_model_again(tmp_path: Path) -> None:
    path = saved(randomise(llama()), tmp_path / "m")
    (path / "configuration_x.py").write_text(
        "from transformers import LlamaConfig\n\nclass XConfig(LlamaConfig):\n    model_type = 'penstock_x'\n"
    )
    (path / "modeling_x.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_x import XConfig\n\n"
        "class XForCausalLM(LlamaForCausalLM):\n    config_class = XConfig\n"
    )
    auto_map = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    named = {"model_type": "penstock_x", "architectures": ["XForCausalLM"], "auto_map": auto_map}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | named))
    ours = from_pretrained("auto", path, trust_remote_code=True)
    assert type(ours).__name__ == "XForCausalLM"
    ours.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "modeling_x.py").exists()


def test_a_default_device_of_torch_is_where_models_go(tmp_path: Path) -> None:
    path = saved(randomise(llama(num_hidden_layers=1)), tmp_path / "m")
    with torch.device("cpu"):
        assert from_pretrained("auto", path).device.type == "cpu"
    with torch.device("meta"), pytest.raises(RuntimeError, match="meta"):
        from_pretrained("auto", path)


@pytest.mark.parametrize("keywords", [{"device_map": "auto"}, {"device_map": {"model": "cpu", "lm_head": "disk"}}])
def test_several_devices_are_left_to_transformers(tmp_path: Path, keywords: dict[str, Any], monkeypatch: Any) -> None:
    path = saved(randomise(llama()), tmp_path / "m")
    keywords = keywords | {"offload_folder": str(tmp_path / "o"), "dtype": torch.float32}
    theirs = transformers.LlamaForCausalLM.from_pretrained(path, **keywords)
    opened: list[Any] = []
    taken = patching._Opened.__init__
    monkeypatch.setattr(patching._Opened, "__init__", lambda *a, **k: (opened.append(a), taken(*a, **k))[1])
    ours = from_pretrained("auto", path, **keywords)
    assert opened
    devices = [{name: p.device for name, p in model.named_parameters()} for model in (ours, theirs)]
    assert devices[0] == devices[1]
    assert torch.equal(outputs(ours), outputs(theirs))


def test_pickles_that_are_asked_for_are_left_to_transformers(tmp_path: Path) -> None:
    path = saved(randomise(llama(num_hidden_layers=1)), tmp_path / "m")
    other = randomise(llama(num_hidden_layers=1))
    torch.save(other.state_dict(), path / "pytorch_model.bin")
    ours = from_pretrained("auto", path, use_safetensors=False)
    assert torch.equal(ours.lm_head.weight, other.lm_head.weight)


def test_what_cannot_be_loaded_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(penstock.LocationNotFoundError, match="no such directory"):
        from_pretrained("auto", tmp_path / "absent")
    path = saved(randomise(llama(num_hidden_layers=1)), tmp_path / "m")
    with pytest.raises(penstock.LocationNotFoundError, match="no folder 'inner'"):
        from_pretrained("auto", path, subfolder="inner")
    with pytest.raises(penstock.ConfigError, match="state_dict"):
        from_pretrained("auto", path, state_dict={})
    with pytest.raises(penstock.ConfigError, match="AutoModelForImageClassification knows no model for LlamaConfig"):
        from_pretrained(transformers.AutoModelForImageClassification, path)
    with pytest.raises(penstock.ConfigError, match="neither 'auto'"):
        from_pretrained(42, path)
    with pytest.raises(penstock.DeviceError, match=r"cuda:99|without CUDA|no usable GPU"):
        from_pretrained("auto", path, device="cuda:99")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(penstock.LocationNotFoundError, match=r"pytorch_model\.bin is a pickle"):
        from_pretrained("auto", path)


# ---- transformers' own loader, within patch_safetensors


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("family", ["llama", "t5", "mixtral"])
def test_its_own_loader_gives_the_same_through_penstock(tmp_path: Path, family: str, mmap: bool) -> None:
    model = MODELS[family]()
    path = saved(randomise(model), tmp_path / "m", max_shard_size="60KB")
    theirs = type(model).from_pretrained(path, dtype=torch.bfloat16)
    with penstock.patch_safetensors(mmap=mmap):
        ours = type(model).from_pretrained(path, dtype=torch.bfloat16)
    assert_same_model(ours, theirs)
    assert torch.equal(outputs(ours), outputs(theirs))
