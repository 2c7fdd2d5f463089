"""Credentials of S3 from every place that AWS's own tools know, and proxies, against imitations of the services."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

import penstock
import servers
from conftest import Raw, raw_bytes, write_raw

_KEY, _SECRET = "sentinel-access", "sentinel-secret-key"


class Asked(NamedTuple):
    """A request that a service was asked."""

    method: str
    path: str
    headers: http.client.HTTPMessage
    body: str


# A status and a body; 206 is a whole object, as Azure's storage answers the range that opens it.
Answer = Callable[[Asked], "tuple[int, str | bytes]"]


@contextlib.contextmanager
def service(answer: Answer) -> Iterator[tuple[str, list[Asked]]]:
    """Runs an HTTP service; yields its URL and what it was asked so far."""
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            asked.append(Asked(self.command, self.path, self.headers, body))
            status, said = answer(asked[-1])
            text = said.encode() if isinstance(said, str) else said
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            if status == 206:
                self.send_header("Content-Range", f"bytes 0-{len(text) - 1}/{len(text)}")
                self.send_header("ETag", '"1"')
                self.send_header("Last-Modified", "Sat, 21 Nov 2026 00:00:00 GMT")
            # Of the instance's session tokens; the others do not mind it.
            self.send_header("X-Aws-Ec2-Metadata-Token-Ttl-Seconds", "21600")
            self.end_headers()
            self.wfile.write(text)

        do_PUT = do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An object on S3, and an environment without credentials or proxies."""
    for name in os.environ:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    tensors = {"a": Raw("F32", (4,), raw_bytes("F32", (4,), 1))}
    body = write_raw(tmp_path / "m.safetensors", tensors).read_bytes()
    with servers.s3_without_credentials(tmp_path, body, monkeypatch) as location:
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("HOME", str(tmp_path))
        yield location


def of_sts(action: str) -> str:
    """What AWS's token service answers: the keys that the gateway knows."""
    return (
        f'<{action}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><{action}Result><AssumedRoleUser><Arn>arn:aws:sts::123456789012:assumed-role/r/s</Arn>'
        f"<AssumedRoleId>i</AssumedRoleId></AssumedRoleUser><Credentials><AccessKeyId>{_KEY}</AccessKeyId>"
        f"<SecretAccessKey>{_SECRET}</SecretAccessKey><SessionToken></SessionToken>"
        f"<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></{action}Result></{action}Response>"
    )


