"""Mistakes in what leads to a store: accounts, keys and files of credentials; patterns and directories over plain HTTP.

What is wrong is told by the setting's name, where it is from, and never with a value that may be secret.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
import servers
from conftest import Raw, raw_bytes, write_raw
from services import Asked, service

pytestmark = pytest.mark.stores

SECRET = "SENTINEL7"  # noqa: S105 - it is looked for
BLOB = "az://container/m.safetensors"
OBJECT = "gs://bucket/m.safetensors"


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment without settings."""
    servers.forget_settings(
        monkeypatch, "AWS_", "AZURE_", "GOOGLE_", "CLOUDSDK_", "STORAGE_EMULATOR", "IDENTITY_", "MSI_", "HF_"
    )
    monkeypatch.setenv("HOME", str(tmp_path))


def refused(url: str, options: dict[str, Any], *words: str) -> penstock.PenstockError:
    with pytest.raises(penstock.ConfigError) as raised:
        penstock.open(url, storage_options=options)
    error = raised.value
    assert error.code == "config"
    assert error.location == url
    assert error.remedy
    for word in words:
        assert word in str(error)
    assert SECRET not in f"{error} {vars(error)}"
    for raw in ("Invalid symbol", "EOF while", "cannot be set up", "InvalidEncoding", "no items found", " at line "):
        assert raw not in str(error)
    return error


def test_an_azure_account_that_is_not_named_or_no_name() -> None:
    refused(BLOB, {}, "no storage account is named", "AZURE_STORAGE_ACCOUNT_NAME", "account_name")
    # Also a key, where options were swapped.
    for account in ("https://acc.blob.core.windows.net", f"me:{SECRET}@host", f"{SECRET}+/c2VjcmV0=="):
        options = {"account_name": account, "account_key": "acc"}
        refused(BLOB, options, 'storage_options["account_name"] is not the name of a storage account')


def test_azure_credentials_that_are_none_name_their_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ({"account_key": f"{SECRET}!"}, {"sas_token": SECRET}):
        with pytest.raises(penstock.ConfigError, match=r"the credentials \(storage_options\) cannot be used") as raised:
            penstock.open(BLOB, storage_options={"account_name": "acc", **given})
        assert SECRET not in f"{raised.value} {vars(raised.value)}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=acc;AccountKey=%{SECRET}")
    with pytest.raises(penstock.ConfigError, match="AZURE_STORAGE_CONNECTION_STRING") as raised:
        penstock.open(BLOB)
    assert SECRET not in f"{raised.value} {vars(raised.value)}"


