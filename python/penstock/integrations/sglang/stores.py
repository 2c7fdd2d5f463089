"""Models on object stores: ``sglang serve s3://bucket/model --load-format penstock``.

SGLang turns the format of whatever is on an object store into ``runai_streamer``, and fetches the small files beside
the weights with the package of that name. For servers that ask for Penstock (``--load-format penstock``), the format
stays what was asked for, more locations are known (``hf://``, ``abfss://``, ``https://``), and where that package is
absent, Penstock fetches the small files.

For all other servers each function replaced here calls the original with the same arguments.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock._native import shown
from penstock.errors import LocationNotFoundError
from penstock.integrations.sglang.hooks import around, before_step
from penstock.integrations.shared.plugin import FORMAT
from penstock.integrations.shared.small_files import NO_SMALL_FILES, fetch

_MORE = ("hf://", "abfss://", "abfs://", "azure://", "https://", "http://")
"""What Penstock reads and SGLang does not."""
_asked: dict[str, bool] = {}
"""Locations that a server of this process was given, and whether it asked for Penstock."""


def register() -> None:
    """Registers the hooks; once."""
    around(
        {
            "sglang.srt.utils.runai_utils.is_runai_obj_uri": _is_object,
            "sglang.srt.utils.runai_utils.ObjectStorageModel.download_and_get_path": _bring,
        }
    )
    before_step("handle_model_source_paths", _note_who_asks)
    before_step("handle_load_format", _keep_format)


def small_files_of(location: str) -> str:
    """The directory that SGLang has the small files in of a model on an object store."""
    from sglang.srt.utils.runai_utils import ObjectStorageModel

    return str(ObjectStorageModel.get_path(location))


def _note_who_asks(server_args: Any, previous: Callable[[Any], None]) -> None:
    """``handle_model_source_paths``, the first step that looks at the model."""
    from sglang.srt.arg_groups.overrides import resolving_view

    settings = resolving_view(server_args)
    formats = (settings.load_format, settings.speculative_draft_load_format)
    asks = any(str(load_format).lower() == FORMAT for load_format in formats)
    for location in (settings.model_path, settings.tokenizer_path, settings.speculative_draft_model_path):
        if location is not None:
            _asked[str(location)] = asks
    previous(server_args)


def _is_asked_for(location: str) -> bool:
    """Whether Penstock is to read what is at a location, as far as this process knows."""
    if location in _asked:
        return _asked[location]
    try:
        # A process that SGLang has started: the one that started it has fetched the small files, or failed.
        return Path(small_files_of(location)).is_dir()
    except OSError:  # SGLang makes the directory above
        return False


def _is_object(original: Callable[..., bool], location: Any, *args: Any, **kwargs: Any) -> bool:
    """``is_runai_obj_uri``."""
    known = original(location, *args, **kwargs)
    if known or not str(location).lower().startswith(_MORE):
        return known
    return _is_asked_for(str(location))


def _bring(original: Callable[..., str], cls: Any, model_path: str, *args: Any, **kwargs: Any) -> str:
    """``ObjectStorageModel.download_and_get_path``: has the small files on the local disk, as they are now."""
    is_more = model_path.lower().startswith(_MORE)
    absent = importlib.util.find_spec("runai_model_streamer") is None
    if not ((is_more or absent) and _is_asked_for(model_path)):
        return original(cls, model_path, *args, **kwargs)
    directory = Path(cls.get_path(model_path))
    directory.mkdir(parents=True, exist_ok=True)
    # Beside it, so that each file takes its place at once: other servers of the model may be reading.
    with tempfile.TemporaryDirectory(dir=directory.parent) as fresh:
        names = fetch(model_path, fresh)
        if not names:
            raise LocationNotFoundError(location=shown(model_path), cause=NO_SMALL_FILES)
        for name in names:
            Path(fresh, name).replace(directory / name)
    for old in directory.iterdir():
        if old.is_file() and old.name not in names:
            old.unlink(missing_ok=True)
    return str(directory)


def _keep_format(server_args: Any, previous: Callable[[Any], None]) -> None:
    """``handle_load_format``, around what decides which format there will be."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.utils.runai_utils import is_runai_obj_uri

    settings = resolving_view(server_args)
    asked, asked_of_draft = settings.load_format, settings.speculative_draft_load_format

    def is_ours(location: str | None, load_format: str | None) -> bool:
        return str(load_format).lower() == FORMAT and location is not None and is_runai_obj_uri(location)

    previous(server_args)
    formats: dict[str, str] = {}
    if is_ours(settings.model_path, asked):
        formats["load_format"] = FORMAT
    if is_ours(settings.speculative_draft_model_path, asked_of_draft or asked):
        formats["speculative_draft_load_format"] = FORMAT
    if formats:
        declare_resolution(server_args, "penstock", **formats)
