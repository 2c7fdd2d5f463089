"""Access tokens of Google, made by google-auth: a program that the core runs, once for each token.

It reads one line, a file of credentials as JSON, and writes one, a JSON object: ``token``, ``expires`` (seconds since
1970) and, where the next token takes another file, ``file``. Or ``error``, ``remedy``, and its ``class``: ``final``,
``transient``, ``unreachable`` or ``missing_dependency``.
"""

from __future__ import annotations

import json
import os
import sys
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
_PATIENCE = (5, 30)
"""Seconds for a connection to be made, and for a service to say something."""


def main() -> None:
    """Answers one question."""
    # What lies beside this file has the names of other packages.
    here = Path(__file__).parent.resolve()
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]
    if bundle := os.environ.get("SSL_CERT_FILE"):
        os.environ.setdefault("REQUESTS_CA_BUNDLE", bundle)
    answer = _answer(json.loads(sys.stdin.readline()))
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    # Threads that google-auth began are not waited for.
    os._exit(0)


def _answer(file: dict[str, Any]) -> dict[str, Any]:
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
        response = transport(**asked | {"timeout": _PATIENCE})
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
        # Where google-auth took an answer apart, it comes again as a whole.
        parts = error.args[:1] if isinstance(error, exceptions.OAuthError) else error.args
        text = str(error) if isinstance(error, OSError) else " ".join(map(str, parts))
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        text = " ".join(text.split())[:_LONGEST] or type(error).__name__
        is_lost = isinstance(error, exceptions.TransportError) and "CERTIFICATE_VERIFY_FAILED" not in text
        passes = (
            is_lost
            or status in {408, 429}
            or status >= HTTPStatus.INTERNAL_SERVER_ERROR
            or getattr(error, "retryable", False)
        )
        return {
            "error": text + (f" (HTTP {status})" if status >= HTTPStatus.BAD_REQUEST else ""),
            "class": "transient" if passes else "final",
        }
    answer = {"token": credentials.token}
    if credentials.expiry:
        answer["expires"] = credentials.expiry.replace(tzinfo=timezone.utc).timestamp()
    if file["type"] == "external_account_authorized_user":
        # Its service may take each refresh token once.
        answer["file"] = file | {"refresh_token": credentials.refresh_token}
    return answer


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
    """Texts under names of secrets, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _secrets(inner, key)
    elif isinstance(value, str) and value and name.lower().endswith(_SECRET):
        yield value


if __name__ == "__main__":
    main()
