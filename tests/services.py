"""Imitations of what stands beside a store: services that give credentials, proxies, and servers as odd as some are."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import ssl
import subprocess
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import NamedTuple

import pytest


@contextlib.contextmanager
def serving(server: ThreadingTCPServer) -> Iterator[int]:
    """Runs a server in a thread; yields its port."""
    # A connection that its client keeps open is not waited for.
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield f"http://127.0.0.1:{port}", asked


@contextlib.contextmanager
def proxy(hosts: dict[str, int]) -> Iterator[tuple[str, list[str]]]:
    """Runs a forward proxy that knows these domains and everything below them, each as a port of this machine.

    Yields its URL and the URLs that it was asked for so far. Requests are passed on to the letter, since they are
    signed.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(self.path)
            url = urllib.parse.urlsplit(self.path)
            name = url.hostname or ""
            port = next((port for host, port in hosts.items() if f".{name}".endswith(f".{host}")), None)
            if port is None:
                self.send_error(502, "no such host")
                return
            target = self.path.partition(url.netloc)[2]
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.putrequest(self.command, target, skip_host=True, skip_accept_encoding=True)
            for header, value in self.headers.items():
                if not header.lower().startswith("proxy-"):
                    connection.putheader(header, value)
            connection.endheaders()
            answer = connection.getresponse()
            body = answer.read()
            self.send_response_only(answer.status)
            for header, value in answer.getheaders():
                if header.lower() not in {"transfer-encoding", "content-length", "connection"}:
                    self.send_header(header, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            connection.close()

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield f"http://127.0.0.1:{port}", asked


# What a server writes in answer to the head of a request, piece by piece.
Write = Callable[[str], Iterable[bytes]]


@contextlib.contextmanager
def bare(write: Write, tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, list[str]]]:
    """Runs a server that answers with bytes as they are, and closes the connection after each answer.

    Yields its address, ``127.0.0.1:port``, and the heads of the requests that it was asked so far.
    """
    asked: list[str] = []

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            # A client that goes away, or will not have the certificate, is nothing to talk about.
            with contextlib.suppress(OSError):
                connection = tls.wrap_socket(self.request, server_side=True) if tls else self.request
                head = b""
                while b"\r\n\r\n" not in head:
                    if not (more := connection.recv(1 << 16)):
                        return
                    head += more
                    # A greeting of TLS has no end that is looked for here.
                    if more[:1] == b"\x16":
                        break
                asked.append(head.decode(errors="replace"))
                for piece in write(asked[-1]):
                    connection.sendall(piece)
                connection.close()

    with serving(ThreadingTCPServer(("127.0.0.1", 0), Handler)) as port:
        yield f"127.0.0.1:{port}", asked


def certificate(
    directory: Path,
    names: str,
    days: tuple[str, str] = ("20200101000000", "20991231235959"),
    *,
    authority: bool = False,
) -> tuple[ssl.SSLContext, str]:
    """A certificate for these names, good between these days, and a server's settings with it. Its key is key.pem.

    It signs itself; ``authority`` makes it say that it may sign others, too.
    """
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    key, request, cert, config = (directory / name for name in ("key.pem", "request.pem", "cert.pem", "ca.cnf"))
    config.write_text(
        f"[ca]\ndefault_ca=own\n[own]\nnew_certs_dir={directory}\ndatabase={directory}/index\nserial={directory}/serial\n"
        f"default_md=sha256\npolicy=any\nunique_subject=no\n[any]\ncommonName=optional\n"
        f"[server]\nsubjectAltName={names}\nbasicConstraints=critical,CA:{str(authority).upper()}\n"
    )
    (directory / "index").write_text("")
    (directory / "serial").write_text("01")
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key, "-out", request]
    signed = ["-selfsign", "-batch", "-notext", "-keyfile", key, "-in", request, "-out", cert, "-extensions", "server"]
    period = ["-startdate", f"{days[0]}Z", "-enddate", f"{days[1]}Z"]
    for command in (
        ["openssl", "req", "-new", *made, "-subj", "/CN=test"],
        ["openssl", "ca", "-config", config, *signed, *period],
    ):
        subprocess.run(command, check=True, capture_output=True)
    settings = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    settings.load_cert_chain(cert, key)
    return settings, str(cert)