def test_a_role_is_assumed_with_the_keys_of_another_profile(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(
        "[profile base]\naws_access_key_id = base\naws_secret_access_key = SENTINEL-base\n"
        "[profile role]\nrole_arn = arn:aws:iam::123456789012:role/reader\nsource_profile = base\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "role")
    with service(lambda _: (200, of_sts("AssumeRole"))) as (url, asked):
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        assert len(penstock.open(bucket)) == 1
    assert len(asked) == 1
    assert "role%2Freader" in asked[0].body
    assert "Credential=base/" in asked[0].headers["Authorization"]


def test_a_web_identity_is_shown_to_the_token_service(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("SENTINEL-identity")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/pod")
    with service(lambda _: (200, of_sts("AssumeRoleWithWebIdentity"))) as (url, asked):
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        assert len(penstock.open(bucket)) == 1
        assert "WebIdentityToken=SENTINEL-identity" in asked[0].body
    # And where it is refused, the error names no token.
    refusal = "<ErrorResponse><Error><Code>AccessDenied</Code><Message>not this role</Message></Error></ErrorResponse>"
    with service(lambda _: (403, refusal)) as (url, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        with pytest.raises(penstock.ObjectAccessError, match=r"AccessDenied|not this role") as raised:
            penstock.open(bucket)
    assert "SENTINEL" not in f"{raised.value} {vars(raised.value)}"


def test_an_instances_role_is_asked_for_with_a_session_token(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    role = {
        "Code": "Success",
        "Type": "AWS-HMAC",
        "AccessKeyId": _KEY,
        "SecretAccessKey": _SECRET,
        "Token": "",
        "LastUpdated": "2026-01-01T00:00:00Z",
        "Expiration": "2099-01-01T00:00:00Z",
    }

    def metadata(asked: Asked) -> tuple[int, str]:
        if asked.path == "/latest/api/token":
            return (200, "SESSION") if asked.method == "PUT" else (405, "")
        if asked.headers["x-aws-ec2-metadata-token"] != "SESSION":
            return 401, ""
        return (200, json.dumps(role)) if asked.path.rstrip("/").endswith("/reader") else (200, "reader")

    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    with service(metadata) as (url, asked):
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
        assert len(penstock.open(bucket)) == 1
    assert asked[0].method == "PUT"


def test_a_pods_identity_is_asked_for_with_its_token(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {
        "AccessKeyId": _KEY,
        "SecretAccessKey": _SECRET,
        "Token": "",
        "Expiration": "2099-01-01T00:00:00Z",
    }
    (tmp_path / "pod-token").write_text("pod-token")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "pod-token"))
    with service(lambda _: (200, json.dumps(answer))) as (url, asked):
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/v1/credentials")
        assert len(penstock.open(bucket)) == 1
    assert [(one.path, one.headers["Authorization"]) for one in asked] == [("/v1/credentials", "pod-token")]


def test_a_profile_that_is_not_there_is_named(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("[profile other]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(penstock.ObjectAccessError, match="nobody") as raised:
        penstock.open(bucket)
    assert "AWS_PROFILE" in (raised.value.remedy or "")


@pytest.mark.parametrize("left", ["an expired token", "nothing"])
def test_an_sso_session_that_is_over_says_to_sign_in(
    left: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(
        "[profile sso]\nsso_session = mine\nsso_account_id = 1\nsso_role_name = reader\n"
        "[sso-session mine]\nsso_region = us-east-1\nsso_start_url = https://example.awsapps.com/start\n"
    )
    if left != "nothing":
        cache = tmp_path / ".aws" / "sso" / "cache"
        cache.mkdir(parents=True)
        token = {"accessToken": "SENTINEL", "expiresAt": "2020-01-01T00:00:00Z", "region": "us-east-1"}
        # The name that AWS's tools give to it.
        (cache / f"{hashlib.sha1(b'mine', usedforsecurity=False).hexdigest()}.json").write_text(json.dumps(token))
    monkeypatch.setenv("AWS_PROFILE", "sso")
    with pytest.raises(penstock.ObjectAccessError, match=r"(?i)sso|token") as raised:
        penstock.open(bucket)
    assert "aws sso login" in (raised.value.remedy or "")
    assert "SENTINEL" not in f"{raised.value} {vars(raised.value)}"


def test_the_azure_command_line_gives_tokens_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": Raw("F32", (4,), raw_bytes("F32", (4,), 1))}
    body = write_raw(tmp_path / "m.safetensors", tensors).read_bytes()
    command = tmp_path / "bin" / "az"
    command.parent.mkdir()
    answer = {"accessToken": "SENTINEL-token", "expiresOn": "2099-01-01 00:00:00.000000", "tokenType": "Bearer"}
    command.write_text(f"#!/bin/sh\necho '{json.dumps(answer | {'subscription': 's', 'tenant': 't'})}'\n")
    command.chmod(0o755)
    for name in os.environ:
        if name.startswith(("AZURE_", "IDENTITY_", "MSI_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("AZURE_USE_AZURE_CLI", "true")

    def storage(asked: Asked) -> tuple[int, bytes]:
        return (206, body) if asked.headers["Authorization"] == "Bearer SENTINEL-token" else (403, b"")

    with service(storage) as (url, _):
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=acc;BlobEndpoint={url}")
        assert len(penstock.open("az://container/m.safetensors")) == 1
        command.write_text("#!/bin/sh\necho 'ERROR: Please run az login to setup account.' >&2\nexit 1\n")
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=other;BlobEndpoint={url}")
        with pytest.raises(penstock.ObjectAccessError, match="az login") as raised:
            penstock.open("az://container/m.safetensors")
    assert "SENTINEL" not in f"{raised.value} {vars(raised.value)}"


def test_a_proxy_gets_its_user_and_what_it_refuses_is_told(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", _KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", _SECRET)
    with service(lambda _: (407, "")) as (url, asked):
        proxy = {"HTTP_PROXY": url.replace("http://", "http://user:SENTINEL-password@")}
        told = opened_elsewhere(bucket, proxy)
        assert "407" in told
        assert "The proxy wants to know who asks" in told
        assert "SENTINEL" not in told
        expected = "Basic " + base64.b64encode(b"user:SENTINEL-password").decode()
        assert asked[0].headers["Proxy-Authorization"] == expected
        assert asked[0].path.startswith("http://127.0.0.1:")
        # What is excepted is reached without it: by name, by network, all.
        asked.clear()
        for excepted in ("127.0.0.1", "example.com, 127.0.0.0/8", "*"):
            assert opened_elsewhere(bucket, {**proxy, "NO_PROXY": excepted}) == "opened\n", excepted
        assert not asked


def opened_elsewhere(bucket: str, environment: dict[str, str]) -> str:
    """What a process of its own says when it opens the object: a process reads the variables of proxies once."""
    code = (
        "import penstock, sys\ntry:\n    penstock.open(sys.argv[1])\n    print('opened')\n"
        "except penstock.PenstockError as error:\n    print(error)"
    )
    command = [sys.executable, "-c", code, bucket]
    environment = {**os.environ, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout
