"""Models on object stores: ``sglang serve s3://bucket/model --load-format penstock``.

SGLang turns the format of whatever is on an object store into ``runai_streamer``, and fetches the small files beside
the weights with the package of that name. Here the format stays what was asked for; locations that SGLang does not know
(``hf://``, ``abfss://``, ``https://``) are added to those that it does; and where that package is absent, Penstock
takes its place for every model on an object store. ``PENSTOCK_SGLANG_OBJECT_STORES`` is ``1`` to take its place in any
case, ``0`` never to.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.engines.sglang import FORMAT
from penstock.engines.sglang.hooks import around
from penstock.engines.small_files import fetch
from penstock.errors import ConfigError, ObjectNotFoundError

_MORE = ("hf://", "abfss://", "abfs://", "azure://", "https://", "http://")
"""What Penstock reads and SGLang does not."""
_VARIABLE = "PENSTOCK_SGLANG_OBJECT_STORES"


def register() -> None:
    """Registers the hooks; once."""
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS, register_resolution_hook

    around(
        {
            "sglang.srt.utils.runai_utils.is_runai_obj_uri": _is_object,
            "sglang.srt.utils.runai_utils.ObjectStorageModel.download_and_get_path": _bring,
        }
    )
    if _keep_format not in _HOOKS.get("handle_load_format", ()):
        register_resolution_hook("handle_load_format")(_keep_format)


def takes_over() -> bool:
    """Whether models on object stores are Penstock's, whatever the format.

    Raises:
        ConfigError: for a value of the variable that means nothing.
    """
    wanted = os.environ.get(_VARIABLE) or None
    if wanted not in {None, "0", "1"}:
        raise ConfigError(f"{_VARIABLE} must be 0 or 1, not {wanted!r}")
    return wanted == "1" or (wanted is None and importlib.util.find_spec("runai_model_streamer") is None)


def small_files_of(location: str) -> str:
    """The directory that SGLang has the small files in of a model on an object store."""
    from sglang.srt.utils.runai_utils import ObjectStorageModel

    return str(ObjectStorageModel.get_path(location))


def _is_object(original: Callable[..., bool], location: Any) -> bool:
    """``is_runai_obj_uri``."""
    return original(location) or str(location).lower().startswith(_MORE)


def _bring(original: Callable[..., str], cls: Any, model_path: str) -> str:
    """``ObjectStorageModel.download_and_get_path``: has the small files on the local disk, as they are now."""
    if not (model_path.lower().startswith(_MORE) or takes_over()):
        return original(cls, model_path)
    directory = Path(cls.get_path(model_path))
    directory.mkdir(parents=True, exist_ok=True)
    # Beside it, so that each file takes its place at once: other servers of the model may be reading.
    with tempfile.TemporaryDirectory(dir=directory.parent) as fresh:
        names = fetch(model_path, fresh)
        if not names:
            raise ObjectNotFoundError(
                f"{model_path}: there are no configurations or other small files", object=model_path
            )
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
        if location is None or not is_runai_obj_uri(location) or load_format == "dummy":
            return False
        stock = load_format in {None, "auto", "runai_streamer"}
        return load_format == FORMAT or location.lower().startswith(_MORE) or (stock and takes_over())

    previous(server_args)
    formats: dict[str, str] = {}
    if is_ours(settings.model_path, asked):
        formats["load_format"] = FORMAT
    if is_ours(settings.speculative_draft_model_path, asked_of_draft or asked):
        formats["speculative_draft_load_format"] = FORMAT
    if formats:
        declare_resolution(server_args, "penstock", **formats)
