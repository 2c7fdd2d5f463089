"""Users and passwords of URLs are shown nowhere, however badly they are escaped, and whichever way a URL is given."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
import servers
from penstock import _native
from penstock.integrations.shared import files, objects, small_files
from services import service

pytestmark = pytest.mark.stores

SECRET = "SENTINEL7"  # noqa: S105 - it is looked for
SPECIAL = "/?#@:\\%[] &;,\"'"

PASSWORDS = [form.format(c=c, s=SECRET) for c in SPECIAL for form in ("{c}{s}", "{s}{c}x", "x{c}{s}", "1{c}{s}", "{s}")]
USERS = [
    *(f"me:{password}" for password in dict.fromkeys(PASSWORDS)),
    *(f"{user}:x" for user in dict.fromkeys(PASSWORDS)),
    f"my.name:{SECRET}/{SECRET}",
]
"""Every position of a secret in a user and a password, beside everything that is special in a URL."""


@pytest.fixture(scope="module")
def nobody() -> Iterator[str]:
    """The host of a server, and proxy, that denies everything."""
    with service(lambda _: (403, "")) as (url, _):
        yield url.removeprefix("http://")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nobody: str) -> str:
    """An environment whose stores and proxies are ``nobody``."""
    servers.forget_settings(monkeypatch, "AWS_", "GOOGLE_", "AZURE_", "HF_", "STORAGE_EMULATOR")
    for name, value in {
        "HOME": str(tmp_path),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "secret-key",
        "AWS_ENDPOINT_URL": f"http://{nobody}",
        "STORAGE_EMULATOR_HOST": f"http://{nobody}",
        "AZURE_STORAGE_CONNECTION_STRING": f"AccountName=a;AccountKey=a2V5;BlobEndpoint=http://{nobody}/a",
        "HF_ENDPOINT": f"http://{nobody}",
        "HTTP_PROXY": f"http://{nobody}",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    return nobody


SecretIn = Callable[[str, str, pytest.MonkeyPatch, Path], "tuple[str, dict[str, str] | None]"]
"""From a user and a host: the location to open, and storage options."""


def by_location(form: str) -> SecretIn:
    return lambda user, host, monkeypatch, home: (form.format(user=user, host=host), None)


def by_variable(name: str, form: str, location: str) -> SecretIn:
    def way(user: str, host: str, monkeypatch: pytest.MonkeyPatch, home: Path) -> tuple[str, None]:
        monkeypatch.setenv(name, form.format(user=user, host=host))
        if "PROXY" in name:
            monkeypatch.delenv("NO_PROXY")
        return location, None

    return way


def by_option(name: str, form: str, location: str) -> SecretIn:
    return lambda user, host, monkeypatch, home: (location, {name: form.format(user=user, host=host)})


def by_profile(user: str, host: str, monkeypatch: pytest.MonkeyPatch, home: Path) -> tuple[str, None]:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    (home / "config").write_text(f"[default]\nendpoint_url = http://{user}@{host}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "config"))
    return "s3://bucket/m.safetensors", None


S3, GCS, AZURE, HUB = (f"{start}/m.safetensors" for start in ("s3://bucket", "gs://bucket", "az://c", "hf://org/name"))
WEB = "http://server.example/m.safetensors"
BLOB = "AccountName=a;AccountKey=a2V5;BlobEndpoint=http://{user}@{host}/a"

WAYS: dict[str, SecretIn] = {
    "http": by_location("http://{user}@server.example/m.safetensors"),
    "http with a port": by_location("http://{user}@{host}/m.safetensors"),
    "http with an @ in the path": by_location("http://{user}@server.example/a@b/m.safetensors"),
    "http with a query": by_location("http://{user}@server.example/m.safetensors?a=b@c"),
    "a mistyped URL": by_location("http:/{user}@server.example/m.safetensors"),
    "a URL without its colon": by_location("https//{user}@server.example/m.safetensors"),
    "a URL without its scheme": by_location("{user}@server.example/m.safetensors"),
    "a signed URL without its scheme": by_location("acc.blob.core.windows.net/c/m.safetensors?sv=1&sig={user}"),
    "a URL after a space": by_location(" http://{user}@server.example/m.safetensors"),
    "an unknown scheme": by_location("ftp://{user}@server.example/m.safetensors"),
    "s3": by_location("s3://{user}@bucket/m.safetensors"),
    "an ARN": by_location("s3://arn:{user}@bucket/m.safetensors"),
    "gs": by_location("gs://{user}@bucket/m.safetensors"),
    "az": by_location("az://{user}@bucket/m.safetensors"),
    "abfss": by_location("abfss://{user}@c@acc.dfs.core.windows.net/m.safetensors"),
    "hf": by_location("hf://{user}@org/name/m.safetensors"),
    "hf of one part": by_location("hf://{user}@name"),
    "hf with a token": by_location("hf://hf_{user}@org/name"),
    "a token without hf": by_location("hf_{user}@org/name"),
    "a file's URL": by_location("file://{user}@server.example/m.safetensors"),
    "AWS_ENDPOINT_URL": by_variable("AWS_ENDPOINT_URL", "http://{user}@{host}", S3),
    "AWS_ENDPOINT_URL_S3 without a scheme": by_variable("AWS_ENDPOINT_URL_S3", "{user}@{host}", S3),
    "STORAGE_EMULATOR_HOST": by_variable("STORAGE_EMULATOR_HOST", "{user}@{host}", GCS),
    "GOOGLE_BASE_URL": by_variable("GOOGLE_BASE_URL", "http://{user}@{host}", GCS),
    "AZURE_STORAGE_CONNECTION_STRING": by_variable("AZURE_STORAGE_CONNECTION_STRING", BLOB, AZURE),
    "HF_ENDPOINT": by_variable("HF_ENDPOINT", "http://{user}@{host}", HUB),
    "HF_ENDPOINT without a scheme": by_variable("HF_ENDPOINT", "{user}@{host}", HUB),
    "HTTP_PROXY": by_variable("HTTP_PROXY", "http://{user}@{host}", WEB),
    "HTTPS_PROXY": by_variable("HTTPS_PROXY", "{user}@{host}", WEB),
    "ALL_PROXY": by_variable("ALL_PROXY", "http://{user}@{host}", WEB),
    "the option endpoint_url": by_option("endpoint_url", "http://{user}@{host}", S3),
    "the option endpoint of Google": by_option("endpoint", "http://{user}@{host}", GCS),
    "the option endpoint of Azure": by_option("endpoint", "http://{user}@{host}", AZURE),
    "the option connection_string": by_option("connection_string", BLOB, AZURE),
    "the option endpoint of the hub": by_option("endpoint", "http://{user}@{host}", HUB),
    "a switch": by_option("anon", "{user}@{host}", S3),
    "an unknown option": by_option("entpoint", "{user}@{host}", S3),
    "a profile": by_profile,
}


def told(error: BaseException) -> str:
    """All that an exception tells whoever looks."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None:
        chain.append(following)
        following = following.__cause__ or following.__context__
    each = (f"{one} {one!r} {one.args} {vars(one)}" for one in chain)
    return "\n".join([*each, *traceback.format_exception_only(error)])


