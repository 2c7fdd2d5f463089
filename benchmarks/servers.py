"""Servers that benchmarks of remote stores read from, on this machine: a directory of files over HTTP.

``nginx`` where it is found: what people would compare with. ``http-bench`` (``benchmarks/http``) otherwise, and where
the network is to be slow on purpose: it sends with ``sendfile`` too, answers listings of S3, and looks at no signature.
Either serves the file ``NAME`` as ``/NAME`` and as ``/bucket/NAME``, so that S3's clients find it. nginx alone can
speak TLS.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# One worker for each core, bodies by sendfile, connections kept for as many requests as a load makes.
_NGINX = """
{user}
worker_processes auto;
daemon off;
pid {work}/pid;
error_log {work}/error.log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    default_type application/octet-stream;
    sendfile on;
    sendfile_max_chunk 2m;
    tcp_nopush on;
    keepalive_requests 1000000;
    client_body_temp_path {work}/body;
    proxy_temp_path {work}/proxy;
    fastcgi_temp_path {work}/fastcgi;
    uwsgi_temp_path {work}/uwsgi;
    scgi_temp_path {work}/scgi;
    server {{
        listen 127.0.0.1:{port} reuseport{listen};
        {tls}
        location /bucket/ {{ alias {directory}/; }}
        location / {{ root {directory}; }}
    }}
}}
"""

# One cipher, so that it is known which one was measured.
_TLS = """ssl_certificate {certificate};
        ssl_certificate_key {key};
        ssl_protocols TLSv1.3;
        ssl_conf_command Ciphersuites {cipher};"""


class Tls(NamedTuple):
    """A certificate for 127.0.0.1 that is its own authority, and the one cipher suite of TLS 1.3 that is spoken."""

    certificate: Path
    key: Path
    cipher: str


def tls(directory: Path, cipher: str) -> Tls:
    """Makes a certificate in ``directory`` with openssl, of the kind that object stores have."""
    made = Tls(directory / "certificate.pem", directory / "key.pem", cipher)
    if not made.certificate.exists():
        name = ["-subj", "/CN=benchmark", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
        kind = ["-newkey", "rsa:2048", "-nodes", "-addext", "basicConstraints=critical,CA:FALSE"]
        files = ["-keyout", str(made.key), "-out", str(made.certificate)]
        command = ["openssl", "req", "-x509", *kind, *name, *files]
        subprocess.run(command, check=True, capture_output=True)
    return made


def nginx() -> str | None:
    """Where nginx is, if it is installed."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/opt/nginx/sbin")


def version(program: str) -> str:
    """What a server calls itself."""
    if Path(program).name != "nginx":
        return "http-bench"
    told = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stderr
    return told.strip().removeprefix("nginx version: ")


@contextlib.contextmanager
def serving(program: str, directory: Path, shape: list[str], tls: Tls | None = None) -> Iterator[str]:
    """Serves a directory while the block runs; yields ``host:port``.

    ``shape`` is for ``http-bench`` alone, ``tls`` for nginx.
    """
    if Path(program).name == "nginx":
        serving = _nginx(program, directory, tls)
    else:
        assert tls is None, "http-bench speaks no TLS"
        serving = _own(program, directory, shape)
    with serving as address:
        yield address


@contextlib.contextmanager
def _own(program: str, directory: Path, shape: list[str]) -> Iterator[str]:
    command = [program, "serve", str(directory), *shape]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"127.0.0.1:{server.stdout.readline().strip()}"
        finally:
            server.kill()


@contextlib.contextmanager
def _nginx(program: str, directory: Path, tls: Tls | None) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="penstock-nginx-") as work:
        settings = Path(work) / "nginx.conf"
        # Root's workers would be nobody, who may not read everything.
        user = "user root;" if os.getuid() == 0 else ""
        where = {"work": work, "port": port, "directory": directory.resolve()}
        secure = {"listen": " ssl" if tls else "", "tls": _TLS.format(**tls._asdict()) if tls else ""}
        settings.write_text(_NGINX.format(user=user, **where, **secure))
        with subprocess.Popen([program, "-c", str(settings), "-p", work, "-e", f"{work}/error.log"]) as server:
            try:
                _wait(server, port, Path(work) / "error.log")
                yield f"127.0.0.1:{port}"
            finally:
                # The master ends its workers.
                server.terminate()


def _wait(server: subprocess.Popen[bytes], port: int, errors: Path) -> None:
    deadline = time.monotonic() + 20
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if server.poll() is not None or time.monotonic() > deadline:
            said = errors.read_text() if errors.exists() else "it said nothing"
            raise RuntimeError(f"nginx does not come up: {said}")
        time.sleep(0.02)