def test_an_azure_client_secret_wants_its_tenant() -> None:
    with pytest.raises(penstock.ConfigError, match='lack "tenant_id"') as raised:
        penstock.open(BLOB, storage_options={"account_name": "acc", "client_id": "c", "client_secret": SECRET})
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("code", "kind", "remedy"),
    [
        ("AuthenticationFailed", "credentials", "is of this storage account"),
        ("AuthorizationPermissionMismatch", "access_denied", "Storage Blob Data Reader"),
    ],
)
def test_an_azure_key_of_another_account_says_what_to_check(
    code: str, kind: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>Refused.</Message></Error>"
    with service(lambda _: (403, body)) as (url, _):
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=acc;AccountKey=c2VjcmV0;BlobEndpoint={url}")
        with pytest.raises(penstock.LocationAccessError, match=remedy) as raised:
            penstock.open(BLOB)
    assert raised.value.code == kind
    assert "(AZURE_STORAGE_CONNECTION_STRING)" in (raised.value.remedy or "")


KEY = {"type": "service_account", "client_email": "e", "private_key_id": SECRET, "private_key": SECRET}
PEM = KEY | {"private_key": f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----\n"}
LACKING = {name: value for name, value in KEY.items() if name != "private_key"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        (f"{{not json {SECRET}", "is not JSON (line 1"),
        (f'["{SECRET}"]', "is not a JSON object"),
        (json.dumps(KEY), "private_key is not an RSA key in PEM form"),
        (json.dumps(PEM), "private_key is not an RSA key in PEM form"),
        (json.dumps(LACKING), "lacks the field `private_key`"),
        (json.dumps(KEY | {"client_email": [SECRET]}), "`client_email` is not text"),
    ],
)
def test_a_service_accounts_key_that_cannot_be_used(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key.json"
    path.write_text(text)
    refused(OBJECT, {"service_account": path}, f'storage_options["service_account"]={path} ', words)
    if text.startswith("{"):
        refused(OBJECT, {"service_account_key": text}, 'storage_options["service_account_key"] ', words)
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", text)
        error = refused(OBJECT, {}, "GOOGLE_SERVICE_ACCOUNT_KEY ", words)
        assert "Check the path" not in str(error)
        assert "Give the whole of a service account's key" in str(error)
        monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT_KEY")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    refused(OBJECT, {}, f"GOOGLE_APPLICATION_CREDENTIALS={path} ", words)


def test_credentials_of_google_in_the_wrong_place(tmp_path: Path) -> None:
    path = tmp_path / "login.json"
    path.write_text(json.dumps({"type": "authorized_user", "client_id": SECRET}))
    refused(OBJECT, {"service_account": path}, "type is not service_account", "application_credentials")
    refused(OBJECT, {"application_credentials": path}, "lacks the field `client_secret`", "gcloud auth")
    refused(OBJECT, {"service_account": "/no/key.json"}, "/no/key.json cannot be read: No such file")
    refused(OBJECT, {"service_account": json.dumps(KEY)}, "holds a key itself", "service_account_key")
    refused(OBJECT, {"service_account_key": str(path)}, "is not the JSON of a service account's key")
    refused(
        OBJECT, {"application_credentials": "/no/key.json"}, 'storage_options["application_credentials"]=/no/key.json'
    )
    path.write_text(f'{{"a": "{SECRET}"}}')
    refused(OBJECT, {"application_credentials": path}, "it has no field `type`")


def test_variables_and_options_of_blanks_set_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Blanks are what an empty file or a template leaves.
    for name in ("AWS_REGION", "AWS_PROFILE", "AWS_CA_BUNDLE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, " \n")
    absent = "<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>"
    with service(lambda _: (404, absent)) as (url, asked):
        for given in ({}, {"region": " ", "ca_bundle": "\t", "profile": "\n"}):
            options = {"anon": True, "endpoint_url": url, **given}
            with pytest.raises(penstock.LocationNotFoundError):
                penstock.open("s3://bucket/m.safetensors", storage_options=options)
    assert asked


def test_a_setting_of_another_store_is_looked_at_by_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = write_raw(tmp_path / "m.safetensors", {"a": Raw("F32", (4,), raw_bytes("F32", (4,)))}).read_bytes()
    names = ("HF_TOKEN", "AWS_SESSION_TOKEN", "AZURE_STORAGE_TOKEN", "GOOGLE_BEARER_TOKEN")
    for name in names:
        monkeypatch.setenv(name, "a\nb")
    with service(lambda _: (206, body)) as (url, _):
        assert list(penstock.open(f"{url}/m.safetensors")) == ["a"]
        for own, location in (("AWS_SESSION_TOKEN", "s3://bucket/m"), ("GOOGLE_BEARER_TOKEN", "gs://bucket/m")):
            # Its own is in its requests.
            with pytest.raises(penstock.ConfigError, match=f"{own} holds characters that no request can carry"):
                penstock.open(location)
            with monkeypatch.context() as patched:
                patched.delenv(own)
                patched.setenv("GOOGLE_SKIP_SIGNATURE", "true")
                patched.setenv("AWS_SKIP_SIGNATURE", "true")
                patched.setenv("AWS_ENDPOINT_URL", url)
                patched.setenv("GOOGLE_BASE_URL", url)
                assert list(penstock.open(f"{location}.safetensors")) == ["a"]


@pytest.mark.parametrize("remote", [False, True])
def test_a_shard_that_is_missing_says_where_to_bring_it(tmp_path: Path, remote: bool) -> None:
    index = json.dumps({"weight_map": {"a": "m-1.safetensors"}})
    (tmp_path / "m.safetensors.index.json").write_text(index)

    def answer(asked: Asked) -> tuple[int, str | bytes]:
        return (206, index) if asked.path.endswith(".json") else (404, "")

    with service(answer) as (url, _):
        location = f"{url if remote else tmp_path}/m.safetensors.index.json"
        with pytest.raises(penstock.LocationNotFoundError, match="the shard is missing, which") as raised:
            penstock.open(location)
    says = "The upload is incomplete: upload" if remote else "The download is incomplete: download"
    assert says in (raised.value.remedy or "")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[str]:
    """A server that shows a page about a directory, one file whose name looks like a pattern, and nothing else."""
    body = write_raw(tmp_path / "m.safetensors", {"a": Raw("F32", (4,), raw_bytes("F32", (4,)))}).read_bytes()

    def answer(asked: Asked) -> tuple[int, str | bytes]:
        match asked.path.split("?")[0]:
            case "/page":
                return 206, "<!DOCTYPE html><html>model.safetensors</html>"
            case "/m/[1].safetensors":
                return 206, body
            case path:
                return 403 if path.startswith("/private") else 404, ""

    with service(answer) as (url, _):
        yield url


def test_a_name_over_http_that_looks_like_a_pattern_is_a_name(host: str) -> None:
    assert list(penstock.open(f"{host}/m/[1].safetensors")) == ["a"]


@pytest.mark.parametrize("directory", ["/m/", "/m", "/page", "/page/", "", "/m?sig=SENTINEL7"])
def test_a_directory_over_http_says_what_to_name(host: str, directory: str) -> None:
    with pytest.raises(penstock.LocationNotFoundError, match="a plain HTTP server cannot list what it holds") as raised:
        penstock.open(host + directory)
    index = f"{host}{directory.partition('?')[0].rstrip('/')}/model.safetensors.index.json"
    assert f"such as {index}, or give a list" in (raised.value.remedy or "")
    assert SECRET not in f"{raised.value} {vars(raised.value)}"
