"""What is asked of Penstock: settings from the environment, credentials for a call, errors as callers expect them."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import penstock
from runai_model_streamer.s3_utils.s3_utils import S3Credentials

MEMORY_LIMIT = "RUNAI_STREAMER_MEMORY_LIMIT"
UNLIMITED = 1 << 62
"""Bytes of read-ahead where the limit is lifted."""

_WORDS = [
    (re.compile(pattern), words)
    for pattern, words in (
        (r"it is incomplete|too few for a safetensors header|the file is empty", "Corrupted File: it is truncated"),
        (r"its header accounts for", "Corrupted File: extra trailing bytes"),
        (
            r"(tensor \"[^\"]*\"): \d+ bytes before this tensor",
            r"Corrupted File: a gap, \1 does not start where it should",
        ),
        (r"overlap those of (tensor \"[^\"]*\")", r"Corrupted File: \1 overlaps with next tensor"),
        (r"the header length \d+ exceeds \d+", "Corrupted File: Header size exceeds limit"),
        (r"the header is malformed", "Corrupted File: Header is not valid JSON"),
        (r"the header is not UTF-8", "Corrupted File: Header is not valid UTF-8"),
        (
            r"(tensor \"[^\"]*\"): (shape .*) needs (\d+) bytes, but data_offsets \[.*\] give it (\d+)",
            r"Corrupted \1: Shape claims \3 bytes, but offsets reserve \4 bytes",
        ),
        (r"unknown dtype \"([^\"]*)\"", r"Unsupported dtype '\1'"),
    )
]
"""What Penstock says of malformed files, and how the interface puts it."""

_environment = threading.RLock()


class RunaiStreamerMemoryLimitException(Exception):  # noqa: N818 - the name that callers know
    """A memory limit that the largest tensor does not fit in."""


class RunaiStreamerInvalidInputException(Exception):  # noqa: N818
    """A device that torch does not know, or paths of several kinds in one call."""


def config(memory_limit: int | None = None) -> penstock.Config:
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
    return penstock.Config(
        readers=number("RUNAI_STREAMER_CONCURRENCY", least=1),
        # Penstock's blocks are whole pages, and smaller ones than these gain nothing.
        block_bytes=None if block is None else max(block // 4096 * 4096, 64 << 10),
        read_ahead_bytes=ahead,
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


@contextmanager
def credentials(given: S3Credentials | None = None) -> Iterator[None]:
    """While this is active, Penstock finds the credentials given, and what this interface's variables for stores say,
    under the names that it knows.

    Clients are made when something is opened, so that is all that has to happen within. The environment is as before
    afterwards. One thread at a time: the environment is the whole process's.
    """
    wanted: dict[str, str | None] = {
        "AWS_ENDPOINT_URL": os.environ.get("RUNAI_STREAMER_S3_ENDPOINT"),
        "AWS_SKIP_SIGNATURE": _switch("RUNAI_STREAMER_S3_UNSIGNED"),
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": _switch("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"),
        "GOOGLE_APPLICATION_CREDENTIALS": os.environ.get("RUNAI_STREAMER_GCS_CREDENTIAL_FILE") or None,
        "GOOGLE_SKIP_SIGNATURE": _switch("RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS"),
        "STORAGE_EMULATOR_HOST": os.environ.get("CLOUD_STORAGE_EMULATOR_ENDPOINT") or None,
        "AZURE_STORAGE_ENDPOINT": _azure_endpoint(),
    }
    if given is not None:
        wanted |= {
            "AWS_ACCESS_KEY_ID": given.access_key_id,
            "AWS_SECRET_ACCESS_KEY": given.secret_access_key,
            "AWS_SESSION_TOKEN": given.session_token,
            "AWS_REGION": given.region_name,
        }
        wanted["AWS_ENDPOINT_URL"] = given.endpoint or wanted["AWS_ENDPOINT_URL"]
    changed = {name: value for name, value in wanted.items() if value is not None}
    if not changed:
        yield
        return
    with _environment:
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


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
        said = next((found.expand(words) for pattern, words in _WORDS if (found := pattern.search(str(error)))), None)
        if said is None:
            raise
        raise ValueError(f"{said} - {error}") from error
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
