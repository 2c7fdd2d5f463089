"""Endpoints of S3: addressed by path and by host name, over proxies and TLS."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
import servers
from conftest import Raw, assert_bits, opened_elsewhere, raw_bytes, shard, write_raw
from services import certificate, proxy, service

pytestmark = pytest.mark.stores

_KEY, _SECRET = "sentinel-access", "sentinel-secret-key"
# Nobody resolves it but the proxy of a test.
_DOMAIN = "s3.test"
# What a part of a key may be, and what URLs, signatures and globs would make something else of.
_ODD = ["a b", "ü€漢", "100%", "%2F", "a+b", "a#b", "what?x&y", "(1)", "it's", "a~b", "{x}", "a@b;c:d,e", "$x!*"]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An object on S3, and an environment without proxies."""
    body, _ = shard(tmp_path, 0)
    with servers.s3_without_credentials(tmp_path, body, monkeypatch) as location:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", _KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", _SECRET)
        yield location


def test_tls_is_checked_against_the_bundle(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, cert = certificate(tmp_path, "DNS:localhost,IP:127.0.0.1")
    directory = tmp_path / "tls"
    directory.mkdir()
    with servers.s3(directory, "--cert", cert, "--key", str(tmp_path / "key.pem")) as remote:
        body, tensors = shard(tmp_path, 1)
        remote.put("m.safetensors", body)
        endpoint = remote.environment["AWS_ENDPOINT_URL"].replace("http://", "https://")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        with pytest.raises(penstock.StorageError, match=r"[Cc]ertificate") as raised:
            penstock.open(bucket)
        assert "AWS_CA_BUNDLE" in (raised.value.remedy or "")
        for path, refused in ((cert, None), (tmp_path / "none.pem", f"ca_bundle={tmp_path}/none.pem")):
            profile = tmp_path / f"{Path(path).stem}.config"
            profile.write_text(f"[default]\nca_bundle = {path}\n")
            with monkeypatch.context() as patched:
                patched.setenv("AWS_CONFIG_FILE", str(profile))
                if refused is None:
                    assert_bits(penstock.open(bucket).load(framework="np"), tensors)
                    continue
                with pytest.raises(penstock.ConfigError, match=refused):
                    penstock.open(bucket)
                # A variable comes first.
                patched.setenv("AWS_CA_BUNDLE", cert)
                assert_bits(penstock.open(bucket).load(framework="np"), tensors)


def test_a_proxy_gets_its_user_and_what_it_refuses_is_told(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with service(lambda _: (407, "")) as (url, asked):
        by_proxy = {"HTTP_PROXY": url.replace("http://", "http://user:SENTINEL-password@")}
        told = opened_elsewhere(bucket, by_proxy)
        assert "407" in told
        assert "The proxy wants to know who asks" in told
        assert "SENTINEL" not in told
        expected = "Basic " + base64.b64encode(b"user:SENTINEL-password").decode()
        assert asked[0].headers["Proxy-Authorization"] == expected
        assert asked[0].path.startswith("http://127.0.0.1:")
        # What is excepted is reached without it: by name, by network, all.
        asked.clear()
        for excepted in ("127.0.0.1", "example.com, 127.0.0.0/8", "*"):
            assert opened_elsewhere(bucket, {**by_proxy, "NO_PROXY": excepted}) == "opened\n", excepted
        assert not asked


_READ = """
import hashlib, json, sys
import penstock
where, to = sys.argv[1:]
ckpt = penstock.open(where)
loaded = ckpt.load(framework="np")
pulled = penstock.pull(where, to)
print(json.dumps({
    "objects": [location for location, _ in ckpt.files],
    "tensors": {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in loaded.items()},
    "files": {path: hashlib.sha256((pulled.directory / path).read_bytes()).hexdigest() for path, *_ in pulled.files},
}))
"""


@pytest.mark.parametrize("name", [servers.BUCKET, "a.bucket.with.dots"])
@pytest.mark.parametrize("by", ["host", "path"])
def test_buckets_are_addressed_by_host_name_or_path(
    name: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gateway").mkdir()
    model = tmp_path / "gateway" / name / "odd model+1"
    tensors, files = {}, {}
    with servers.s3(tmp_path / "gateway", "--virtual-domain", _DOMAIN) as remote:
        for number, part in enumerate(_ODD):
            # More than opening brings, of one of them.
            shape = (640, 257) if number == 0 else (3, 5)
            held = {f"t{number}": Raw("F32", shape, raw_bytes("F32", shape, number))}
            body = write_raw(tmp_path / "m.safetensors", held).read_bytes()
            for path in (f"{part}.safetensors", f"{part}/{part}.bin"):
                (model / path).parent.mkdir(parents=True, exist_ok=True)
                (model / path).write_bytes(body)
                files[path] = hashlib.sha256(body).hexdigest()
            tensors[f"t{number}"] = hashlib.sha256(held[f"t{number}"].data).hexdigest()
        port = int(remote.environment["AWS_ENDPOINT_URL"].rpartition(":")[2])
        servers.forget_settings(monkeypatch)
        (tmp_path / "config").write_text("[default]\ns3 =\n  max_queue_size = 9\n")
        with proxy({_DOMAIN: port}) as (url, asked):
            environment = remote.environment | {
                "AWS_CONFIG_FILE": str(tmp_path / "config"),
                "AWS_ENDPOINT_URL": f"http://{_DOMAIN}:{port}",
                "HTTP_PROXY": url,
            }
            if by == "host":
                environment["AWS_VIRTUAL_HOSTED_STYLE_REQUEST"] = "true"
            where = f"s3://{name}/odd model+1/"
            command = [sys.executable, "-c", _READ, where, str(tmp_path / "to")]
            environment = {**os.environ, **environment}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["objects"] == sorted(f"{where}{part}.safetensors" for part in _ODD)
        assert told["tensors"] == tensors
        assert told["files"] == files
        root = f"http://{_DOMAIN}:{port}/{name}" if by == "path" else f"http://{name}.{_DOMAIN}:{port}"
        # Listings and objects, all of them.
        listings = [request for request in asked if request.startswith((f"{root}?", f"{root}/?"))]
        read = [request for request in asked if request.startswith(f"{root}/odd%20model%2B1/")]
        assert listings
        assert len(read) >= 3 * len(_ODD)
        assert len(listings) + len(read) == len(asked)
