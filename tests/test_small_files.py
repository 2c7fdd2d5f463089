"""Small files beside weights, from servers that cannot list: what is absent, and what is denied."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import penstock
from penstock.integrations.shared.small_files import fetch

pytestmark = pytest.mark.stores

ABSENT_FOR_S3 = (403, b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")
"""What S3 answers for a key that does not exist, to those who may not list the bucket."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    otherwise: tuple[int, bytes]

    def do_GET(self) -> None:
        body = self.files.get(self.path)
        if body is None:
            status, body = self.otherwise
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
        else:
            self.send_response(206 if self.headers.get("Range") else 200)
            self.send_header("ETag", '"1"')
            self.send_header("Content-Range", f"bytes 0-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def handler() -> Iterator[tuple[type[_Handler], str]]:
    """A server's handler, whose files and other answers a test sets, and its address."""
    made = type("Handler", (_Handler,), {"files": {}, "otherwise": ABSENT_FOR_S3})
    server = ThreadingHTTPServer(("127.0.0.1", 0), made)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield made, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("names", [["config.json"], ["tokenizer_config.json", "vocab.json"], ["model_index.json"]])
def test_what_s3_denies_beside_what_it_gives_is_absent(handler, tmp_path: Path, names: list[str]) -> None:
    server, root = handler
    server.files = {f"/model/{name}": b'{"a": 1}' for name in names}
    assert sorted(fetch(f"{root}/model", str(tmp_path))) == sorted(names)
    assert (tmp_path / names[0]).read_bytes() == b'{"a": 1}'


def test_a_folder_of_which_nothing_may_be_read_is_an_access_error(handler, tmp_path: Path) -> None:
    _, root = handler
    with pytest.raises(penstock.LocationAccessError, match=r"model/config\.json"):
        fetch(f"{root}/model", str(tmp_path))


def test_denial_of_the_file_that_describes_the_model_is_an_access_error(handler, tmp_path: Path) -> None:
    server, root = handler
    server.files = {"/model/vocab.json": b"{}"}
    with pytest.raises(penstock.LocationAccessError, match=r"model/config\.json"):
        fetch(f"{root}/model", str(tmp_path))


@pytest.mark.parametrize(
    "answer",
    [
        (401, b"who are you"),
        (403, b"<html>forbidden</html>"),
        (403, b"<?xml version='1.0'?><Error><Code>SignatureDoesNotMatch</Code><Message>m</Message></Error>"),
    ],
)
def test_any_other_refusal_is_an_access_error(handler, tmp_path: Path, answer: tuple[int, bytes]) -> None:
    server, root = handler
    server.files, server.otherwise = {"/model/config.json": b"{}"}, answer
    with pytest.raises(penstock.LocationAccessError):
        fetch(f"{root}/model", str(tmp_path))
