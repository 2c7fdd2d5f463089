"""``trust=`` in the libraries: what is signed loads, from here and from a bucket; what was changed does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
import servers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("model_signing")
from signing_keys import new_key, write_key
from test_engine_remote import llama, put
from tiny_models import QUIET, assert_same_model, randomise

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings(*QUIET)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Remote]:
    with servers.moto(tmp_path_factory.mktemp("server")) as remote:
        yield remote


class Signed:
    """A directory that is signed when it is asked for, here or in a bucket."""

    def __init__(self, directory: Path, remote: servers.Remote | None, name: str) -> None:
        self.directory, self._remote, self._name = directory, remote, name
        self._key = write_key(new_key(), directory.parent / "key")
        self.trust = penstock.Policy(key=directory.parent / "key.pub")

    def sign(self) -> str:
        penstock.sign(self.directory, key=self._key)
        return self.place()

    def place(self) -> str:
        return str(self.directory) if self._remote is None else put(self._remote, self.directory, self._name)


@pytest.fixture(params=["here", "bucket"])
def signed(
    request: pytest.FixtureRequest, server: servers.Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Signed:
    servers.forget_settings(monkeypatch, "AWS_")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return Signed(tmp_path / "m", server if request.param == "bucket" else None, request.node.name)


def check(signed: Signed, load: Any, reference: Any, changed: list[str]) -> None:
    """Loads what is signed; then, for each of these files, what was changed in it."""
    assert_same_model(load(signed.sign()), reference)
    for name in changed:
        path = signed.directory / name
        held = path.read_bytes()
        path.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
        with pytest.raises(penstock.IntegrityError):
            load(signed.place())
        path.write_bytes(held)
    (signed.directory / "model.sig").write_text("{}")
    with pytest.raises(penstock.SignatureError):
        load(signed.place())


def test_transformers(signed: Signed) -> None:
    from penstock.integrations.transformers import from_pretrained

    randomise(llama()).save_pretrained(signed.directory, max_shard_size="20KB")
    shard = next(path.name for path in sorted(signed.directory.glob("*.safetensors")))
    theirs = transformers.LlamaForCausalLM.from_pretrained(signed.directory)
    changed = ["config.json", "generation_config.json", "model.safetensors.index.json", shard]
    check(signed, lambda path: from_pretrained("auto", path, trust=signed.trust), theirs, changed)


def test_what_is_left_to_transformers_is_verified_before(tmp_path: Path, server: servers.Remote) -> None:
    from penstock.integrations.transformers import from_pretrained

    del server
    signed = Signed(tmp_path / "m", None, "m")
    randomise(llama()).save_pretrained(signed.directory)
    theirs = transformers.LlamaForCausalLM.from_pretrained(signed.directory)

    def load(path: str) -> Any:
        return from_pretrained("auto", path, trust=signed.trust, device_map={"model": "cpu", "lm_head": "cpu"})

    check(signed, load, theirs, ["config.json", "model.safetensors"])


def test_peft(signed: Signed) -> None:
    peft = pytest.importorskip("peft")
    from penstock.integrations.peft import from_pretrained

    made = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    made.save_pretrained(signed.directory)
    torch.manual_seed(3)
    base = randomise(llama())
    import copy

    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), signed.directory)
    changed = ["adapter_config.json", "adapter_model.safetensors"]
    check(signed, lambda path: from_pretrained(copy.deepcopy(base), path, trust=signed.trust), theirs, changed)


def test_diffusers(signed: Signed) -> None:
    diffusers = pytest.importorskip("diffusers")
    import test_engine_diffusers as tiny
    from penstock.integrations.diffusers import from_pretrained

    made = diffusers.StableDiffusionPipeline(
        vae=randomise(tiny.vae()),
        text_encoder=randomise(tiny.text_encoder()),
        unet=randomise(tiny.unet()),
        scheduler=diffusers.DDIMScheduler(),
        tokenizer=tiny.tokenizer(signed.directory.parent / "tokenizer"),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    made.save_pretrained(signed.directory)
    theirs = diffusers.AutoencoderKL.from_pretrained(signed.directory, subfolder="vae")

    def of_pipeline(path: str) -> Any:
        return from_pretrained(diffusers.DiffusionPipeline, path, trust=signed.trust).vae

    def of_model(path: str) -> Any:
        return from_pretrained(diffusers.AutoencoderKL, path, subfolder="vae", trust=signed.trust)

    changed = [
        *("model_index.json", "vae/config.json", "vae/diffusion_pytorch_model.safetensors"),
        *("text_encoder/model.safetensors", "tokenizer/tokenizer_config.json"),
    ]
    check(signed, of_pipeline, theirs, changed)
    check(signed, of_model, theirs, changed[1:3])
