"""Google's credentials that google-auth makes tokens of: the library itself, with imitations of Google's services."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

import penstock
import servers
from conftest import Raw, assert_bits, shard
from penstock.google_tokens import COMMAND
from services import Answer, Asked, certificate, service, serving

pytest.importorskip("google.auth")
certifi = pytest.importorskip("certifi")
pytestmark = pytest.mark.stores

SUBJECT = "SENTINEL-subject-token"
SECRET = "SENTINEL-client-secret"  # noqa: S105 - it is looked for
AUDIENCE = "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/k"
JWT = "urn:ietf:params:oauth:token-type:jwt"
READ = "https://www.googleapis.com/auth/devstorage.read_only"
ACCOUNT = "loader@project.iam.gserviceaccount.com"
ALLOW = "GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES"
LOCATION = "gs://bucket/m.safetensors"


class Google(NamedTuple):
    """Storage that takes some tokens and no others, and services that give them."""

    directory: Path
    tensors: dict[str, Raw]
    accepted: set[str]
    bearers: list[str]
    """What storage was shown."""
    url: str
    """Of the services."""
    asked: list[Asked]
    """What the services were asked."""
    answers: list[Answer]
    """What they answer: the last one counts."""

    def write(self, name: str, text: str) -> str:
        path = self.directory / name
        path.write_text(text)
        return str(path)

    def federated(self, source: dict[str, Any], **more: Any) -> dict[str, Any]:
        basic = {"type": "external_account", "audience": AUDIENCE, "subject_token_type": JWT}
        return basic | {"token_url": f"{self.url}/token", "credential_source": source} | more

    def of_file(self) -> dict[str, Any]:
        return self.federated({"file": self.write("subject", SUBJECT)})

    def open(self, credentials: dict[str, Any]) -> penstock.Checkpoint:
        # Under a new name: what is reached with the same variables is set up once.
        name = f"credentials-{len(list(self.directory.glob('credentials-*')))}.json"
        path = self.write(name, json.dumps(credentials))
        return penstock.open(LOCATION, storage_options={"application_credentials": path})

    def reads(self, credentials: dict[str, Any]) -> None:
        assert_bits(self.open(credentials).load(framework="np"), self.tensors)

    def denied(self, credentials: dict[str, Any]) -> penstock.LocationAccessError:
        with pytest.raises(penstock.LocationAccessError) as raised:
            self.open(credentials)
        error = raised.value
        assert error.code == "credentials"
        assert error.remedy
        assert "credentials-" in str(error)
        assert "SENTINEL" not in f"{error} {vars(error)}"
        return error


def granted(token: str, seconds: int = 3600, **more: str) -> tuple[int, str]:
    issued = {"issued_token_type": "urn:ietf:params:oauth:token-type:access_token"}
    return 200, json.dumps({"access_token": token, "expires_in": seconds, "token_type": "Bearer"} | issued | more)


def form(asked: Asked) -> dict[str, str]:
    return dict(urllib.parse.parse_qsl(asked.body))


@contextlib.contextmanager
def storage(body: bytes, accepted: set[str], bearers: list[str]) -> Iterator[str]:
    """Google's storage with one object, which answers 401 to who has another token than these."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            bearers.append(self.headers.get("Authorization", "").removeprefix("Bearer "))
            part = b"<Error><Code>AuthenticationRequired</Code><Message>Who?</Message></Error>"
            if bearers[-1] not in accepted:
                self.send_response(401)
            else:
                start, end = re.findall(r"\d+", self.headers["Range"])
                part = body[int(start) : int(end) + 1]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{int(start) + len(part) - 1}/{len(body)}")
                self.send_header("ETag", '"1"')
                self.send_header("Last-Modified", "Sat, 21 Nov 2026 00:00:00 GMT")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(part)

        def log_message(self, *_: object) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Google]:
    servers.forget_settings(monkeypatch, "AWS_", "GOOGLE_", "CLOUDSDK_", "STORAGE_EMULATOR")
    monkeypatch.setenv("HOME", str(tmp_path))
    body, tensors = shard(tmp_path, 0)
    accepted, bearers = {"token-0"}, []

    def token(asked: Asked) -> tuple[int, str]:
        shown = form(asked)
        assert (asked.method, asked.path) == ("POST", "/token")
        assert shown["grant_type"] == "urn:ietf:params:oauth:grant-type:token-exchange"
        assert (shown["audience"], shown["subject_token_type"], shown["scope"]) == (AUDIENCE, JWT, READ)
        if shown["subject_token"] != SUBJECT:
            return 400, json.dumps({"error": "invalid_grant", "error_description": "The token is not a JWT"})
        return granted("token-0")

    answers: list[Answer] = [token]

    def latest(asked: Asked) -> tuple[int, str | bytes]:
        return answers[-1](asked)

    with storage(body, accepted, bearers) as base, service(latest) as (url, asked):
        monkeypatch.setenv("GOOGLE_BASE_URL", base)
        yield Google(tmp_path, tensors, accepted, bearers, url, asked, answers)


