"""Where a checkpoint's credentials and endpoint come from: the environment when it was opened, or the call."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
import servers
from conftest import Raw, assert_bits, shard
from services import service

pytestmark = pytest.mark.stores


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment that leads to no store."""
    servers.forget_settings(monkeypatch, "AWS_", "GOOGLE_", "AZURE_", "HF_", "STORAGE_EMULATOR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def saved(plain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, of someone who has logged in everywhere."""
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = SENTINELKEY\naws_secret_access_key = SENTINEL\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    (tmp_path / "token").write_text("hf_SENTINEL")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "SENTINEL")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "models")
    monkeypatch.setenv("AZURE_STORAGE_TOKEN", "SENTINEL")


@pytest.fixture
def gateway(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[servers.Remote, dict[str, Raw]]]:
    (tmp_path / "one").mkdir()
    body, held = shard(tmp_path, 0)
    with servers.s3(tmp_path / "one") as remote:
        # Later than the server, which is found below the user's directory.
        request.getfixturevalue("plain")
        remote.put("m/a.safetensors", body)
        yield remote, held


def options(remote: servers.Remote) -> dict[str, str]:
    """What leads to the gateway, as s3fs has it."""
    setting = remote.environment
    return {
        "key": setting["AWS_ACCESS_KEY_ID"],
        "secret": setting["AWS_SECRET_ACCESS_KEY"],
        "endpoint_url": setting["AWS_ENDPOINT_URL"],
    }