def opened(location: str, options: dict[str, str] | None) -> Any:
    return penstock.open(location, storage_options=options)


def pulled(location: str, options: dict[str, str] | None) -> Any:
    return penstock.pull(location, "pulled", storage_options=options)


def listed(location: str, options: dict[str, str] | None) -> Any:
    return _native.list_objects(location, list((options or {}).items()))


def read(location: str, options: dict[str, str] | None) -> Any:
    return _native.read_object(location, 1 << 20, list((options or {}).items()))


def for_an_engine(location: str, options: dict[str, str] | None) -> Any:
    return objects.list_safetensors(location, options)


def located(location: str, options: dict[str, str] | None) -> Any:
    return files.locate(location, download=False)


def fetched(location: str, options: dict[str, str] | None) -> Any:
    return small_files.fetch(location, "fetched")


def no_checkpoint_to_build(location: str, options: dict[str, str] | None) -> Any:
    return penstock.load_model(location, location)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
def test_a_secret_in_a_url_is_in_no_error_and_no_log(
    way: str, plain: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.chdir(tmp_path)
    failed = 0
    # Every way meets every special character; the core's own tests put all of them into all places.
    for number, user in enumerate(USERS[list(WAYS).index(way) % 3 :: 3]):
        if way == "a file's URL" and user.startswith("/"):
            # It is an absolute path then, which is shown as it is.
            continue
        with monkeypatch.context() as patch:
            location, options = WAYS[way](user, plain, patch, tmp_path)
            # All of them once, the others by turns: there are many.
            others = [pulled, listed, read, for_an_engine, located, fetched, no_checkpoint_to_build]
            for enter in (opened, others[number % len(others)]):
                try:
                    shown = repr(enter(location, options))
                except (penstock.PenstockError, OSError, ValueError) as error:
                    failed += 1
                    shown = told(error)
                assert SECRET.lower() not in shown.lower(), f"{enter.__name__} {location} {user}: {shown}"
    assert failed
    assert SECRET.lower() not in caplog.text.lower()


@pytest.mark.parametrize("way", ["http", "s3", "AWS_ENDPOINT_URL", "HTTP_PROXY", "HF_ENDPOINT", "a mistyped URL"])
def test_a_secret_in_a_url_is_in_no_output_of_the_command(
    way: str, plain: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from penstock.cli.app import app

    monkeypatch.chdir(tmp_path)
    for user in USERS[:: len(USERS) // 24]:
        with monkeypatch.context() as patch:
            location, _ = WAYS[way](user, plain, patch, tmp_path)
            for line in (
                ["inspect", location],
                ["inspect", "--json", location],
                ["load", "--framework", "dlpack", location],
                ["pull", "--verbose", location, "pulled"],
                ["inspect", S3, "--storage-option", f"endpoint_url=http://{user}@{plain}"],
                ["inspect", S3, "--storage-option", f"http://{user}@{plain}".replace("=", "")],
            ):
                with pytest.raises(SystemExit) as ended:
                    app(line, prog_name="penstock")
                assert ended.value.code
                captured = capfd.readouterr()
                assert SECRET.lower() not in f"{captured.out}{captured.err}".lower(), f"{line}: {captured}"


def test_what_is_special_in_a_password_is_escaped(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for location in ("http://me:pa/ss@server.example/m.safetensors", "http://me:pa#ss@server.example/m.safetensors"):
        with pytest.raises(penstock.LocationNotFoundError) as raised:
            penstock.open(location)
        assert "%2F for /" in (raised.value.remedy or "")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:se#cret@host:9000")
    with pytest.raises(penstock.ConfigError) as raised_too:
        penstock.open(S3)
    assert raised_too.value.cause == 'the S3 endpoint "http://***" is not a URL'
