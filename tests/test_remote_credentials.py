"""Credentials of S3 from every place that AWS's own tools know; Azure's command line. Services are imitated."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

import penstock
import servers
from conftest import Raw, assert_bits, raw_bytes, shard, write_raw
from services import Asked, service

pytestmark = pytest.mark.stores

_KEY, _SECRET = "sentinel-access", "sentinel-secret-key"


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An object of three tensors on S3, more than opening it brings, and an environment without credentials."""
    body, _ = shard(tmp_path, 0)
    with servers.s3_without_credentials(tmp_path, body, monkeypatch) as location:
        yield location


def test_a_profile_is_used(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = os.environ["AWS_ENDPOINT_URL_S3"]
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    (tmp_path / "credentials").write_text(
        "[weights]\naws_access_key_id = sentinel-access\naws_secret_access_key = sentinel-secret-key\n"
    )
    # The endpoint of S3 alone, which comes before that of all services.
    (tmp_path / "config").write_text(
        "[profile weights]\nregion = us-east-1\nservices = mine\nendpoint_url = http://127.0.0.1:1\n"
        f"[services mine]\ns3 =\n  endpoint_url = {endpoint}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "weights")
    assert len(penstock.open(bucket)) == 3


def test_a_credential_process_is_asked(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"Version": 1, "AccessKeyId": "sentinel-access", "SecretAccessKey": "sentinel-secret-key"}
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {tmp_path}/answer.json\n")
    assert len(penstock.open(bucket)) == 3
    # And its secret is nobody's business.
    (tmp_path / "answer.json").write_text(json.dumps(answer | {"SecretAccessKey": "SENTINEL-wrong"}))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with pytest.raises(penstock.LocationAccessError, match="credentials: a credential process") as raised:
        penstock.open(bucket)
    assert "SENTINEL" not in f"{raised.value} {vars(raised.value)}"


def test_a_containers_credential_service_is_asked(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with servers.web(tmp_path) as service:
        answer = {
            "AccessKeyId": "sentinel-access",
            "SecretAccessKey": "sentinel-secret-key",
            "Token": "",
            "Expiration": "2099-01-01T00:00:00Z",
        }
        service.put("credentials", json.dumps(answer).encode())
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{service.root}/credentials")
        ckpt = penstock.open(bucket)
        ckpt.load(framework="np")
        # Kept until they expire.
        assert service.requests == ["GET /credentials"]


def test_no_credentials_are_told_at_once(bucket: str) -> None:
    with pytest.raises(penstock.LocationAccessError, match="no AWS credentials were found") as raised:
        penstock.open(bucket)
    assert "AWS_SKIP_SIGNATURE" in (raised.value.remedy or "")


@pytest.mark.parametrize(
    ("given", "missing"),
    [("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID")],
)
def test_half_of_a_key_is_told(bucket: str, monkeypatch: pytest.MonkeyPatch, given: str, missing: str) -> None:
    monkeypatch.setenv(given, "SENTINEL")
    with pytest.raises(penstock.LocationAccessError, match=f"{given} is set, and {missing} is not") as raised:
        penstock.open(bucket)
    assert "SENTINEL" not in str(raised.value)


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
        assert len(penstock.open(bucket)) == 3
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
        assert len(penstock.open(bucket)) == 3
        assert "WebIdentityToken=SENTINEL-identity" in asked[0].body
    # And where it is refused, the error names no token.
    refusal = "<ErrorResponse><Error><Code>AccessDenied</Code><Message>not this role</Message></Error></ErrorResponse>"
    with service(lambda _: (403, refusal)) as (url, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        with pytest.raises(penstock.LocationAccessError, match=r"AccessDenied|not this role") as raised:
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
        assert len(penstock.open(bucket)) == 3
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
        assert len(penstock.open(bucket)) == 3
    assert [(one.path, one.headers["Authorization"]) for one in asked] == [("/v1/credentials", "pod-token")]


def test_a_profile_that_is_not_there_is_named(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("[profile other]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(penstock.ConfigError, match="AWS_PROFILE=nobody: AWS has no profile of this name") as raised:
        penstock.open(bucket)
    assert "other" in (raised.value.remedy or "")


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
    with pytest.raises(penstock.LocationAccessError, match=r"(?i)sso|token") as raised:
        penstock.open(bucket)
    assert "aws sso login" in (raised.value.remedy or "")
    assert "SENTINEL" not in f"{raised.value} {vars(raised.value)}"


# Keys that are good for some requests only: what an S3 does whose session tokens expire.
_EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


def _key_of(headers: Message) -> str:
    return headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]


def test_keys_that_expire_in_the_middle_of_a_load_are_fetched_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.forget_settings(monkeypatch)
    with servers.web(tmp_path) as service, servers.web(tmp_path) as remote:
        assert service.requests is not None
        assert service.refuse is not None
        assert remote.refuse is not None

        def issue(number: int) -> None:
            answer = {
                "AccessKeyId": f"key-{number}",
                "SecretAccessKey": "SENTINEL-secret-key",
                "Token": f"SENTINEL-session-{number}",
                "Expiration": "2099-01-01T00:00:00Z",
            }
            service.put("credentials", json.dumps(answer).encode())

        served: list[str] = []
        good = {"key-0"}

        def expire(headers: Message) -> tuple[int, bytes] | None:
            key = _key_of(headers)
            if len(served) >= 6 and "key-0" in good:
                # Sooner than it was said to.
                good.discard("key-0")
                good.add("key-1")
            if key not in good:
                return 400, _EXPIRED
            served.append(key)
            return None

        issue(0)
        body, tensors = shard(tmp_path, 0, count=24)
        remote.put("bucket/m.safetensors", body)
        remote.refuse.append(expire)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", remote.root)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{service.root}/credentials")
        ckpt = penstock.open("s3://bucket/m.safetensors")
        issue(1)
        assert_bits(ckpt.load(framework="np"), tensors)
        assert set(served) == {"key-0", "key-1"}
        # One reader asked for all of them.
        assert service.requests == ["GET /credentials"] * 2
        # Keys that nobody takes any longer end the load, and are not shown.
        good.clear()
        with pytest.raises(penstock.LocationAccessError, match="ExpiredToken") as raised:
            ckpt.load(framework="np")
        assert "the container's credential service" in str(raised.value)
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
    servers.forget_settings(monkeypatch, "AZURE_", "IDENTITY_", "MSI_")
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("AZURE_USE_AZURE_CLI", "true")

    def storage(asked: Asked) -> tuple[int, bytes]:
        return (206, body) if asked.headers["Authorization"] == "Bearer SENTINEL-token" else (403, b"")

    with service(storage) as (url, _):
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=acc;BlobEndpoint={url}")
        assert len(penstock.open("az://container/m.safetensors")) == 1
        command.write_text("#!/bin/sh\necho 'ERROR: Please run az login to setup account.' >&2\nexit 1\n")
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=other;BlobEndpoint={url}")
        with pytest.raises(penstock.LocationAccessError, match="az login") as raised:
            penstock.open("az://container/m.safetensors")
    assert "SENTINEL" not in f"{raised.value} {vars(raised.value)}"
