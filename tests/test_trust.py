"""Signatures on stores, in the command, in the libraries and in what engines are configured with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
import servers
from conftest import assert_bits

pytest.importorskip("model_signing")

from signed_models import MANIFEST, Model, refused, sign_by_library
from signing_keys import new_key, write_key


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Remote]:
    with servers.moto(tmp_path_factory.mktemp("server")) as remote:
        yield remote


@pytest.fixture
def s3(bucket: servers.Remote, monkeypatch: pytest.MonkeyPatch) -> servers.Remote:
    servers.forget_settings(monkeypatch, "AWS_")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    return bucket


def upload(remote: servers.Remote, directory: Path, prefix: str) -> str:
    put: Any = remote.put
    for path in directory.rglob("*"):
        if path.is_file():
            put(f"{prefix}/{path.relative_to(directory)}", path.read_bytes())
    return f"{remote.root}/{prefix}"


def command(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", *map(str, arguments)], capture_output=True, text=True, check=False
    )


class TestStores:
    def test_a_signed_checkpoint_loads_from_a_bucket_and_reads_each_byte_once(
        self, s3: servers.Remote, model: Model
    ) -> None:
        model.sign()
        url = upload(s3, model.directory, "signed")
        ckpt = penstock.open(f"{url}/", trust=model.policy)
        assert_bits(ckpt.load(framework="np"), model.tensors)
        assert ckpt.stats is not None
        assert ckpt.stats.verified_bytes == ckpt.stats.network_bytes == sum(nbytes for _, nbytes in ckpt.files)
        assert penstock.load_file(f"{url}/model-0.safetensors", framework="np", trust=model.policy)

    def test_a_checkpoint_that_others_signed_is_verified_whole(self, s3: servers.Remote, model: Model) -> None:
        sign_by_library(model)
        url = upload(s3, model.directory, "others")
        ckpt = penstock.open(url, trust=model.policy)
        assert_bits(ckpt.load(framework="np"), model.tensors)
        data = bytearray(model.shard.read_bytes())
        data[-1] ^= 1
        put: Any = s3.put
        put("others/model-0.safetensors", bytes(data))
        # What was opened knows its version; what is opened now is compared with the signature.
        with pytest.raises((penstock.LocationChangedError, penstock.IntegrityError)):
            ckpt.load(framework="np")
        refused("signature_mismatch", lambda: penstock.open(url, trust=model.policy))

    def test_attacks_on_a_bucket(self, s3: servers.Remote, model: Model, tmp_path: Path) -> None:
        put: Any = s3.put
        model.sign()
        other = Model(tmp_path / "other", seed=50)
        penstock.manifest(other.directory)
        url = upload(s3, model.directory, "attacked")
        put(f"attacked/{MANIFEST}", (other.directory / MANIFEST).read_bytes())
        refused("signature_mismatch", lambda: penstock.open(url, trust=model.policy))
        put(f"attacked/{MANIFEST}", (model.directory / MANIFEST).read_bytes())
        put("attacked/model-9.safetensors", model.shard.read_bytes())
        refused("not_signed", lambda: penstock.open(url, trust=model.policy))
        put("attacked/model.sig", b"no signature")
        refused("bad_signature", lambda: penstock.open(url, trust=model.policy))
        model.signature.unlink()
        url = upload(s3, model.directory, "without")
        refused("no_signature", lambda: penstock.open(url, trust=model.policy))

    def test_verify_reads_all_of_a_bucket(self, s3: servers.Remote, model: Model) -> None:
        made = model.sign(version="3")
        url = upload(s3, model.directory, "verified")
        done = penstock.verify(f"{url}/", trust=model.policy)
        assert (done.files, done.nbytes, done.version, done.digest) == (made.files, made.nbytes, "3", made.digest)
        # What penstock.open has no use for, too.
        put: Any = s3.put
        put("verified/tokenizer.json", b"{ }")
        error = refused("signature_mismatch", lambda: penstock.verify(url, trust=model.policy))
        assert error.location == f"{url}/tokenizer.json"

    def test_a_server_that_cannot_list_serves_what_is_signed(self, model: Model, tmp_path: Path) -> None:
        model.sign()
        with servers.web(tmp_path / "web") as remote:
            url = upload(remote, model.directory, "model")
            index = f"{url}/model.safetensors.index.json"
            assert_bits(penstock.open(index, trust=model.policy).load(framework="np"), model.tensors)
            assert penstock.verify(index, trust=model.policy).files
            put: Any = remote.put
            put("model/config.json", b"{}")
            refused("signature_mismatch", lambda: penstock.verify(index, trust=model.policy))

    def test_a_signed_repository_of_the_hub_loads(
        self, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from hub import hub

        model.sign(version="2")
        files = {
            str(path.relative_to(model.directory)): path.read_bytes()
            for path in model.directory.rglob("*")
            if path.is_file()
        }
        servers.forget_settings(monkeypatch, "HF_")
        with hub() as running:
            monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
            monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
            commit = running.push("org/model", files)
            for place in ("", "@main", f"@{commit}"):
                ckpt = penstock.open(f"hf://org/model{place}", trust=model.policy)
                assert_bits(ckpt.load(framework="np"), model.tensors)
            assert len(penstock.open("hf://org/model/model-1.safetensors", trust=model.policy)) == 3
            assert penstock.verify("hf://org/model", trust=model.policy).version == "2"
            running.push("org/model", {**files, "config.json": b"{}"})
            refused("signature_mismatch", lambda: penstock.verify("hf://org/model", trust=model.policy))
            running.push("org/model", {**files, "modeling.py": b""})
            refused("not_signed", lambda: penstock.open("hf://org/model", trust=model.policy))

    def test_small_files_that_are_fetched_are_signed(self, s3: servers.Remote, model: Model) -> None:
        from penstock.integrations.shared.files import local_files

        model.sign()
        url = upload(s3, model.directory, "small")
        place = local_files(url, trust=model.policy)
        assert Path(place, "config.json").read_bytes() == (model.directory / "config.json").read_bytes()
        put: Any = s3.put
        put("small/config.json", b"{}")
        refused("signature_mismatch", lambda: local_files(url, trust=model.policy))


class TestVerify:
    def test_without_a_policy_files_are_compared_with_the_manifest(self, model: Model) -> None:
        with pytest.raises(penstock.IntegrityError) as raised:
            penstock.verify(model.directory)
        assert raised.value.code == "no_manifest"
        penstock.manifest(model.directory)
        done = penstock.verify(model.directory)
        assert (done.signer, done.digest) == (None, None)
        assert "adapter/adapter_model.safetensors" in done.files
        (model.directory / "tokenizer.json").write_text("{ }")
        with pytest.raises(penstock.IntegrityError, match="not what the manifest says") as raised:
            penstock.verify(model.directory)
        assert not isinstance(raised.value, penstock.SignatureError)

    def test_the_manifest_leaves_the_signature_out(self, model: Model) -> None:
        model.sign()
        signed = (model.directory / MANIFEST).read_bytes()
        penstock.manifest(model.directory)
        assert (model.directory / MANIFEST).read_bytes() == signed
        by_manifest, by_signature = (
            penstock.verify(model.directory),
            penstock.verify(model.directory, trust=model.policy),
        )
        assert sorted([*by_manifest.files, MANIFEST]) == by_signature.files

    def test_a_manifest_that_disagrees_with_the_signature_is_told(self, model: Model) -> None:
        model.sign(hash="blake3")
        held = (model.directory / "config.json").read_bytes()
        (model.directory / "config.json").write_text("{}")
        penstock.manifest(model.directory)
        (model.directory / "config.json").write_bytes(held)
        refused("signature_mismatch", lambda: penstock.verify(model.directory, trust=model.policy))

    def test_a_number_of_readers_is_checked(self, model: Model) -> None:
        model.sign()
        with pytest.raises(penstock.ConfigError, match="readers"):
            penstock.verify(model.directory, trust=model.policy, readers=0)


class TestCommand:
    def test_sign_verify_and_load(self, model: Model, tmp_path: Path) -> None:
        done = command("sign", model.directory, "--key", model.private, "--version", "1.2", "--json")
        assert done.returncode == 0, done.stderr
        digest = json.loads(done.stdout)["digest"]
        done = command("verify", model.directory, "--key", model.public, "--digest", digest, "--least-version", "1.2")
        assert done.returncode == 0, done.stderr
        assert "signed by the key" in done.stdout
        assert digest in done.stdout
        policy = tmp_path / "policy.json"
        policy.write_text(json.dumps({"key": "release.pub"}))
        for action in ("verify", "load"):
            more = ("--framework", "np") if action == "load" else ()
            assert command(action, model.directory, "--trust", policy, *more).returncode == 0
        (model.directory / "config.json").write_text("{}")
        for action in ("verify", "load"):
            more = ("--framework", "np") if action == "load" else ()
            done = command(action, model.directory, "--trust", policy, "--json", *more)
            assert done.returncode == 10
            assert json.loads(done.stdout)["error"]["code"] == "signature_mismatch"

    def test_each_failure_has_its_code(self, model: Model, tmp_path: Path) -> None:
        assert command("sign", model.directory).returncode == 8
        assert command("sign", model.directory, "--key", tmp_path / "missing").returncode == 8
        assert command("verify", model.directory, "--key", model.public).returncode == 10
        assert command("verify", model.directory).returncode == 9
        assert command("verify", model.directory, "--issuer", "https://x").returncode == 8
        both = command("verify", model.directory, "--trust", "x.json", "--key", model.public)
        assert both.returncode == 8
        assert "--key" in both.stderr

    def test_a_password_comes_from_a_file_and_is_not_shown(self, model: Model, tmp_path: Path) -> None:
        private = write_key(new_key(), tmp_path / "locked", "pass wört".encode())
        (tmp_path / "password").write_text("pass wört\n")
        arguments = ("sign", model.directory, "--key", private, "--password-file")
        assert command(*arguments, tmp_path / "password").returncode == 0
        (tmp_path / "wrong").write_text("donkey")
        done = command(*arguments, tmp_path / "wrong", "--debug")
        assert done.returncode == 8
        assert "donkey" not in done.stderr


class TestEngines:
    def test_the_extra_configuration_says_whose_signatures_are_trusted(self, model: Model) -> None:
        from penstock.integrations.shared.extra_config import ExtraConfig

        given = json.loads(json.dumps({"verify": "require", "trust": {"key": str(model.public)}}))
        extra = ExtraConfig.of(given)
        assert extra.load_options().verify == "require"
        refused("no_signature", lambda: extra.open(str(model.directory)))
        model.sign()
        files = sorted(map(str, model.directory.glob("*.safetensors")))
        assert_bits(extra.open(files).load(framework="np"), model.tensors)
        for wrong in ({"trust": {"nobody": 1}}, {"trust": {}}, {"trust": 7}, {"verify": "maybe"}):
            with pytest.raises(penstock.ConfigError):
                ExtraConfig.of(wrong)

    def test_copies_of_small_files_that_an_engine_fetched_are_signed(
        self, s3: servers.Remote, model: Model, tmp_path: Path
    ) -> None:
        from penstock.integrations.shared.extra_config import ExtraConfig

        model.sign()
        url = upload(s3, model.directory, "engine")
        extra = ExtraConfig.of({"trust": {"key": str(model.public)}})
        copies = tmp_path / "copies"
        copies.mkdir()
        shutil.copy(model.directory / "config.json", copies)
        assert extra.open(url, [copies])
        assert extra.open([f"{url}/model-0.safetensors"], [copies])
        (copies / "config.json").write_text("{}")
        refused("signature_mismatch", lambda: extra.open(url, [copies]))
        (copies / "config.json").unlink()
        (copies / "modeling.py").write_text("")
        refused("not_signed", lambda: extra.open(url, [copies]))

    def test_ranges_of_files_are_signed_where_the_process_says_so(
        self, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from penstock import _native
        from penstock.checkpoint import signed_by

        (tmp_path / "policy.json").write_text(json.dumps({"key": "release.pub"}))
        monkeypatch.setenv("PENSTOCK_TRUST", str(tmp_path / "policy.json"))
        model.sign()
        signed = signed_by(None, [str(model.shard)], None)
        made = _native.Checkpoint.of_ranges([(str(model.shard), [(0, 8)])], penstock.LoadOptions(), None, signed)
        assert len(made) == 1
        other = tmp_path / "other.safetensors"
        shutil.copy(model.shard, other)
        with pytest.raises(penstock.SignatureError):
            _native.Checkpoint.of_ranges([(str(other), [(0, 8)])], penstock.LoadOptions(), None, signed)
