"""An imitation of the Hugging Face hub that its own client, ``huggingface_hub``, accepts.

Large files are redirected to a delivery network on another port, which has tags of its own, wants a signature and no
token; small ones come from the hub itself. Listings have pages. Refusals are told by ``X-Error-Code``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

LARGE = 4096
"""Files of at least so many bytes are on the delivery network."""
_PAGE = 3


class Repository(NamedTuple):
    """``commits`` by their digests, ``refs`` to them; the ``token`` that is needed; whether it is ``gated``."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    token: str | None = None
    gated: bool = False


class Hub:
    """The hub's content, and what was asked of it.

    Attributes:
        endpoint: for ``HF_ENDPOINT``.
        requests: who was asked, method, path, and the authorization it came with.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, str, str]] = []
        self.endpoint = self.network = ""

    def push(self, name: str, files: dict[str, bytes], **how: object) -> str:
        """Adds a commit to branch main of ``org/name`` or ``datasets/org/name``; returns its digest."""
        known = self.repositories.get(name) or Repository({}, {})
        commit = hashlib.sha1(f"{name}{len(known.commits)}".encode(), usedforsecurity=False).hexdigest()
        commits, refs = {**known.commits, commit: files}, {**known.refs, "main": commit}
        self.repositories[name] = known._replace(commits=commits, refs=refs, **how)
        return commit


def tag(body: bytes) -> str:
    if len(body) >= LARGE:
        return hashlib.sha256(body).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    who: str

    def do_GET(self) -> None:
        authorization = self.headers.get("Authorization", "")
        self.hub.requests.append((self.who, self.command, self.path, authorization))
        path, _, query = self.path.partition("?")
        if self.who == "network":
            self._deliver(path, query)
        else:
            self._answer(path, dict(urllib.parse.parse_qsl(query)), authorization)

    do_HEAD = do_GET  # noqa: N815

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(OSError):
                self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(status, headers, json.dumps({"error": message}).encode())

    def _body(self, headers: dict[str, str], body: bytes) -> None:
        asked = self.headers.get("Range")
        if asked is None:
            self._send(200, headers, body)
            return
        start, _, end = asked.removeprefix("bytes=").partition("-")
        first, last = int(start), min(int(end or len(body)), len(body) - 1)
        if first > last:
            self._send(416, headers)
            return
        headers = {**headers, "Content-Range": f"bytes {first}-{last}/{len(body)}"}
        self._send(206, headers, body[first : last + 1])

    def _deliver(self, path: str, query: str) -> None:
        for repository in self.hub.repositories.values():
            for files in repository.commits.values():
                for body in files.values():
                    if tag(body) == path.strip("/") and query == "signature=1":
                        self._body({"ETag": f'"network-{tag(body)[:8]}"'}, body)
                        return
        self._send(403, {}, b"<Error><Code>AccessDenied</Code></Error>")

    def _answer(self, path: str, query: dict[str, str], authorization: str) -> None:
        parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/")]
        is_api = parts[0] == "api"
        if is_api:
            parts = parts[2:] if parts[1] == "models" else parts[1:]
        length = 3 if parts[0] in {"datasets", "spaces"} else 2
        name, (action, revision, *rest) = "/".join(parts[:length]), [*parts[length:], "", ""][:2] + parts[length + 2 :]
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._refuse(404 if authorization else 401, "RepoNotFound", "Repository not found")
            return
        allowed = repository.token is None or authorization == f"Bearer {repository.token}"
        if not allowed and repository.gated and not is_api:
            self._refuse(403 if authorization else 401, "GatedRepo", f"Access to model {name} is restricted")
            return
        if not allowed and not repository.gated:
            self._refuse(404 if authorization else 401, "RepoNotFound", "Repository not found")
            return
        commit = repository.refs.get(revision, revision) or repository.refs["main"]
        files = repository.commits.get(commit)
        if files is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif is_api and action == "tree":
            self._tree(files, "/".join(rest), query, path)
        elif is_api:
            siblings = [{"rfilename": file} for file in files]
            answer = {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": False, "tags": []}
            self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())
        else:
            self._file(files, "/".join(rest), commit)

    def _tree(self, files: dict[str, bytes], directory: str, query: dict[str, str], path: str) -> None:
        prefix = f"{directory}/" if directory else ""
        entries: dict[str, dict[str, object]] = {}
        for file, body in sorted(files.items()):
            if not file.startswith(prefix):
                continue
            below = file[len(prefix) :]
            head, slash, _ = below.partition("/")
            recursive = query.get("recursive", "false").lower() == "true"
            if slash:
                entries[prefix + head] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": prefix + head}
            if not slash or recursive:
                entries[file] = {"type": "file", "oid": tag(body)[:40], "size": len(body), "path": file}
                if len(body) >= LARGE:
                    entries[file]["lfs"] = {"oid": tag(body), "size": len(body), "pointerSize": 134}
        if directory and not entries:
            self._refuse(404, "EntryNotFound", f"{directory} does not exist")
            return
        begin = int(query.get("cursor", "0"))
        headers = {"Content-Type": "application/json"}
        if begin + _PAGE < len(entries):
            following = urllib.parse.urlencode({**query, "cursor": begin + _PAGE})
            headers["Link"] = f'<{self.hub.endpoint}{path}?{following}>; rel="next"'
        self._send(200, headers, json.dumps(list(entries.values())[begin : begin + _PAGE]).encode())

    def _file(self, files: dict[str, bytes], file: str, commit: str) -> None:
        body = files.get(file)
        if body is None:
            headers = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": commit}
            self._send(404, headers, b'{"error":"Entry not found"}')
            return
        headers = {"X-Repo-Commit": commit}
        if len(body) < LARGE:
            self._body({**headers, "ETag": f'"{tag(body)}"'}, body)
            return
        headers |= {"X-Linked-ETag": f'"{tag(body)}"', "X-Linked-Size": str(len(body))}
        headers["Location"] = f"{self.hub.network}/{tag(body)}?signature=1"
        self._send(302, headers, b"Found")

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def hub() -> Iterator[Hub]:
    """A running hub and its delivery network."""
    made = Hub()
    running = []
    for who in ("hub", "network"):
        handler = type("Handler", (_Handler,), {"hub": made, "who": who})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        running.append((server, thread))
    (made.endpoint, made.network) = (f"http://127.0.0.1:{server.server_address[1]}" for server, _ in running)
    try:
        yield made
    finally:
        for server, thread in running:
            server.shutdown()
            server.server_close()
            thread.join()
