"""Servers that tests of remote stores read from: S3, Google Cloud Storage, Azure and plain HTTP.

Those of S3, Google and Azure are fetched by ``tools/servers.sh``, moto by pip; a test whose server cannot be had here
is skipped and says so.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import hmac
import http.client
import importlib.util
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from services import serving

BUCKET = "penstock-test"
_SCRIPT = Path(__file__).parent.parent / "tools" / "servers.sh"
_AZURE_ACCOUNT = "devstoreaccount1"
# Azurite's key, which its documentation gives to everyone.
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class Line:
    """A network in front of a server. Cut, it resets every connection, and none is made until it is mended."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.passed = 0
        self._accept()

    def cut(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    # Reset rather than closed in good order.
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._accept()

    def _accept(self) -> None:
        threading.Thread(target=self._accepting, args=(self._listener,), daemon=True).start()

    def _accepting(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._server))
                for one, other, counts in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pump, args=(one, other, counts), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket, counts: bool) -> None:
        with self._lock:
            self._open.add(one)
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
                if counts:
                    with self._lock:
                        self.passed += len(data)
        with self._lock:
            self._open.discard(one)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)
        one.close()


# The status and the body that a request is refused with, if it is.
Refuse = Callable[[Message], "tuple[int, bytes] | None"]


class Remote(NamedTuple):
    """A remote store: what locations begin with, the environment that leads there, and how objects get there."""

    root: str
    environment: dict[str, str]
    put: object
    requests: list[str] | None = None
    # Of the plain server: a test's own decisions which requests to refuse, by their headers.
    refuse: list[Refuse] | None = None


@functools.cache
def _cached() -> dict[str, str]:
    printed = subprocess.run(["bash", str(_SCRIPT)], check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(line.split("=", 1) for line in printed.splitlines())


@contextlib.contextmanager
def _server(name: str, *arguments: str) -> Iterator[int]:
    """Runs the server; ``{port}`` in its arguments becomes a free port."""
    path = _cached().get(name)
    if path is None:
        pytest.skip(f"{name} is not to be had here; see tools/servers.sh")
    with _running(name, path, *arguments) as port:
        yield port


@contextlib.contextmanager
def _running(name: str, *arguments: str) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [argument.replace("{port}", str(port)) for argument in arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, f"{name} ended at once"
                assert time.monotonic() < deadline, f"{name} does not come up"
                time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait()


def _request(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, body, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    assert answer.status < 300, (answer.status, answer.read())
    connection.close()


@contextlib.contextmanager
def s3(directory: Path, *more: str, bucket: str = BUCKET) -> Iterator[Remote]:
    root = directory / bucket
    root.mkdir()
    flags = ["--access", "sentinel-access", "--secret", "sentinel-secret-key", "--quiet", "--keep-alive"]
    with _server("versitygw", *flags, *more, "--port", "127.0.0.1:{port}", "posix", str(directory)) as port:

        def put(key: str, body: bytes) -> None:
            path = root / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)

        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "sentinel-access",
            "AWS_SECRET_ACCESS_KEY": "sentinel-secret-key",
        }
        yield Remote(f"s3://{bucket}", environment, put)


@contextlib.contextmanager
def moto(directory: Path, bucket: str = BUCKET) -> Iterator[Remote]:
    """S3 once more, as boto3's users imitate it: keys of any form, and Amazon's own listings and errors.

    It wants requests to be signed, but compares no signature.
    """
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed")
    with _running("moto", sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "{port}") as port:
        credential = "Credential=sentinel-access/20260101/us-east-1/s3/aws4_request"
        signed = f"AWS4-HMAC-SHA256 {credential}, SignedHeaders=host, Signature=0"
        _request(port, "PUT", f"/{bucket}", Authorization=signed)

        def put(key: str, body: bytes) -> None:
            _request(port, "PUT", f"/{bucket}/{urllib.parse.quote(key)}", body, Authorization=signed)

        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "sentinel-access",
            "AWS_SECRET_ACCESS_KEY": "sentinel-secret-key",
        }
        yield Remote(f"s3://{bucket}", environment, put)


def forget_settings(monkeypatch: pytest.MonkeyPatch, *prefixes: str) -> None:
    """Takes away the variables of proxies and certificates, and those of a provider: AWS's, if none is named."""
    for name in os.environ:
        if name.startswith(prefixes or "AWS_") or name.lower().endswith(("_proxy", "_ca_bundle", "ssl_cert_file")):
            monkeypatch.delenv(name)