def test_a_token_of_a_file_is_exchanged_once_for_many_requests(google: Google) -> None:
    google.reads(google.of_file())
    assert len(google.asked) == 1
    assert set(google.bearers) == {"token-0"}
    assert len(google.bearers) > 1


def test_readers_that_wait_for_a_token_share_its_failure(google: Google) -> None:
    def refuse(_: Asked) -> tuple[int, str]:
        time.sleep(2)
        return 400, json.dumps({"error": "invalid_grant"})

    google.answers.append(refuse)
    path = google.write("credentials.json", json.dumps(google.of_file()))
    locations = [f"gs://bucket/{number}.safetensors" for number in range(8)]
    with pytest.raises(penstock.LocationAccessError, match="invalid_grant"):
        penstock.open(locations, storage_options={"application_credentials": path})
    assert len(google.asked) == 1


def test_gclouds_file_is_found_where_it_was_moved_to(google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    google.write("subject", json.dumps({"id": SUBJECT}))
    source = {"file": f"{google.directory}/subject", "format": {"type": "json", "subject_token_field_name": "id"}}
    google.write("application_default_credentials.json", json.dumps(google.federated(source)))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(google.directory))
    assert len(penstock.open(LOCATION)) == 3
    assert len(google.asked) == 1
    # Who asks for no credentials is not hindered by any.
    google.accepted.add("")
    assert len(penstock.open(LOCATION, storage_options={"anon": True})) == 3
    # Those of a person, which the engine reads, too.
    google.write("application_default_credentials.json", '{"type":"authorized_user"}')
    monkeypatch.setenv("CLOUDSDK_CONFIG", f"{google.directory}/")
    with pytest.raises(penstock.ConfigError, match="lacks the field `client_id`"):
        penstock.open(LOCATION)


def test_a_token_of_a_url_is_asked_for_with_its_headers(google: Google) -> None:
    def identity(asked: Asked) -> tuple[int, str]:
        return (200, json.dumps({"id": SUBJECT})) if asked.headers["Metadata"] == "True" else (400, "no")

    with service(identity) as (url, _):
        kind = {"type": "json", "subject_token_field_name": "id"}
        source = {"url": f"{url}/identity", "headers": {"Metadata": "True"}, "format": kind}
        google.reads(google.federated(source))
        error = google.denied(google.federated(source | {"headers": {"Metadata": "SENTINEL"}}))
    assert "a federated identity" in str(error)
    assert "(HTTP 400)" in str(error)


def test_a_program_makes_tokens_only_where_that_is_allowed(google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"version": 1, "success": True, "token_type": JWT, "id_token": SUBJECT}
    says = google.write("answer.json", json.dumps(answer))
    ran = google.directory / "ran"
    text = f'#!/bin/sh\necho "$1 $GOOGLE_EXTERNAL_ACCOUNT_AUDIENCE" >> {ran}\ncat {says}\n'
    program = Path(google.write("program", text))
    program.chmod(0o755)
    credentials = google.federated({"executable": {"command": f"{program} --now", "timeout_millis": 5000}})
    assert ALLOW in str(google.denied(credentials))
    assert not ran.exists()
    monkeypatch.setenv(ALLOW, "1")
    ckpt = google.open(credentials)
    assert ran.read_text() == f"--now {AUDIENCE}\n"
    # The environment is that of the opening, and so it is for the next token.
    monkeypatch.delenv(ALLOW)
    google.accepted.clear()
    google.answers.append(lambda _: granted("token-1"))
    google.accepted.add("token-1")
    ckpt.load(framework="np")
    assert ran.read_text().count("--now") == 2
    # One that refuses, one that fails, one that is not there.
    monkeypatch.setenv(ALLOW, "1")
    google.write("answer.json", json.dumps({"version": 1, "success": False, "code": "401", "message": "Not you"}))
    assert "code: 401, message: Not you" in str(google.denied(credentials))
    assert "return code 1" in str(google.denied(google.federated({"executable": {"command": "false"}})))
    missing = google.federated({"executable": {"command": "/no/such/program"}})
    assert "No such file or directory: '/no/such/program'" in str(google.denied(missing))


