"""What is asked of Penstock: settings from the environment, credentials for a call, errors as callers expect them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import penstock
from runai_model_streamer.s3_utils.s3_utils import S3Credentials, is_azure_path, is_gs_path, is_s3_path

MEMORY_LIMIT = "RUNAI_STREAMER_MEMORY_LIMIT"
UNLIMITED = 1 << 62
"""Bytes of read-ahead where the limit is lifted."""

_WORDS = {
    "truncated": "Corrupted File: it is truncated",
    "trailing_bytes": "Corrupted File: extra trailing bytes",
    "gap": 'Corrupted File: a gap, tensor "{tensor}" does not start where it should',
    "overlap": 'Corrupted File: tensor "{other}" overlaps with next tensor',
    "header_too_large": "Corrupted File: Header size exceeds limit",
    "bad_header": "Corrupted File: Header is not valid JSON",
    "header_not_utf8": "Corrupted File: Header is not valid UTF-8",
    "size_mismatch": 'Corrupted tensor "{tensor}": Shape claims {needed} bytes, but offsets reserve {given} bytes',
    "unknown_dtype": "Unsupported dtype '{dtype}'",
}
"""How the interface says what is wrong with a malformed file, by the code of Penstock's error."""


class RunaiStreamerMemoryLimitException(Exception):  # noqa: N818 - the name that callers know
    """A memory limit that the largest tensor does not fit in."""


class RunaiStreamerInvalidInputException(Exception):  # noqa: N818
    """A device that torch does not know, or paths of several kinds in one call."""


def load_options(memory_limit: int | None = None) -> penstock.LoadOptions:
    """Settings of a load.

    ``RUNAI_STREAMER_CONCURRENCY`` sets readers and ``RUNAI_STREAMER_CHUNK_BYTESIZE`` or ``…_BLOCK_BYTESIZE`` the size
    of blocks; without them both are found. ``RUNAI_STREAMER_MEMORY_LIMIT`` bounds how far reading goes ahead: -1 for
    not at all, 0 for one tensor at a time.

    Raises:
        ValueError: naming the variable, for what is no number or an impossible one.
    """
    block = number("RUNAI_STREAMER_CHUNK_BYTESIZE", least=1) or number("RUNAI_STREAMER_BLOCK_BYTESIZE", least=1)
    most = limit(memory_limit)
    ahead = None if most is None else UNLIMITED if most < 0 else max(most, 1)
    return penstock.LoadOptions(
        readers=number("RUNAI_STREAMER_CONCURRENCY", least=1),
        # Penstock's blocks are whole pages, and smaller ones than these gain nothing.
        block_bytes=None if block is None else max(block // 4096 * 4096, 64 << 10),
        window_bytes=ahead,
    )


def limit(memory_limit: int | None = None) -> int | None:
    """The bytes that a call or ``RUNAI_STREAMER_MEMORY_LIMIT`` says; None where neither does."""
    return number(MEMORY_LIMIT, least=-1) if memory_limit is None else memory_limit


def check_memory_limit(largest: int, memory_limit: int | None = None) -> None:
    """Refuses a limit that the largest tensor does not fit in.

    Raises:
        RunaiStreamerMemoryLimitException: which says both numbers.
    """
    most = limit(memory_limit)
    if most is not None and 0 < most < largest:
        raise RunaiStreamerMemoryLimitException(f"Memory limit supplied: {most} cannot be smaller than: {largest}")


def number(name: str, least: int) -> int | None:
    """The number of a variable of the environment; None where it says nothing.

    Raises:
        ValueError: naming the variable, for what is no number or less than ``least``.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        found = int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number") from None
    if found < least:
        raise ValueError(f"{name}={found}: the least is {least}")
    return found


def storage_options(paths: Iterable[str], given: S3Credentials | None = None) -> dict[str, str]:
    """What Penstock is to reach the store of these paths with: the credentials given, and what this interface's
    variables say of stores. The environment stays as it is.
    """
    path = next(iter(paths), "")
    if is_s3_path(path):
        endpoint = os.environ.get("RUNAI_STREAMER_OVERRIDE_ENDPOINT_URL") or os.environ.get(
            "RUNAI_STREAMER_S3_ENDPOINT"
        )
        options: dict[str, str | None] = {
            "endpoint_url": endpoint,
            "anon": _switch("RUNAI_STREAMER_S3_UNSIGNED"),
            "virtual_hosted_style_request": _switch("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"),
        }
        if given is not None:
            options |= {
                "key": given.access_key_id,
                "secret": given.secret_access_key,
                "token": given.session_token,
                "region": given.region_name,
                "endpoint_url": given.endpoint or endpoint,
            }
    elif is_gs_path(path):
        emulator = os.environ.get("CLOUD_STORAGE_EMULATOR_ENDPOINT")
        options = {
            "application_credentials": os.environ.get("RUNAI_STREAMER_GCS_CREDENTIAL_FILE"),
            "anon": _switch("RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS"),
        }
        if emulator:
            url = emulator if "://" in emulator else f"http://{emulator}"
            options |= {"endpoint_url": url, "anon": "true"}
    elif is_azure_path(path):
        options = {"endpoint": _azure_endpoint()}
    else:
        options = {}
    return {name: value for name, value in options.items() if value}


def _azure_endpoint() -> str | None:
    account, suffix = (os.environ.get(f"AZURE_STORAGE_{name}") for name in ("ACCOUNT_NAME", "ENDPOINT_SUFFIX"))
    return f"https://{account}.{suffix.lstrip('.')}" if account and suffix else None


def _switch(name: str) -> str | None:
    text = os.environ.get(name, "").strip().lower()
    return None if not text else "true" if text in {"1", "true", "yes", "on"} else "false"


@contextmanager
def as_value_errors() -> Iterator[None]:
    """Penstock's errors as the ``ValueError`` that callers of this interface catch; what they say stays.

    Of malformed files it says in the interface's own words first what is wrong: programs look for those.
    """
    try:
        yield
    except penstock.FormatError as error:
        words = _WORDS.get(error.code)
        if words is None:
            raise
        raise ValueError(f"{words.format(tensor=error.tensor, **error.details)} - {error}") from error
    except penstock.PenstockError as error:
        if isinstance(error, (ValueError, MemoryError)):
            raise
        raise ValueError(f"Could not receive response from libstreamer due to: {error}") from error


def device_of(device: Any) -> str:
    """The device as torch spells it; the host is "cpu", whether it is asked for as None, "cpu:0" or a ``torch.device``.

    Raises:
        RunaiStreamerInvalidInputException: for a device that torch does not know.
    """
    import torch

    if device is None:
        return "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise RunaiStreamerInvalidInputException(f"Unusable device {device!r}: {error}") from error
    return "cpu" if found.type == "cpu" else str(found)


def loads_to(device: str) -> str:
    """The device that Penstock loads to for ``device``: others are reached by way of the host."""
    return device if device.partition(":")[0] in {"cpu", "cuda"} else "cpu"