@contextlib.contextmanager
def s3_without_credentials(home: Path, body: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An S3 that the environment leads to, without proxies and keys but those that a test puts into ``home``.

    Yields an object.
    """
    directory = home / "gateway"
    directory.mkdir()
    with s3(directory) as remote:
        forget_settings(monkeypatch)
        monkeypatch.setenv("HOME", str(home))
        remote.put("m.safetensors", body)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", remote.environment["AWS_ENDPOINT_URL"])
        monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "credentials"))
        yield f"{remote.root}/m.safetensors"


@contextlib.contextmanager
def gcs(directory: Path, bucket: str = BUCKET) -> Iterator[Remote]:
    flags = ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", "{port}"]
    with _server("fake-gcs-server", *flags, "-public-host", "127.0.0.1:{port}") as port:
        _request(port, "POST", "/storage/v1/b?project=p", b'{"name":"%s"}' % bucket.encode())

        def put(key: str, body: bytes) -> None:
            name = urllib.parse.quote(key, safe="")
            _request(port, "POST", f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}", body)

        yield Remote(f"gs://{bucket}", {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}, put)


@contextlib.contextmanager
def azure(directory: Path, bucket: str = BUCKET) -> Iterator[Remote]:
    flags = ["--silent", "--skipApiVersionCheck", "--inMemoryPersistence", "--disableTelemetry"]
    with _server("azurite", *flags, "--blobPort={port}") as port:
        # An account signature for making containers and writing objects.
        signed = [_AZURE_ACCOUNT, "cw", "b", "co", "", "2099-01-01T00:00:00Z", "", "", "2019-12-12", ""]
        mac = hmac.new(base64.b64decode(_AZURE_KEY), "\n".join(signed).encode(), hashlib.sha256).digest()
        query = urllib.parse.urlencode(
            {
                "sv": "2019-12-12",
                "ss": "b",
                "srt": "co",
                "sp": "cw",
                "se": "2099-01-01T00:00:00Z",
                "sig": base64.b64encode(mac).decode(),
            }
        )
        container = f"/{_AZURE_ACCOUNT}/{bucket}"
        _request(port, "PUT", f"{container}?restype=container&{query}", x_ms_version="2021-08-06")

        def put(key: str, body: bytes) -> None:
            headers = {"x_ms_version": "2021-08-06", "x_ms_blob_type": "BlockBlob"}
            _request(port, "PUT", f"{container}/{urllib.parse.quote(key)}?{query}", body, **headers)

        endpoint = f"http://127.0.0.1:{port}/{_AZURE_ACCOUNT}"
        connection = f"AccountName={_AZURE_ACCOUNT};AccountKey={_AZURE_KEY};BlobEndpoint={endpoint}"
        yield Remote(f"az://{bucket}", {"AZURE_STORAGE_CONNECTION_STRING": connection}, put)


@contextlib.contextmanager
def web(directory: Path) -> Iterator[Remote]:
    objects: dict[str, bytes] = {}
    requests: list[str] = []
    refuse: list[Refuse] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            requests.append(f"{self.command} {self.path}")
            body = objects.get(urllib.parse.unquote(self.path.partition("?")[0]))
            for decide in refuse:
                if refusal := decide(self.headers):
                    self.send_response(refusal[0])
                    self.send_header("Content-Length", str(len(refusal[1])))
                    self.end_headers()
                    self.wfile.write(refusal[1])
                    return
            if body is None:
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            asked = self.headers.get("Range")
            if asked is None:
                self.send_response(200)
            else:
                start, end = (int(number) for number in asked.removeprefix("bytes=").split("-"))
                end = min(end, len(body) - 1)
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{end}/{len(body)}")
                body = body[start : end + 1]
            self.send_header("ETag", f'"{hash(self.path)}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield Remote(
            f"http://127.0.0.1:{port}", {}, lambda key, body: objects.update({f"/{key}": body}), requests, refuse
        )


class Counted:
    """A way to a server on this machine that counts what it serves, and to whom.

    Attributes:
        port: where it is.
        served: bytes of every connection, by the port of the client.
    """

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.served: dict[int, int] = {}
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, (_, port) = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                self._open += [client, server]
                self.served[port] = 0
                for of, to, counted in ((client, server, None), (server, client, port)):
                    thread = threading.Thread(target=self._pass_on, args=(of, to, counted), daemon=True)
                    thread.start()
                    self._threads.append(thread)

    def _pass_on(self, of: socket.socket, to: socket.socket, counted: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := of.recv(1 << 18):
                if counted is not None:
                    self.served[counted] += len(data)
                to.sendall(data)
        for end in (of, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(10)
        for end in (self._listener, *self._open):
            end.close()


ALL = {"s3": s3, "moto": moto, "gcs": gcs, "azure": azure, "web": web}
