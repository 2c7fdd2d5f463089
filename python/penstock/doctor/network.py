"""Facts of the way to a store: who serves it, how far it is, its clock, and what the cloud says of this machine.

What the core knows of credentials (where they come from) is taken from there; none are looked at here. Requests are
bare: a ``HEAD`` of the server without credentials, and the metadata service's region. No request waits longer than
``PATIENCE``.
"""

from __future__ import annotations

import email.utils
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from penstock.doctor.facts import Cloud, Remote

PATIENCE = 1.5
"""Seconds that one request may take."""
_METADATA = "http://169.254.169.254"
_CLOUDS = {"Amazon EC2": "aws", "Google": "gcp", "Google Compute Engine": "gcp", "Microsoft Corporation": "azure"}
"""Who made a machine, and whose metadata service answers on it."""
_PUBLIC = {"gs": "storage.googleapis.com", "hf": "huggingface.co"}
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_BY_HOST = "AWS_VIRTUAL_HOSTED_STYLE_REQUEST"
_NO = {"", "0", "false", "no", "off"}


def remote(
    location: str,
    access: tuple[str, str, str | None, str] | None,
    environment: Mapping[str, str],
    options: Mapping[str, Any],
) -> Remote:
    """How a URL is reached.

    Args:
        location: the URL of the checkpoint.
        access: what the core says (``Checkpoint.access``); None where it could not be opened.
        environment: the variables of the process.
        options: the storage options.
    """
    parts = urlsplit(location)
    provider, endpoint, region, credentials = access or ("", "", None, "")
    own = options.get("endpoint_url") or next(filter(None, map(environment.get, _ENDPOINTS)), "")
    endpoint = endpoint if "://" in endpoint else str(own) if parts.scheme == "s3" else ""
    url = endpoint if "://" in endpoint else f"https://{_host(parts.scheme, parts.hostname or '', region, parts.port)}"
    if parts.scheme == "http":
        url = url.replace("https://", "http://", 1)
    by_host = bool(endpoint) and parts.scheme == "s3" and _is_by_host(environment, options)
    server = urlsplit(url)
    host = f"{parts.hostname}.{server.hostname}" if by_host else server.hostname or ""
    proxy = _proxy(server.scheme, host, environment)
    resolves = bool(proxy) or _resolves(host)
    round_trip, clock_ahead = (
        _asked(f"{server.scheme}://{server.netloc.rpartition('@')[2]}/") if resolves else (None, None)
    )
    return Remote(
        provider=provider or parts.scheme,
        scheme=parts.scheme,
        host=host,
        region=region,
        credentials=credentials or None,
        round_trip=round_trip,
        clock_ahead=clock_ahead,
        resolves=resolves,
        by_host=by_host,
        proxy=proxy,
    )


def _host(scheme: str, named: str, region: str | None, port: int | None) -> str:
    if scheme == "s3":
        return f"s3.{region or 'us-east-1'}.amazonaws.com"
    if scheme in {"http", "https"}:
        return f"{named}:{port}" if port else named
    return _PUBLIC.get(scheme, named)


def _is_by_host(environment: Mapping[str, str], options: Mapping[str, Any]) -> bool:
    given = (options.get("config_kwargs") or {}).get("s3", {}).get("addressing_style")
    named = options.get("virtual_hosted_style_request", environment.get(_BY_HOST, ""))
    return given == "virtual" or (given is None and str(named).lower() not in _NO)


def _proxy(scheme: str, host: str, environment: Mapping[str, str]) -> str | None:
    """The variable that names a proxy for a host."""
    if urllib.request.proxy_bypass_environment(  # type: ignore[attr-defined]
        host, {"no": environment.get("NO_PROXY", environment.get("no_proxy", ""))}
    ):
        return None
    names = (f"{scheme}_proxy", "all_proxy")
    return next((name for of in names for name in (of.upper(), of) if environment.get(name)), None)


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False


def _asked(url: str) -> tuple[float | None, float | None]:
    """The seconds of a request on a fresh connection, and how far this machine's clock is ahead of the server's."""
    began = time.perf_counter()
    headers = _headers(url, "HEAD")
    seconds = time.perf_counter() - began
    if headers is None:
        return None, None
    try:
        told = email.utils.parsedate_to_datetime(headers.get("date", "")).timestamp()
    except (TypeError, ValueError):
        return seconds, None
    # A date has whole seconds: it is half a second old, and as old as the way back.
    return seconds, time.time() - told - 0.5


def _headers(url: str, method: str) -> Mapping[str, str] | None:
    """The headers of whatever answer, with names in small letters."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=PATIENCE) as answer:  # noqa: S310
            return {name.lower(): value for name, value in answer.headers.items()}
    except urllib.error.HTTPError as error:
        return {name.lower(): value for name, value in error.headers.items()}
    except (OSError, ValueError):
        return None


def cloud(vendor: str | None, environment: Mapping[str, str] = os.environ) -> Cloud | None:
    """What the metadata service of a cloud says; None on machines that are of no cloud, where nobody is asked.

    The services' own variables (``AWS_EC2_METADATA_SERVICE_ENDPOINT``, ``GCE_METADATA_HOST``) name other addresses.
    """
    provider = _CLOUDS.get(vendor or "")
    if provider == "aws":
        return _aws((environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or _METADATA).rstrip("/"))
    if provider == "gcp":
        host = environment.get("GCE_METADATA_HOST") or "169.254.169.254"
        zone = _text(f"http://{host}/computeMetadata/v1/instance/zone", {"Metadata-Flavor": "Google"})
        region = (zone or "").rpartition("/")[2].rpartition("-")[0]
        return Cloud("gcp", region or None, zone is not None)
    if provider == "azure":
        query = "api-version=2021-02-01&format=text"
        location = _text(f"{_METADATA}/metadata/instance/compute/location?{query}", {"Metadata": "true"})
        return Cloud("azure", location, reachable=True) if location else None
    return None


def _aws(base: str) -> Cloud:
    """Answers to ``PUT`` have few hops to live: within a container they are lost where others arrive."""
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _text(f"{base}/latest/api/token", lifetime, method="PUT")
    headers = {} if token is None else {"X-aws-ec2-metadata-token": token}
    region = _text(f"{base}/latest/meta-data/placement/region", headers)
    # Without a token it may be refused, which is an answer too.
    reachable = region is not None or token is not None or _headers(f"{base}/latest/meta-data/", "GET") is not None
    return Cloud("aws", region, reachable, token is not None if reachable else None)


def _text(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """A short answer of the metadata service, which is never asked through a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310
        with opener.open(request, timeout=PATIENCE) as answer:
            return str(answer.read(4096), errors="replace").strip()
    except (OSError, ValueError):
        return None
