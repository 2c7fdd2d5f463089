"""Fetching the small files beside weights (configurations, tokenizers, templates) from object stores and servers.

Whatever lies in the folder and is a small file of a kind that libraries read is fetched, several at once, to a
directory of this process that goes when the process does. A server that cannot list is asked for the names that
libraries write.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock import _native
from penstock.arguments import is_http, joined
from penstock.errors import LocationAccessError, LocationNotFoundError
from penstock.patterns import matches_any
from penstock.storage_options import core_options

SMALL = ["*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "*.spm", "*.vocab", "*.bpe"]
"""Files that libraries read beside weights."""
LIMIT_BYTES = 256 << 20
"""No tokenizer is larger."""

USUAL = [
    *("config.json", "generation_config.json", "model_index.json", "adapter_config.json", "scheduler_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja"),
    *("preprocessor_config.json", "processor_config.json", "chat_template.json"),
]
"""What transformers, diffusers and peft write, for servers that cannot list."""

DESCRIBING = {name for name in USUAL if name.endswith("config.json") or name == "model_index.json"}
"""Of these every folder that a library loads from has at least one."""

NO_SMALL_FILES = "there are no configurations or other small files"
"""What is wrong where ``fetch`` finds nothing."""

_root: Path | None = None
_owner = 0


def fresh_directory() -> str:
    """A new directory that is removed when this process ends."""
    global _root, _owner
    if _root is None or _owner != os.getpid():
        # A child makes its own: it must not remove its parent's.
        _root, _owner = Path(tempfile.mkdtemp(prefix="penstock-files-")), os.getpid()
        atexit.register(_remove, _root, _owner)
    return tempfile.mkdtemp(dir=_root)


def _remove(root: Path, owner: int) -> None:
    if owner == os.getpid():
        shutil.rmtree(root, ignore_errors=True)


def fetch(url: str, directory: str, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Brings the small files directly under ``url`` to ``directory``, which is made; returns their names.

    Nothing where there is no such prefix.

    Raises:
        LocationAccessError: access is denied: to a file that is there or, on a server that cannot list, to whatever
            describes a model.
        PenstockError: what the store reports of a file that is there.
    """
    options = core_options(storage_options)
    names = _listed(url, options)
    certain = names is not None
    Path(directory).mkdir(parents=True, exist_ok=True)
    denied: dict[str, LocationAccessError] = {}

    def bring(name: str) -> str | None:
        try:
            data = _native.read_object(joined(url, name), LIMIT_BYTES, options)
        except LocationNotFoundError:
            if certain:
                raise
            return None
        except LocationAccessError as error:
            if certain or not _may_be_absent(error):
                raise
            denied[name] = error
            return None
        Path(directory, name).write_bytes(data)
        return name

    with ThreadPoolExecutor(16) as pool:
        found = [name for name in pool.map(bring, USUAL if names is None else names) if name is not None]
    # Where one of these is, who asks may read here, so the others are not there.
    if denied and DESCRIBING.isdisjoint(found):
        raise next(denied[name] for name in USUAL if name in denied)
    return found


def _may_be_absent(error: LocationAccessError) -> bool:
    """Whether there may be no such file: S3 denies absent keys too, to whoever may not list the bucket."""
    return error.code == "access_denied" and error.details.get("server_code") == "AccessDenied"


def _listed(url: str, options: list[tuple[str, str]] | None) -> Iterable[str] | None:
    """Names of the small files under a URL, or None where its server cannot list."""
    if is_http(url):
        return None
    try:
        entries, _ = _native.list_objects(f"{url.rstrip('/')}/", options)
    except LocationNotFoundError:
        return []
    found = []
    for _, name, nbytes in entries:
        wanted = matches_any(name, SMALL) and not name.endswith(".safetensors.index.json")
        if wanted and nbytes <= LIMIT_BYTES:
            found.append(name)
    return found
