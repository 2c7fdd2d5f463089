"""Engines on object stores and HTTP servers: the same models, with nothing copied to the disk but small files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
import servers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from penstock.arguments import joined
from penstock.integrations.shared import small_files
from penstock.integrations.shared.files import local_files
from tiny_models import QUIET, assert_same_model, randomise

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings(*QUIET)]


@pytest.fixture(scope="module", params=["s3", "web"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Remote]:
    with servers.ALL[request.param](tmp_path_factory.mktemp("server")) as remote:
        yield remote


@pytest.fixture
def remote(server: servers.Remote, monkeypatch: pytest.MonkeyPatch) -> servers.Remote:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


def put(remote: servers.Remote, directory: Path, name: str) -> str:
    for path in directory.rglob("*"):
        if path.is_file():
            remote.put(f"{name}/{path.relative_to(directory)}", path.read_bytes())  # type: ignore[operator]
    return f"{remote.root}/{name}/"


def llama() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    )


def weights_here() -> set[Path]:
    """Weights that were copied to this machine: adapters are, models are not."""
    return set(Path(small_files._root or "/absent").rglob("*.safetensors"))


@pytest.mark.parametrize("size", ["20KB", "5GB"])
def test_transformers(remote: servers.Remote, tmp_path: Path, size: str) -> None:
    from penstock.integrations.transformers import from_pretrained

    model = randomise(llama())
    model.generation_config.temperature, model.generation_config.do_sample = 0.25, True
    model.save_pretrained(tmp_path / "m", max_shard_size=size)
    url = put(remote, tmp_path / "m", f"llama-{size}")
    before = weights_here()
    ours = from_pretrained("auto", url)
    assert_same_model(ours, transformers.LlamaForCausalLM.from_pretrained(tmp_path / "m"))
    assert ours.generation_config.temperature == 0.25
    assert ours.name_or_path == url
    assert weights_here() == before
    parent, name = url.rstrip("/").rsplit("/", 1)
    assert_same_model(from_pretrained("auto", parent, subfolder=name), ours)
    with pytest.raises(penstock.PenstockError, match="absent"):
        from_pretrained("auto", f"{remote.root}/absent/")


def test_an_adapter_beside_a_model(remote: servers.Remote, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from penstock.integrations.transformers import from_pretrained

    llama().save_pretrained(tmp_path / "m")
    made = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    made.save_pretrained(tmp_path / "m")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "m")
    assert_same_model(from_pretrained("auto", put(remote, tmp_path / "m", "adapted")), theirs)


def test_tokenizers(remote: servers.Remote, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nwater\n##y")
    made = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    made.save_pretrained(tmp_path / "t")
    transformers.BertConfig(vocab_size=7).save_pretrained(tmp_path / "t")
    url = put(remote, tmp_path / "t", "tokenizer")
    ours = transformers.AutoTokenizer.from_pretrained(local_files(url))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    assert ours("watery water")["input_ids"] == theirs("watery water")["input_ids"]


def test_diffusers(remote: servers.Remote, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    import test_engine_diffusers as tiny
    from penstock.integrations.diffusers import from_pretrained

    made = diffusers.StableDiffusionPipeline(
        vae=randomise(tiny.vae()),
        text_encoder=randomise(tiny.text_encoder()),
        unet=randomise(tiny.unet()),
        scheduler=diffusers.DDIMScheduler(),
        tokenizer=tiny.tokenizer(tmp_path / "tokenizer"),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    made.save_pretrained(tmp_path / "sd")
    url = put(remote, tmp_path / "sd", "sd")
    ours = from_pretrained(diffusers.DiffusionPipeline, url)
    theirs = diffusers.DiffusionPipeline.from_pretrained(str(tmp_path / "sd"))
    for part in ("vae", "unet", "text_encoder"):
        assert_same_model(getattr(ours, part), getattr(theirs, part))
    assert type(ours.tokenizer) is type(theirs.tokenizer)
    assert ours.scheduler.config == theirs.scheduler.config
    assert ours.config._name_or_path == url

    # As the manual has it: diffusers makes a model of tensors that Penstock has loaded.
    state = penstock.open(f"{url}vae/diffusion_pytorch_model.safetensors").load(device="cpu")
    single = diffusers.AutoencoderKL.from_single_file(state, config=str(tmp_path / "sd" / "vae"), device="cpu")
    assert_same_model(single, theirs.vae)


def test_peft(remote: servers.Remote, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from penstock.integrations.peft import from_pretrained

    made = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    made.save_pretrained(tmp_path / "a")
    url = put(remote, tmp_path / "a", "adapter")
    theirs = peft.PeftModel.from_pretrained(randomise(llama()), tmp_path / "a")
    assert_same_model(from_pretrained(randomise(llama()), url), theirs)


def test_storage_options_lead_to_configurations_and_weights(
    server: servers.Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diffusers, peft = pytest.importorskip("diffusers"), pytest.importorskip("peft")
    import test_engine_diffusers as tiny
    from penstock.integrations import diffusers as of_diffusers
    from penstock.integrations import peft as of_peft
    from penstock.integrations import transformers as of_transformers

    if server.root.startswith("http"):
        pytest.skip("web servers have no options")
    setting = server.environment
    options = {"key": setting["AWS_ACCESS_KEY_ID"], "secret": setting["AWS_SECRET_ACCESS_KEY"]}
    options["endpoint_url"] = setting["AWS_ENDPOINT_URL"]
    servers.forget_settings(monkeypatch, "AWS_")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    model = randomise(llama())
    model.save_pretrained(tmp_path / "m")
    url = put(server, tmp_path / "m", "with-options")
    assert_same_model(of_transformers.from_pretrained("auto", url, storage_options=options), model)
    config = transformers.AutoConfig.from_pretrained(local_files(url, storage_options=options))
    assert config.vocab_size == model.config.vocab_size

    vae = randomise(tiny.vae())
    vae.save_pretrained(tmp_path / "sd" / "vae")
    url = put(server, tmp_path / "sd", "vae-with-options")
    ours = of_diffusers.from_pretrained(diffusers.AutoencoderKL, url, subfolder="vae", storage_options=options)
    assert_same_model(ours, vae)

    made = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    made.save_pretrained(tmp_path / "a")
    url = put(server, tmp_path / "a", "adapter-with-options")
    theirs = peft.PeftModel.from_pretrained(randomise(llama()), tmp_path / "a")
    assert_same_model(of_peft.from_pretrained(randomise(llama()), url, storage_options=options), theirs)
    added = of_peft.from_pretrained(randomise(llama()), url, storage_options=options)
    of_peft.load_adapter(added, url, "second", storage_options=options)
    assert {"default", "second"} <= set(added.peft_config)

    # Without them, nobody is let in; a name on the Hub has a keyword for that; a directory needs none.
    for call in (of_transformers.from_pretrained, of_diffusers.from_pretrained):
        with pytest.raises(penstock.LocationAccessError, match="no AWS credentials"):
            call(diffusers.AutoencoderKL, url)
        with pytest.raises(penstock.ConfigError, match="Give token= instead, or write hf://org/name"):
            call(diffusers.AutoencoderKL, "org/name", storage_options=options)
    here = of_transformers.from_pretrained("auto", tmp_path / "m", storage_options=options)
    assert_same_model(here, model)


def test_safetensors_within_a_patch(remote: servers.Remote, tmp_path: Path) -> None:
    import safetensors.torch

    tensors = {"a": torch.randn(30, 40), "b": torch.arange(7)}
    penstock.save_file(tensors, tmp_path / "x.safetensors")
    remote.put("single/x.safetensors", (tmp_path / "x.safetensors").read_bytes())  # type: ignore[operator]
    with penstock.patch_safetensors():
        loaded = safetensors.torch.load_file(f"{remote.root}/single/x.safetensors")
        with safetensors.safe_open(f"{remote.root}/single/x.safetensors", "pt") as file:
            assert torch.equal(file.get_slice("a")[3:5], tensors["a"][3:5])
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_small_files_go_when_the_process_that_fetched_them_does(remote: servers.Remote, tmp_path: Path) -> None:
    remote.put("small/config.json", b'{"a": 1}')  # type: ignore[operator]
    code = (
        "import os, sys\nfrom penstock.integrations.shared.files import local_files\n"
        "directory = local_files(sys.argv[1])\n"
        "if not (child := os.fork()): sys.exit()\n"
        "os.waitpid(child, 0)\n"  # a child that ends takes nothing with it
        "assert open(directory + '/config.json').read() == '{\"a\": 1}'\nprint(directory)"
    )
    command = [sys.executable, "-c", code, f"{remote.root}/small"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.startswith(str(tmp_path))
    assert list(tmp_path.glob("penstock-files-*")) == []


def test_addresses_are_joined_before_their_signature() -> None:
    assert joined("https://host/model/?sig=a/b", "config.json") == "https://host/model/config.json?sig=a/b"
    assert joined("/models/who?", "config.json") == "/models/who?/config.json"
