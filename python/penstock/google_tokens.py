"""Access tokens of Google, made by google-auth: a program that the core runs, once for each token.

Its argument, if any, names the certificates to trust: files and directories with colons between them.
It reads one line, a file of credentials as JSON, and writes one, a JSON object: ``token``, ``expires`` (seconds since
1970) and, where the next token takes another file, ``file``. Or ``error``, ``remedy``, and its ``class``: ``final``,
``transient``, ``unreachable`` or ``missing_dependency``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import timezone
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

COMMAND = [sys.executable, __file__] if sys.executable and not getattr(sys, "frozen", False) else []
"""How the core runs it; nothing where Python is part of another program and no interpreter is known."""

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
_SECRET = ("secret", "token", "private_key", "assertion")
_LONGEST = 400
_TRUST = "Check the certificate of the token service; a private authority's goes to SSL_CERT_FILE"
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_PATIENCE = (5, 30)
"""Seconds for a connection to be made, and for a service to say something."""


def main() -> None:
    """Answers one question."""
    # What is deprecated in google-auth is no error, whatever PYTHONWARNINGS says.
    warnings.simplefilter("ignore")
    # Ignored by who runs this, it would hide how programs end.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # What lies beside this file has the names of other packages.
    here = Path(__file__).parent.resolve()
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]
    answer = _answer(json.loads(sys.stdin.readline()), _one_file(sys.argv[1]) if sys.argv[1:] else None)
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    # Threads that google-auth began are not waited for.
    os._exit(0)


def _one_file(paths: str) -> str:
    """One file with the certificates of files and directories that colons are between, as requests wants it."""
    if Path(paths).is_file():
        return paths
    given = [Path(path) for path in ([paths] if Path(paths).exists() else paths.split(":")) if os.access(path, os.R_OK)]
    files = [file for path in given for file in (path.iterdir() if path.is_dir() else [path])]
    readable = [file for file in files if file.is_file() and os.access(file, os.R_OK)]
    found = [block for file in readable for block in _CERTIFICATE.findall(file.read_bytes())]
    memory = os.memfd_create("certificates")
    Path(f"/proc/self/fd/{memory}").write_bytes(b"\n".join(dict.fromkeys(found)))
    return f"/proc/self/fd/{memory}"


def _answer(file: dict[str, Any], certificates: str | None) -> dict[str, Any]:
    try:
        import google.auth
        from google.auth import exceptions
        from google.auth.credentials import with_scopes_if_required
        from google.auth.transport import requests
    except ImportError as error:
        return {
            "error": f"google-auth is needed: {error}",
            "remedy": "pip install 'penstock-loader[gcs]'",
            "class": "missing_dependency",
        }
    transport, status, secrets, server = requests.Request(), 0, set(_secrets(file)), ""

    def request(**asked: Any) -> Any:
        nonlocal status, server
        url = urlsplit(asked["url"])
        status, server = 0, f"{url.scheme}://{url.netloc.rpartition('@')[2]}"
        body = asked.get("body") or b""
        secrets.update(_secrets(dict(parse_qsl(body.decode() if isinstance(body, bytes) else body))))
        headers = {name.lower(): value for name, value in (asked.get("headers") or {}).items()}
        secrets.update(headers.get("authorization", "").split()[1:])
        response = transport(**asked | {"timeout": _PATIENCE}, verify=certificates)
        status = response.status
        return response

    try:
        credentials, _ = google.auth.load_credentials_from_dict(file, request=request)
        # Not while loading: what has scopes then has a project looked up, at an address of Google's own.
        credentials = with_scopes_if_required(credentials, [_SCOPE])
        credentials.refresh(request)
    except Exception as error:  # noqa: BLE001 - files that others wrote raise anything
        if (cause := _unreachable(error)) is not None:
            remedy = (
                f"Check that this machine may reach {server} (HTTPS_PROXY, NO_PROXY), or set "
                "GOOGLE_APPLICATION_CREDENTIALS to a service account's key file"
            )
            return {"error": f"no connection to {server}: {cause}", "remedy": remedy, "class": "unreachable"}
        text = _told(error, status)
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        is_refused = "CERTIFICATE_VERIFY_FAILED" in text
        text = " ".join(text.split())[:_LONGEST] or type(error).__name__
        is_lost = isinstance(error, exceptions.TransportError) and not is_refused
        passes = (
            is_lost
            or status in {408, 429}
            or status >= HTTPStatus.INTERNAL_SERVER_ERROR
            or getattr(error, "retryable", False)
        )
        told = {
            "error": text + (f" (HTTP {status})" if status >= HTTPStatus.BAD_REQUEST else ""),
            "class": "transient" if passes else "final",
        }
        return told | ({"remedy": _TRUST} if is_refused else {})
    answer = {"token": credentials.token}
    if credentials.expiry:
        answer["expires"] = credentials.expiry.replace(tzinfo=timezone.utc).timestamp()
    if file["type"] == "external_account_authorized_user":
        # Its service may take each refresh token once.
        answer["file"] = file | {"refresh_token": credentials.refresh_token}
    return answer


def _told(error: Exception, status: int) -> str:
    """What an error says that cannot be a token: of those that are not google-auth's, their kind."""
    from google.auth import exceptions

    if isinstance(error, subprocess.TimeoutExpired):
        return "the program timed out"
    if isinstance(error, UnicodeError):
        return "a token, or an answer, is not text in UTF-8"
    if not isinstance(error, exceptions.GoogleAuthError):
        return str(error) if isinstance(error, (OSError, json.JSONDecodeError)) else type(error).__name__
    # Where google-auth took an answer apart, it comes again as a whole. One that is no refusal holds a token.
    is_whole = status < HTTPStatus.BAD_REQUEST or isinstance(error, exceptions.OAuthError)
    text = " ".join(map(str, error.args[:1] if is_whole else error.args))
    if not status and isinstance(error, exceptions.RefreshError):
        # What a program wrote follows its exit status.
        text = text.partition(". Error:")[0]
    # What requests makes of a query need not be what the file says.
    return re.sub(r"\?\S+", "?***", text)


def _unreachable(error: BaseException) -> str | None:
    """Why nobody is there, where that is what failed."""
    from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

    seen: list[BaseException] = [error]
    for one in seen:
        if isinstance(one, NewConnectionError):  # which is a ConnectTimeoutError too
            return str(one).rpartition(": ")[2]
        if isinstance(one, ConnectTimeoutError):
            return "nobody answered in time"
        inner = [one.__cause__, one.__context__, getattr(one, "reason", None), *one.args]
        seen += [other for other in inner if isinstance(other, BaseException) and other not in seen]
    return None


def _secrets(value: object, name: str = "") -> Iterator[str]:
    """Texts under names of secrets, at any depth, and queries of URLs."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _secrets(inner, key)
    elif isinstance(value, str) and value and name.lower().endswith(_SECRET):
        yield value
    elif isinstance(value, str) and "://" in value and (query := value.partition("?")[2]):
        yield query


if __name__ == "__main__":
    main()
