"""A checkpoint with keys to sign it, for tests of signatures."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from conftest import Raw, raw_bytes, write_raw
from signing_keys import new_key, write_key

MANIFEST = "penstock-manifest.blake3"
SHAPES = {"embed": (1100, 512), "norm": (3,), "big": (2, 1024, 700)}


class Model:
    """A checkpoint of two shards in a directory with small files and a folder, and keys to sign it with."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.directory = root / "model"
        (self.directory / "adapter").mkdir(parents=True)
        self.tensors: dict[str, Raw] = {}
        weight_map = {}
        for number in range(2):
            name = f"model-{number}.safetensors"
            held = {
                f"{number}.{tensor}": Raw("F32", shape, raw_bytes("F32", shape, seed + number * 10 + place))
                for place, (tensor, shape) in enumerate(SHAPES.items())
            }
            write_raw(self.directory / name, held, {"format": "pt"})
            self.tensors |= held
            weight_map |= dict.fromkeys(held, name)
        (self.directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        (self.directory / "config.json").write_text(json.dumps({"seed": seed}))
        (self.directory / "tokenizer.json").write_text("{}")
        adapter = {"lora": Raw("F32", (16,), raw_bytes("F32", (16,), seed))}
        write_raw(self.directory / "adapter" / "adapter_model.safetensors", adapter)
        self.private = write_key(new_key(), root / "release")
        self.public = root / "release.pub"
        self.policy = penstock.Policy(key=self.public)

    @property
    def shard(self) -> Path:
        return self.directory / "model-0.safetensors"

    @property
    def signature(self) -> Path:
        return self.directory / "model.sig"

    def sign(self, **how: Any) -> penstock.SignedDirectory:
        return penstock.sign(self.directory, key=self.private, **how)

    def load(self, **policy: Any) -> dict[str, Any]:
        trust = penstock.Policy(**({"key": self.public} | policy))
        return penstock.open(self.directory, trust=trust).load(framework="np")


def library_cli(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """The command of model-signing itself."""
    command = [sys.executable, "-m", "model_signing", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def sign_by_library(model: Model, how: str = "sha256", **serialization: Any) -> None:
    """Signs as others do: no manifest, nothing of Penstock."""
    import model_signing as library

    hashing = library.hashing.Config().set_ignored_paths(paths=["model.sig"])
    if how == "shards":
        hashing.use_shard_serialization(shard_size=700_001, **serialization)
    else:
        hashing.use_file_serialization(hashing_algorithm=how, **serialization)
    signer = library.signing.Config().use_elliptic_key_signer(private_key=model.private)
    signer.set_hashing_config(hashing).sign(model.directory, model.signature)


def verify_by_library(model: Model) -> None:
    import model_signing as library

    library.verifying.Config().use_elliptic_key_verifier(public_key=model.public).verify(
        model.directory, model.signature
    )


def refused(code: str, action: Callable[[], Any]) -> penstock.SignatureError:
    with pytest.raises(penstock.SignatureError) as raised:
        action()
    assert raised.value.code == code, raised.value
    return raised.value