def test_a_load_uses_the_environment_that_the_checkpoint_was_opened_in(
    gateway: tuple[servers.Remote, dict[str, Raw]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    remote, held = gateway
    for name, value in remote.environment.items():
        monkeypatch.setenv(name, value)
    ckpt = penstock.open(f"{remote.root}/m/")
    for name in remote.environment:
        monkeypatch.delenv(name)
    assert_bits(ckpt.load(framework="np"), held)
    # Nor does it matter that another endpoint, other keys and a proxy are set by then.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert_bits(ckpt.load(framework="np"), held)
    assert_bits(dict(ckpt.stream(framework="np")), held)
    # The disk cache of a load is another way to the same store.
    cached = penstock.LoadOptions(cache_dir=str(tmp_path / "cache"))
    assert_bits(ckpt.load(framework="np", options=cached), held)
    with pytest.raises(penstock.StorageError):
        penstock.open(f"{remote.root}/m/")


@pytest.mark.parametrize(
    "names",
    [
        ("key", "secret", "endpoint_url"),
        ("aws_access_key_id", "aws_secret_access_key", "aws_endpoint"),
        ("access_key_id", "secret_access_key", "endpoint"),
    ],
)
def test_keys_and_endpoint_of_a_call_serve_all_of_it(
    gateway: tuple[servers.Remote, dict[str, Raw]], names: tuple[str, ...], tmp_path: Path
) -> None:
    remote, held = gateway
    given = dict(zip(names, options(remote).values(), strict=True))
    before = dict(os.environ)
    ckpt = penstock.open(f"{remote.root}/m/", storage_options=given)
    assert_bits(ckpt.load(framework="np"), held)
    pulled = penstock.pull(f"{remote.root}/m/", tmp_path / "pulled", storage_options=given)
    assert [file.path for file in pulled.files] == ["a.safetensors"]
    url = f"{remote.root}/m/a.safetensors"
    assert_bits(penstock.load_file(url, framework="np", storage_options=given), held)
    with penstock.safe_open(url, "np", storage_options=given) as opened:
        assert set(opened.keys()) == set(held)
    assert dict(os.environ) == before


def test_nested_mappings_are_those_of_s3fs(gateway: tuple[servers.Remote, dict[str, Raw]]) -> None:
    remote, held = gateway
    given = options(remote)
    nested: dict[str, Any] = {
        "key": given["key"],
        "secret": given["secret"],
        "token": None,
        "anon": False,
        "client_kwargs": {"endpoint_url": given["endpoint_url"], "region_name": "us-east-1"},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
    }
    assert_bits(penstock.open(f"{remote.root}/m/", storage_options=nested).load(framework="np"), held)


def test_two_stores_with_different_keys_work_side_by_side(
    gateway: tuple[servers.Remote, dict[str, Raw]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, held = gateway
    (tmp_path / "two").mkdir()
    other, others = shard(tmp_path, 1)
    with servers.s3(tmp_path / "two", "--access", "second-access", "--secret", "second-secret-key") as two:
        two.put("m/a.safetensors", other)
        second = options(two) | {"key": "second-access", "secret": "second-secret-key"}
        # The same bucket and key of both, and the environment leads to the first.
        for name, value in one.environment.items():
            monkeypatch.setenv(name, value)
        url = f"{one.root}/m/a.safetensors"
        first, later = penstock.open(url), penstock.open(url, storage_options=second)
        for _ in range(2):
            assert_bits(first.load(framework="np"), held)
            assert_bits(later.load(framework="np"), others)
        with pytest.raises(penstock.LocationAccessError) as raised:
            penstock.open(url, storage_options=second | {"endpoint_url": options(one)["endpoint_url"]})
    assert raised.value.code == "credentials"
    assert "credentials: storage_options" in str(raised.value)


def asked_with(location: str, given: dict[str, Any] | None, name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The credentials of all requests of a service that the variable or the option `name` leads to."""
    with service(lambda _: (404, "")) as (url, asked):
        if name.isupper():
            monkeypatch.setenv(name, url)
        else:
            given = (given or {}) | {name: url}
        with pytest.raises(penstock.PenstockError):
            penstock.open(location, storage_options=given)
        assert asked
        return [said for one in asked if (said := one.headers.get("Authorization"))]


@pytest.mark.parametrize("switch", [None, "1"])
@pytest.mark.parametrize("variable", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", None])
def test_another_hub_gets_no_token_of_the_environment(
    plain: None, switch: str | None, variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("hf_SENTINEL_of_a_file")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    if switch:
        monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", switch)
    if variable:
        monkeypatch.setenv(variable, "hf_SENTINEL_of_a_variable")
    location = "hf://o/n/m.safetensors"
    assert asked_with(location, None, "endpoint", monkeypatch) == []
    # One that is given for it is sent.
    assert set(asked_with(location, {"token": "hf_its_own"}, "endpoint", monkeypatch)) == {"Bearer hf_its_own"}


@pytest.mark.parametrize(
    ("location", "option"),
    [
        ("s3://b/m.safetensors", "key"),
        ("s3://b/m.safetensors", "token"),
        ("gs://b/m.safetensors", "token"),
        ("az://b/m.safetensors", "sas_token"),
        ("az://b/m.safetensors", "account_key"),
        ("hf://o/n/m.safetensors", "token"),
    ],
)
def test_an_empty_credential_is_refused(saved: None, location: str, option: str) -> None:
    with pytest.raises(penstock.ConfigError, match=f'the storage option "{option}" is empty') as raised:
        penstock.open(location, storage_options={option: ""})
    assert "anon=True" in (raised.value.remedy or "")


@pytest.mark.parametrize("given", [None, {"profile": ""}, {"anon": ""}, {"region": ""}, {"endpoint_url": ""}])
def test_an_empty_profile_or_setting_undoes_nothing(
    saved: None, given: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, endpoint = "s3://b/m.safetensors", "AWS_ENDPOINT_URL"
    assert "SENTINELKEY" in asked_with(location, given, endpoint, monkeypatch)[0]
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert asked_with(location, given, endpoint, monkeypatch) == []


def test_options_are_in_no_error_and_no_repr(gateway: tuple[servers.Remote, dict[str, Raw]]) -> None:
    remote, _ = gateway
    wrong = options(remote) | {"key": "SENTINEL-key", "secret": "SENTINEL-secret"}
    with pytest.raises(penstock.LocationAccessError) as raised:
        penstock.open(f"{remote.root}/m/", storage_options=wrong)
    assert "SENTINEL" not in f"{raised.value} {vars(raised.value)} {pickle.dumps(raised.value)!r}"
    ckpt = penstock.open(f"{remote.root}/m/", storage_options=options(remote))
    assert options(remote)["secret"] not in f"{ckpt!r} {ckpt.options!r} {vars(ckpt)}"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"secrte": "SENTINEL"}, "Did you mean 'secret'|Did you mean \"secret\""),
        ({"key": "SENTINEL"}, "secret"),
        ({"key": object()}, "'key' is a object"),
        ({3: "SENTINEL"}, "not a name"),
        ("SENTINEL", "not a mapping"),
        ({"key": " ", "secret": "SENTINEL"}, '"key" is empty'),
        ({"client_kwargs": "SENTINEL"}, "client_kwargs must be a mapping from names to values, not a str"),
        ({"config_kwargs": {"s3": ["SENTINEL"]}}, "s3 must be a mapping from names to values, not a list"),
        ({"config_kwargs": {"s3": {"payload_signing": "SENTINEL"}}}, "addressing_style"),
    ],
)
def test_what_is_no_option_is_refused(plain: None, given: Any, says: str) -> None:
    with pytest.raises(penstock.ConfigError, match=says) as raised:
        penstock.open("s3://bucket/m.safetensors", storage_options=given)
    assert "SENTINEL" not in str(raised.value)
    assert raised.value.code == "config"


def test_a_key_as_a_dict_is_googles(plain: None) -> None:
    given = {"token": {"private_key": "SENTINEL"}}
    with pytest.raises(penstock.ConfigError, match=r'storage_options\["token"\] cannot be used: it lacks') as raised:
        penstock.open("gs://bucket/m.safetensors", storage_options=given)
    assert "Give the whole of a service account's key" in (raised.value.remedy or "")
    assert "a dict of it" in (raised.value.remedy or "")
    for url in ("s3://bucket/m.safetensors", "hf://org/name", "az://container/m.safetensors"):
        for call in (penstock.open, lambda url, **given: penstock.pull(url, "/nowhere", **given)):
            with pytest.raises(penstock.ConfigError, match="token is a dict, which only Google"):
                call(url, storage_options=given)


def test_options_of_a_local_path_are_said_once_to_do_nothing(tmp_path: Path) -> None:
    body, _ = shard(tmp_path, 0)
    (tmp_path / "m.safetensors").write_bytes(body)
    code = (
        "import penstock, sys\n"
        "for options in (None, {}, {'anon': True}, {'anon': True}):\n"
        "    penstock.open(sys.argv[1], storage_options=options).load(framework='np')\n"
        "    print('--', file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "m.safetensors"], capture_output=True, text=True, check=True
    )
    said = "storage_options are for remote locations: what lies on this machine is read without them"
    assert done.stderr.splitlines() == ["--", "--", said, "--", "--"]


def test_a_relative_path_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, held = shard(tmp_path, 0)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "m.safetensors").write_bytes(body)
    monkeypatch.chdir(tmp_path)
    opened = [
        penstock.open(path, storage_options={"anon": True})
        for path in ("here", "here/m.safetensors", "here/*.safetensors")
    ]
    monkeypatch.chdir("/")
    for ckpt in opened:
        assert_bits(ckpt.load(framework="np"), held)


def test_codes_are_attributes_and_json(tmp_path: Path) -> None:
    with pytest.raises(penstock.LocationNotFoundError) as absent:
        penstock.open(tmp_path / "absent")
    assert absent.value.code == "not_found"
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(penstock.FormatError) as cut:
        penstock.open(tmp_path / "cut.safetensors")
    assert cut.value.code == "truncated"
    assert pickle.loads(pickle.dumps(cut.value)).code == "truncated"  # noqa: S301 - our own
    header = json.dumps({"a": {"dtype": "F32", "shape": [10], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "size.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(penstock.FormatError) as size:
        penstock.open(tmp_path / "size.safetensors")
    assert (size.value.code, size.value.details) == ("size_mismatch", {"needed": "40", "given": "4"})


def test_waiting_for_a_server_is_logged_and_ends_with_ctrl_c(plain: None, caplog: pytest.LogCaptureFixture) -> None:
    main = threading.get_ident()
    with service(lambda _: (503, "busy")) as (url, asked):

        def interrupt() -> None:
            while not any("kept this load waiting" in record.message for record in caplog.records):
                time.sleep(0.05)
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
            penstock.open(f"{url}/m.safetensors")
        thread.join()
    assert len(asked) > 3
    told = [record for record in caplog.records if "kept this load waiting" in record.message]
    assert [record.name.partition(".")[0] for record in told] == ["penstock"]
    assert "HTTP 503" in told[0].message


def test_a_profile_that_is_not_there_is_named(plain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "weihgts")
    with pytest.raises(penstock.ConfigError, match="AWS_PROFILE=weihgts") as raised:
        penstock.open("s3://bucket/m.safetensors")
    assert "There is no profile in" in str(raised.value)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text("[profile weights]\nregion = us-east-1\n[default]\nregion = us-east-1\n")
    with pytest.raises(penstock.ConfigError, match='Did you mean "weights"'):
        penstock.open("s3://bucket/m.safetensors")
    monkeypatch.delenv("AWS_PROFILE")
    with pytest.raises(penstock.ConfigError, match='storage_options: profile "weihgts"'):
        penstock.open("s3://bucket/m.safetensors", storage_options={"profile": "weihgts"})
    (tmp_path / ".aws" / "config").unlink()
    with pytest.raises(penstock.ConfigError, match=r'leave out storage_options\["profile_name"\], or run') as raised:
        penstock.open("s3://bucket/m.safetensors", storage_options={"profile_name": "weihgts"})
    assert "AWS_PROFILE" not in str(raised.value)


def test_a_remedy_names_the_option_that_set_what_is_wrong(
    plain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = "<?xml version='1.0'?><Error><Code>NoSuchBucket</Code><Message>none</Message></Error>"
    with service(lambda _: (404, absent)) as (url, _):
        given = {"anon": True, "endpoint_url": url}
        with pytest.raises(penstock.LocationNotFoundError, match=r'that storage_options\["endpoint_url"\] leads to'):
            penstock.open("s3://bucket/m.safetensors", storage_options=given)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        with pytest.raises(penstock.LocationNotFoundError, match="that AWS_ENDPOINT_URL_S3 leads to"):
            penstock.open("s3://bucket/m.safetensors", storage_options={"anon": True})
    given = {"anon": True, "ca_bundle": str(tmp_path / "none.pem")}
    with pytest.raises(penstock.ConfigError, match=r'leave out storage_options\["ca_bundle"\]') as raised:
        penstock.open("s3://bucket/m.safetensors", storage_options=given)
    assert "AWS_CA_BUNDLE" not in str(raised.value)


def test_a_login_that_is_missing_is_told_as_such(plain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(
        "[profile sso]\nsso_session = corp\nsso_account_id = 123456789012\nsso_role_name = reader\nregion = us-east-1\n"
        "[sso-session corp]\nsso_start_url = https://corp.example/start\nsso_region = us-east-1\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "sso")
    with pytest.raises(penstock.LocationAccessError, match=r'"sso" \(SSO\) has no valid login') as raised:
        penstock.open("s3://bucket/m.safetensors")
    assert (raised.value.code, raised.value.remedy) == ("credentials", "Sign in: aws sso login --profile sso")


def test_a_file_of_credentials_that_is_missing_is_named(plain: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nope.json")
    with pytest.raises(penstock.ConfigError, match=r"GOOGLE_APPLICATION_CREDENTIALS=/nope\.json") as raised:
        penstock.open("gs://bucket/m.safetensors")
    assert "Check the path" in str(raised.value)


@pytest.mark.parametrize("url", ["gs://bucket/m.safetensors", "az://container/m.safetensors"])
def test_the_metadata_services_refusal_is_not_the_stores(
    plain: None, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(lambda _: (403, '{"error":"no identity"}')) as (metadata, asked):
        monkeypatch.setenv("GCE_METADATA_HOST", metadata.partition("://")[2])
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{metadata}/msi/token")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "models")
        with pytest.raises(
            penstock.LocationAccessError, match="this machine's metadata service answered HTTP 403"
        ) as raised:
            penstock.open(url)
    assert asked
    assert raised.value.code == "credentials"
    assert "Give this machine an identity" in str(raised.value)


@pytest.mark.parametrize("host", ["127.0.0.1:1", "192.0.2.1", "nobody.invalid"])
def test_a_metadata_service_that_cannot_be_reached_is_given_up_within_seconds(
    plain: None, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", host)
    monkeypatch.setenv("GCE_METADATA_IP", host)
    began = time.monotonic()
    with pytest.raises(penstock.LocationAccessError) as raised:
        penstock.open("gs://bucket/m.safetensors")
    assert time.monotonic() - began < 15
    assert raised.value.code == "credentials"
    for word in (f"no connection to http://{host}", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SKIP_SIGNATURE"):
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("url", "given", "undo", "place"),
    [
        ("s3://b/m.safetensors", {"anon": True, "endpoint_url": "URL"}, '["anon"]', "bucket"),
        ("gs://b/m.safetensors", {"anon": True, "endpoint_url": "URL"}, '["anon"]', "bucket"),
        ("gs://b/m.safetensors", {"token": "anon", "endpoint_url": "URL"}, '["token"]', "bucket"),
        ("az://b/m.safetensors", {"anon": True, "account_name": "acc", "endpoint": "URL"}, '["anon"]', "container"),
    ],
)
@pytest.mark.parametrize("status", [401, 403])
def test_who_asked_for_no_credentials_is_not_told_to_do_without(
    plain: None, url: str, given: dict[str, Any], undo: str, place: str, status: int
) -> None:
    with service(lambda _: (status, "<Error><Code>AccessDenied</Code><Message>No</Message></Error>")) as (server, _):
        options = {name: server if value == "URL" else value for name, value in given.items()}
        with pytest.raises(penstock.LocationAccessError) as raised:
            penstock.open(url, storage_options=options)
    error = raised.value
    remedy = error.remedy or ""
    assert f"The {place} is read without credentials" in remedy
    assert f"leave out storage_options{undo}" in remedy
    assert "SKIP_SIGNATURE" not in str(error)
    assert ("container" in str(error)) == (place == "container")


def test_a_session_that_has_expired_says_which_variables_to_renew(plain: None, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
    with service(lambda _: (400, body)) as (url, _):
        given = {"key": "k", "secret": "s", "token": "t", "endpoint_url": url}
        with pytest.raises(penstock.LocationAccessError, match="give new key, secret and token") as raised:
            penstock.open("s3://bucket/m.safetensors", storage_options=given)
        assert raised.value.code == "credentials"
        for name, value in (("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s"), ("SESSION_TOKEN", "t")):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(penstock.LocationAccessError, match="AWS_SESSION_TOKEN anew"):
            penstock.open("s3://bucket/m.safetensors")


@pytest.mark.parametrize("style", ["virtul", "Virtual", True, 1, ["path"]])
def test_a_style_of_addressing_that_is_none_is_refused(plain: None, style: object) -> None:
    given = {"config_kwargs": {"s3": {"addressing_style": style}}}
    with pytest.raises(penstock.ConfigError, match="none of auto, path, virtual"):
        penstock.open("s3://bucket/m.safetensors", storage_options=given)


@pytest.mark.parametrize("name", ["anon", "virtual_hosted_style_request", "requester_pays", "use_ssl"])
def test_a_switch_that_is_neither_on_nor_off_is_refused_without_its_value(plain: None, name: str) -> None:
    with pytest.raises(
        penstock.ConfigError, match=f'"{name}" is not one of its words. Give one of true, false'
    ) as raised:
        penstock.open("s3://bucket/m.safetensors", storage_options={name: "SENTINEL"})
    assert "SENTINEL" not in f"{raised.value} {raised.value!r} {vars(raised.value)}"


def test_a_model_is_built_of_a_store_that_options_lead_to(gateway: tuple[servers.Remote, dict[str, Raw]]) -> None:
    torch = pytest.importorskip("torch")
    remote, held = gateway
    url = f"{remote.root}/m/a.safetensors"

    def build() -> Any:
        made, inner = torch.nn.Module(), torch.nn.Module()
        for name, raw in held.items():
            inner.register_parameter(name.partition(".")[2], torch.nn.Parameter(torch.empty(raw.shape)))
        made.add_module("s0", inner)
        return made

    model = penstock.load_model(build, url, storage_options=options(remote))
    assert {name: p.detach().numpy().tobytes() for name, p in model.named_parameters()} == {
        name: raw.data for name, raw in held.items()
    }
    with pytest.raises(penstock.ConfigError, match=r"Give them to penstock\.open"):
        penstock.load_model(build, penstock.open(url, storage_options=options(remote)), storage_options={"anon": True})


def test_the_command_takes_options_and_shows_no_value(
    gateway: tuple[servers.Remote, dict[str, Raw]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("typer")
    from penstock.cli.app import app

    remote, _ = gateway
    given = [part for name, value in options(remote).items() for part in ("--storage-option", f"{name}={value}")]

    def run(*line: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            app(list(line), prog_name="penstock")
        captured = capfd.readouterr()
        return int(ended.value.code or 0), captured.out + captured.err

    for line in (
        ("inspect", f"{remote.root}/m/"),
        ("inspect", f"{remote.root}/"),
        ("load", "--framework", "np", f"{remote.root}/m/"),
        ("pull", "-v", f"{remote.root}/m/", str(tmp_path / "to")),
    ):
        code, said = run(*line, *given)
        assert code == 0, said
        assert options(remote)["secret"] not in said
    assert "pulled" in said
    assert "a.safetensors" in said
    assert "1 file, " in said
    code, said = run("inspect", f"{remote.root}/m/", "--storage-option", "SENTINEL")
    assert (code, "KEY=VALUE" in said, "SENTINEL" in said) == (8, True, False)
    code, said = run("inspect", f"{remote.root}/m/", "--storage-option", "secrte=SENTINEL")
    assert (code, "secret" in said, "SENTINEL" in said) == (8, True, False)