def test_nothing_that_a_program_is_given_or_writes_is_shown(google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW, "1")
    program = Path(google.write("program", "#!/bin/sh\necho SENTINEL-out\necho SENTINEL-err >&2\neval $1\n"))
    program.chmod(0o755)

    def denied(ends: str) -> str:
        command = f"{program} '{ends}' SENTINEL-argument"
        return str(google.denied(google.federated({"executable": {"command": command, "timeout_millis": 5000}})))

    assert "return code 3. Check" in denied("exit 3")
    assert "the program timed out" in denied("exec sleep 60")
    # What it writes is no JSON.
    assert "Expecting value: line 1" in denied("exit 0")


def test_what_a_program_left_in_its_file_is_used_until_it_expires(
    google: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW, "1")
    answer = {"version": 1, "success": True, "token_type": JWT, "id_token": SUBJECT}
    left = google.write("left.json", json.dumps(answer | {"expiration_time": 4_000_000_000}))
    credentials = google.federated({"executable": {"command": "false", "output_file": left}})
    google.reads(credentials)
    google.write("left.json", json.dumps(answer | {"expiration_time": 1_000_000_000}))
    assert "return code 1" in str(google.denied(credentials))


def test_keys_of_aws_sign_a_request_that_is_the_token(google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    def token(asked: Asked) -> tuple[int, str]:
        signed = json.loads(urllib.parse.unquote(form(asked)["subject_token"]))
        url = "https://sts.eu-north-1.amazonaws.com?Action=GetCallerIdentity&Version=2011-06-15"
        assert (signed["url"], signed["method"]) == (url, "POST")
        assert AUDIENCE in [header["value"] for header in signed["headers"]]
        return granted("token-0")

    google.answers.append(token)
    for name, value in (("ACCESS_KEY_ID", "AKID"), ("SECRET_ACCESS_KEY", SECRET), ("REGION", "eu-north-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    url = "https://sts.{region}.amazonaws.com?Action=GetCallerIdentity&Version=2011-06-15"
    source = {"environment_id": "aws1", "regional_cred_verification_url": url}
    kind = "urn:ietf:params:aws:token-type:aws4_request"
    google.reads(google.federated(source, subject_token_type=kind))
    assert len(google.asked) == 1


def test_a_workload_elsewhere_acts_as_a_service_account(google: Google) -> None:
    path = f"/v1/projects/-/serviceAccounts/{ACCOUNT}:generateAccessToken"

    def answer(asked: Asked) -> tuple[int, str]:
        if asked.path == "/token":
            assert form(asked)["scope"] == "https://www.googleapis.com/auth/iam"
            # A client of a workforce pool.
            assert asked.headers["Authorization"] == "Basic bWU6U0VOVElORUwtY2xpZW50LXNlY3JldA=="
            return granted("SENTINEL-federated")
        assert (asked.path, asked.headers["Authorization"]) == (path, "Bearer SENTINEL-federated")
        said = json.loads(asked.body)
        assert (said["scope"], said["lifetime"]) == ([READ], "600s")
        return 200, json.dumps({"accessToken": "account-token", "expireTime": "2099-01-01T00:00:00Z"})

    google.answers.append(answer)
    google.accepted.add("account-token")
    more = {
        "service_account_impersonation_url": google.url + path,
        "service_account_impersonation": {"token_lifetime_seconds": 600},
        "client_id": "me",
        "client_secret": SECRET,
    }
    credentials = google.of_file() | more
    google.reads(credentials)
    assert set(google.bearers) == {"account-token"}

    # An identity that may not.
    def refuse(asked: Asked) -> tuple[int, str]:
        if asked.path == "/token":
            return granted("SENTINEL-federated")
        said = "Permission 'iam.serviceAccounts.getAccessToken' denied for SENTINEL-federated"
        return 403, json.dumps({"error": {"code": 403, "message": said, "status": "PERMISSION_DENIED"}})

    google.answers.append(refuse)
    error = google.denied(credentials)
    for word in ("HTTP 403", "PERMISSION_DENIED", "getAccessToken' denied for ***", "roles/iam.workloadIdentityUser"):
        assert word in str(error)


def of_pool(google: Google) -> dict[str, Any]:
    """Someone of a workforce pool who has signed in."""
    return {
        "type": "external_account_authorized_user",
        "audience": "//iam.googleapis.com/locations/global/workforcePools/pool/providers/idp",
        "client_id": "me",
        "client_secret": SECRET,
        "refresh_token": "SENTINEL-refresh-0",
        "token_url": f"{google.url}/oauthtoken",
        "token_info_url": f"{google.url}/introspect",
    }


def rereads(ckpt: penstock.Checkpoint, seconds: float) -> None:
    """Loads over and over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ckpt.load(framework="np")
        time.sleep(0.2)


def test_tokens_are_renewed_while_a_checkpoint_is_read(google: Google) -> None:
    google.answers.append(lambda _: granted(f"token-{len(google.asked) - 1}", 4))
    google.accepted.update(f"token-{number}" for number in range(20))
    ckpt = google.open(google.of_file())
    rereads(ckpt, 9)
    seen = list(dict.fromkeys(google.bearers))
    assert seen[:3] == ["token-0", "token-1", "token-2"]
    # Not for every request.
    assert len(google.asked) == len(seen) < len(google.bearers) / 3


def test_someone_of_a_workforce_pool_is_known_by_the_refresh_token_given_last(google: Google) -> None:
    # Every answer brings another refresh token, and the one before it is of no use any longer.
    def token(asked: Asked) -> tuple[int, str]:
        number = len(google.asked) - 1
        assert asked.headers["Authorization"] == "Basic bWU6U0VOVElORUwtY2xpZW50LXNlY3JldA=="
        if form(asked) != {"grant_type": "refresh_token", "refresh_token": f"SENTINEL-refresh-{number}"}:
            return 400, json.dumps({"error": "invalid_grant", "error_description": f"no {form(asked)}"})
        return granted(f"token-{number}", 4, refresh_token=f"SENTINEL-refresh-{number + 1}")

    google.answers.append(token)
    google.accepted.update(f"token-{number}" for number in range(20))
    ckpt = google.open(of_pool(google))
    rereads(ckpt, 5)
    assert "token-1" in google.bearers


def test_a_login_that_is_over_says_how_to_sign_in_again(google: Google) -> None:
    said = f"Token has been expired or revoked: SENTINEL-refresh-0 of {SECRET}"
    google.answers.append(lambda _: (400, json.dumps({"error": "invalid_grant", "error_description": said})))
    error = google.denied(of_pool(google))
    for word in ("a workforce login (", "invalid_grant: Token has been expired or revoked: *** of ***", "HTTP 400"):
        assert word in str(error)
    assert "gcloud auth application-default login --login-config=FILE" in (error.remedy or "")


@contextlib.contextmanager
def intercepting(settings: ssl.SSLContext, answer: Answer) -> Iterator[str]:
    """A proxy that is every HTTPS server that it is asked for. Yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_CONNECT(self) -> None:
            self.send_response_only(200)
            self.end_headers()
            self.connection = settings.wrap_socket(self.connection, server_side=True)
            self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
            self.close_connection = False

        def finish(self) -> None:
            super().finish()
            self.connection.close()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            url = f"https://{self.headers['Host']}{self.path}"
            status, text = answer(Asked(self.command, url, self.headers, body))
            self.send_response_only(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(str(text).encode())

        def log_message(self, *_: object) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield f"http://127.0.0.1:{port}"


def test_a_person_acts_as_a_service_account_by_way_of_delegates(
    google: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"https://iamcredentials.googleapis.com/v1/projects/-/serviceAccounts/{ACCOUNT}:generateAccessToken"
    login = {"client_id": "me", "client_secret": SECRET, "refresh_token": "SENTINEL-refresh"}
    delegates = ["projects/-/serviceAccounts/between@project.iam.gserviceaccount.com"]

    def answer(asked: Asked) -> tuple[int, str]:
        if asked.path == "https://oauth2.googleapis.com/token":
            assert form(asked) == {"grant_type": "refresh_token", **login}
            return granted("SENTINEL-of-person")
        assert (asked.path, asked.headers["Authorization"]) == (url, "Bearer SENTINEL-of-person")
        assert json.loads(asked.body) == {"delegates": delegates, "scope": [READ], "lifetime": "3600s"}
        return answers[-1]

    answers = [(200, json.dumps({"accessToken": "account-token", "expireTime": "2099-01-01T00:00:00Z"}))]
    google.accepted.add("account-token")
    acting = {
        "type": "impersonated_service_account",
        "delegates": delegates,
        "service_account_impersonation_url": url,
        "source_credentials": {"type": "authorized_user", **login},
    }
    settings, authority = certificate(google.directory, "DNS:*.googleapis.com")
    with intercepting(settings, answer) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        monkeypatch.setenv("SSL_CERT_FILE", authority)
        google.reads(acting)
        assert set(google.bearers) == {"account-token"}
        said = "Permission 'iam.serviceAccounts.getAccessToken' denied for SENTINEL-of-person"
        answers.append((403, json.dumps({"error": {"message": said, "status": "PERMISSION_DENIED"}})))
        error = google.denied(acting)
    for word in ("a service account that is acted as (", "denied for ***", "HTTP 403", "serviceAccountTokenCreator"):
        assert word in str(error)
    # Neither is anything asked for an identity that google-auth does not take here.
    error = google.denied(acting | {"source_credentials": google.of_file()})
    assert "source credential of type external_account is not supported" in str(error)


def test_a_token_that_storage_takes_no_longer_is_fetched_anew_once(google: Google) -> None:
    google.answers.append(lambda _: granted(f"token-{len(google.asked) - 1}"))
    ckpt = google.open(google.of_file())
    google.accepted.clear()
    google.accepted.add("token-1")
    ckpt.load(framework="np")
    assert len(google.asked) == 2
    google.accepted.clear()
    with pytest.raises(penstock.LocationAccessError, match="HTTP 401 AuthenticationRequired") as raised:
        ckpt.load(framework="np")
    assert "a federated identity (" in str(raised.value)
    assert len(google.asked) == 3


def test_a_token_service_that_is_busy_is_asked_again(google: Google) -> None:
    busy = iter([(503, ""), (429, ""), granted("token-0")])
    google.answers.append(lambda _: next(busy))
    google.reads(google.of_file())
    assert len(google.asked) == 3


@pytest.mark.parametrize("server", ["http://127.0.0.1:1", "http://192.0.2.1", "http://nobody.invalid"])
def test_a_token_service_that_cannot_be_reached_is_given_up_within_seconds(google: Google, server: str) -> None:
    began = time.monotonic()
    error = google.denied(google.of_file() | {"token_url": f"{server}/token"})
    assert time.monotonic() - began < 20
    assert f"no connection to {server}: " in str(error)
    assert f"Check that this machine may reach {server} (HTTPS_PROXY, NO_PROXY), or set" in str(error)


def test_a_login_that_was_renewed_is_used_from_then_on(google: Google) -> None:
    google.answers.append(lambda asked: granted(f"token-of-{form(asked)['subject_token']}", 1))
    google.accepted.update({"token-of-a", "token-of-b", "token-of-c"})

    def file(token: str) -> str:
        source = {"file": google.write(f"subject-{token}", token)}
        return google.write("login.json", json.dumps(google.federated(source)))

    options = {"application_credentials": file("a")}
    ckpt = penstock.open(LOCATION, storage_options=options)
    file("b")
    # Its tokens are good for a second, so the load fetches another one.
    time.sleep(1)
    ckpt.load(framework="np")
    assert set(google.bearers) == {"token-of-a", "token-of-b"}
    file("c")
    penstock.open(LOCATION, storage_options=options).load(framework="np")
    assert google.bearers[-1] == "token-of-c"


def test_a_persons_login_that_was_renewed_is_used_from_then_on(google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(asked: Asked) -> tuple[int, str]:
        return granted(f"token-of-{form(asked)['refresh_token']}")

    google.accepted.update({"token-of-a", "token-of-b"})
    login = {"type": "authorized_user", "client_id": "me", "client_secret": SECRET}
    settings, authority = certificate(google.directory, "DNS:*.google.com,DNS:*.googleapis.com")
    with intercepting(settings, answer) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        monkeypatch.setenv("SSL_CERT_FILE", authority)
        path = google.write("login.json", json.dumps(login | {"refresh_token": "a"}))
        ckpt = penstock.open(LOCATION, storage_options={"application_credentials": path})
        ckpt.load(framework="np")
        google.write("login.json", json.dumps(login | {"refresh_token": "b"}))
        ckpt.load(framework="np")
    assert set(google.bearers) == {"token-of-a", "token-of-b"}
    assert google.bearers[-1] == "token-of-b"


def test_what_is_wrong_is_told_without_a_secret(google: Google) -> None:
    credentials = google.of_file()
    google.write("subject", "SENTINEL-of-another")
    error = google.denied(credentials)
    for word in ("a federated identity (", "invalid_grant: The token is not a JWT", "HTTP 400", "audience"):
        assert word in str(error)
    # A service that repeats what it was shown.
    google.answers.append(
        lambda asked: (400, json.dumps({"error": "e", "error_description": "bad " + form(asked)["subject_token"]}))
    )
    assert "bad ***" in str(google.denied(credentials))
    (google.directory / "subject").unlink()
    assert f"{google.directory}/subject' was not found" in str(google.denied(credentials))
    google.write("subject", "")
    assert "Missing subject_token" in str(google.denied(credentials))
    google.denied(google.federated({"SENTINEL": "SENTINEL"}))
    google.denied({"type": "external_account", "audience": {"SENTINEL": 1}})


def test_no_secret_of_a_url_or_a_token_is_told(google: Google) -> None:
    for query in ("code=SENTINEL", "SENTINEL", "a=SENTINEL b"):
        # Asked again and again, by the engine.
        asked = json.dumps(google.federated({"url": f"http://127.0.0.1:1/identity?{query}"}))
        ran = subprocess.run(COMMAND, input=f"{asked}\n", capture_output=True, text=True, check=True)
        assert "no connection to http://127.0.0.1:1: " in ran.stdout
        assert "SENTINEL" not in ran.stdout + ran.stderr
    # A server that repeats what it was asked.
    google.answers.append(lambda asked: (400, f"no {asked.path.partition('?')[2]}"))
    assert "no ***" in str(google.denied(google.federated({"url": f"{google.url}/identity?code=SENTINEL"})))
    # A token that is no text.
    (google.directory / "subject").write_bytes(b"SENTINEL-\xff")
    assert "not text in UTF-8" in str(google.denied(google.federated({"file": f"{google.directory}/subject"})))

    # One that is granted, in an answer that cannot be used.
    def answer(asked: Asked) -> tuple[int, str]:
        if asked.path == "/token":
            return granted("SENTINEL-federated")
        return 200, json.dumps({"accessToken": "SENTINEL-account", "expireTime": "soon"})

    google.answers.append(answer)
    url = f"{google.url}/v1/projects/-/serviceAccounts/{ACCOUNT}:generateAccessToken"
    acting = google.denied(google.of_file() | {"service_account_impersonation_url": url})
    assert "No access token or invalid expiration in response" in str(acting)


def test_deprecations_are_no_errors(google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    google.reads(google.of_file())


def test_the_token_services_certificate_is_trusted_as_the_stores_is(
    google: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.forget_settings(monkeypatch, "SSL_CERT_", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
    own = google.directory / "own"
    own.mkdir()
    settings, _ = certificate(own, "DNS:localhost")

    def answer(asked: Asked) -> tuple[int, str]:
        return google.answers[-1](asked._replace(path="/token"))

    with intercepting(settings, answer) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        credentials = google.of_file() | {"token_url": "https://localhost/token"}
        error = google.denied(credentials)
        assert "CERTIFICATE_VERIFY_FAILED" in str(error)
        assert error.remedy == "Check the certificate of the token service; a private authority's goes to SSL_CERT_FILE"
        monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
        assert "CERTIFICATE_VERIFY_FAILED" in str(google.denied(credentials))
        # Directories beside the file, as OpenSSL has it.
        monkeypatch.setenv("SSL_CERT_DIR", f"/no/such/directory:{own}")
        google.reads(credentials)


def test_without_google_auth_it_is_said_what_to_install(google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    package = google.directory / "absent" / "google" / "auth"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'google.auth'\")")
    monkeypatch.setenv("PYTHONPATH", str(google.directory / "absent"))
    with pytest.raises(penstock.MissingDependencyError) as raised:
        google.open(google.of_file())
    error = raised.value
    assert (error.code, error.location) == ("missing_dependency", LOCATION)
    assert "google-auth is needed: No module named 'google.auth'" in str(error)
    assert error.remedy == "pip install 'penstock-loader[gcs]'"


@contextlib.contextmanager
def silent() -> Iterator[tuple[str, Callable[[], bool]]]:
    """A service that takes requests and never answers. Yields its URL, and whether someone waits."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        taken: list[socket.socket] = []
        threading.Thread(target=lambda: taken.append(listener.accept()[0]), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", lambda: bool(taken)
        for connection in taken:
            connection.close()


@pytest.mark.slow
def test_a_metadata_service_that_says_nothing_is_given_up_within_seconds(
    google: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("HOME", str(google.directory))
    began = time.monotonic()
    with silent() as (url, _):
        monkeypatch.setenv("GCE_METADATA_HOST", url.removeprefix("http://"))
        with pytest.raises(penstock.LocationAccessError, match="metadata service") as raised:
            penstock.open(LOCATION)
    assert "GOOGLE_APPLICATION_CREDENTIALS" in (raised.value.remedy or "")
    # The service has a name and an address, and each is asked once.
    assert time.monotonic() - began < 28


def handles(number: int) -> dict[str, bool]:
    """Whether this process handles a signal, and whether it ignores it: whoever asked for that."""
    lines = [line.split(":") for line in Path("/proc/self/status").read_text().splitlines()]
    return {name: bool(int(mask, 16) >> (number - 1) & 1) for name, mask in lines if name in {"SigCgt", "SigIgn"}}


@pytest.mark.parametrize("disposition", [signal.SIG_DFL, signal.SIG_IGN])
def test_the_signals_of_children_stay_the_programs_own(google: Google, disposition: signal.Handlers) -> None:
    before = signal.signal(signal.SIGCHLD, disposition)
    try:
        google.reads(google.of_file())
        with silent() as (url, is_waited_for):

            def press() -> None:
                while not is_waited_for():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGINT)

            presser = threading.Thread(target=press)
            presser.start()
            with pytest.raises(KeyboardInterrupt):
                google.open(google.of_file() | {"token_url": f"{url}/token"})
            presser.join()
        # The same runtime goes on.
        google.reads(google.of_file())
        assert handles(signal.SIGCHLD) == {"SigCgt": False, "SigIgn": disposition == signal.SIG_IGN}
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_how_a_program_ends_is_known_where_that_signal_is_ignored(
    google: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW, "1")
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert "return code 1" in str(google.denied(google.federated({"executable": {"command": "false"}})))
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_ctrl_c_ends_a_wait_for_a_token_within_200_ms_and_leaves_nothing(google: Google) -> None:
    pressed = []
    # Servers of other tests may be running.
    before = psutil.Process().children(recursive=True)
    with silent() as (url, is_waited_for):

        def press() -> None:
            while not is_waited_for():
                time.sleep(0.01)
            pressed.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        presser = threading.Thread(target=press)
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            google.open(google.of_file() | {"token_url": f"{url}/token"})
        assert time.monotonic() - pressed[0] < 0.2
        presser.join()
        assert set(psutil.Process().children(recursive=True)) <= set(before)


def test_ctrl_c_ends_the_program_that_makes_tokens_too(google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW, "1")
    left = google.directory / "pid"
    program = Path(google.write("program", f"#!/bin/sh\necho $$ > {left}.new\nmv {left}.new {left}\nexec sleep 3600\n"))
    program.chmod(0o755)

    def press() -> None:
        while not left.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        google.open(google.federated({"executable": {"command": str(program)}}))
    presser.join()
    # Killed with the rest. Whoever adopts orphans here may leave it unburied.
    with contextlib.suppress(psutil.NoSuchProcess):
        killed = psutil.Process(int(left.read_text()))
        while killed.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_after_fork_fetches_a_token_of_its_own(google: Google) -> None:
    google.reads(google.of_file())
    context = multiprocessing.get_context("fork")
    child = context.Process(target=google.reads, args=(google.of_file(),))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert len(google.asked) == 2
