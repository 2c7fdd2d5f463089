"""Storage options as people give them, for the core.

``storage_options`` names credentials, endpoints and settings of remote stores for one call, as in pandas and fsspec.
The core knows which names there are, and what they mean. Here only what Python adds is unpacked: nested mappings,
paths and numbers.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.arguments import is_url
from penstock.errors import ConfigError

logger = logging.getLogger(__name__)

_NESTED = {"client_kwargs", "config_kwargs", "session_kwargs"}
"""Mappings that s3fs hands on to botocore, whose names are options here too."""

_MAPPINGS = _NESTED | {"s3"}

_STYLES = ("auto", "path", "virtual")
"""How botocore addresses buckets."""


def core_options(
    given: Mapping[str, Any] | None, locations: Iterable[str] | None = None
) -> list[tuple[str, str]] | None:
    """The options as text, without those that are None.

    Args:
        given: what the caller wrote.
        locations: what the options are for, if that is known. Where all of it lies on this machine, a line in the log
            says once that they do nothing.

    Raises:
        ConfigError: what is given is no mapping from names, or a value is nothing that can be written as text. Values
            are not shown: they may be secret.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"storage_options is a {type(given).__name__}, not a mapping from names to values")
    if given and locations is not None:
        _check_place(given, [location for location in locations if is_url(location)])
    options: list[tuple[str, str]] = []
    for name, value in given.items():
        if not isinstance(name, str):
            raise ConfigError(f"storage_options: {name!r} is not a name")
        if value is None:
            continue
        if name in _MAPPINGS and not isinstance(value, Mapping):
            raise _no_mapping(name, value)
        if name == "s3":
            options += _addressing(value)
        elif name in _NESTED:
            options += core_options(value) or []
        else:
            options.append((name, _text(name, value)))
    return options


def _check_place(given: Mapping[str, Any], remote: list[str]) -> None:
    if not remote:
        _say_once()
    elif isinstance(given.get("token"), Mapping) and not all(map(_is_google, remote)):
        cause = "storage_options: token is a dict, which only Google Cloud Storage takes: a service account's key"
        raise ConfigError(cause=cause, remedy="Give the token as text")


@functools.cache
def _say_once() -> None:
    logger.warning("storage_options are for remote locations: what lies on this machine is read without them")


def _is_google(location: str) -> bool:
    return location.lower().startswith(("gs://", "gcs://"))


def _no_mapping(name: str, value: object) -> ConfigError:
    cause = f"storage_options: {name} must be a mapping from names to values, not a {type(value).__name__}"
    example = '{"addressing_style": "path"}' if name == "s3" else '{"endpoint_url": "https://…"}'
    remedy = f'Write {{"{name}": {example}}}'
    return ConfigError(cause=cause, remedy=remedy)


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int)):
        # What is blank came of something that was empty, and says as much.
        return str(value) if str(value).strip() else ""
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, Mapping) and name == "token":  # of gcsfs: a service account's key
        return json.dumps(dict(value))
    raise ConfigError(
        f"storage_options: the value of {name!r} is a {type(value).__name__}: text, path, number or bool is needed"
    )


def _addressing(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """``config_kwargs={"s3": {"addressing_style": "virtual"}}``, as botocore has it."""
    if unknown := sorted(repr(name) for name in set(settings) - {"addressing_style"}):
        raise ConfigError(
            f"storage_options: of config_kwargs['s3'] only addressing_style is known, not {', '.join(unknown)}"
        )
    style = settings.get("addressing_style") or "auto"
    if style not in _STYLES:
        raise ConfigError(
            f"storage_options: config_kwargs['s3']['addressing_style'] is none of {', '.join(_STYLES)}",
            remedy=f"Give one of {', '.join(_STYLES)}",
        )
    return [] if style == "auto" else [("virtual_hosted_style_request", "true" if style == "virtual" else "false")]
