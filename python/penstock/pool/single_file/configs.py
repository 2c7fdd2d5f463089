"""The settings of a pipeline's components: a directory in diffusers' layout, whose weights are not needed."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, LocationNotFoundError

if TYPE_CHECKING:
    from penstock.arguments import AnyPath

_SETTINGS = ["**/*.json", "*.json", "*.txt", "**/*.txt", "**/*.model"]
"""Files of a repository that are no weights: as diffusers has it."""
_NOT_IN_FILES = ("safety_checker",)
"""Components that no single file holds, and that pipelines do without: as diffusers has it."""

_REMEDY = "Give config= a directory with its tokenizers and scheduler, or components= for modules alone"


def config_directory(config: AnyPath | None, kind: str) -> Path:
    """The directory with the settings of a pipeline.

    Args:
        config: a directory, or the name of a repository on the Hub. By default the repository that diffusers takes for
            such files.
        kind: the variant, as diffusers calls it.

    Raises:
        LocationNotFoundError: where it is neither here, nor in the Hugging Face cache, nor to be had.
    """
    from diffusers.loaders.single_file_utils import DIFFUSERS_DEFAULT_PIPELINE_PATHS
    from huggingface_hub import snapshot_download

    name = str(DIFFUSERS_DEFAULT_PIPELINE_PATHS[kind]["pretrained_model_name_or_path"] if config is None else "")
    name = name or os.fsdecode(config)  # type: ignore[arg-type]
    there = Path(name)
    if not there.is_dir():
        try:
            there = Path(snapshot_download(name, allow_patterns=_SETTINGS))
        except Exception as error:
            cause = f"the settings of its components are not here, and the Hub did not give them: {error}"
            remedy = "Give config= a directory of a pipeline in diffusers' layout, or be online once"
            raise LocationNotFoundError(location=name, cause=cause, remedy=remedy) from error
    if not (there / "model_index.json").is_file():
        cause = "it has no model_index.json, so it is not the directory of a pipeline"
        raise LocationNotFoundError(location=str(there), cause=cause, remedy="Give config= that of a pipeline")
    return there


def classes_in(directory: Path) -> dict[str, Any]:
    """The classes of a pipeline's components that have weights, by their names.

    Raises:
        ConfigError: where its index names a class that is not installed.
    """
    import torch

    classes = {name: _class(directory, *entry) for name, entry in _components(directory).items()}
    return {name: cls for name, cls in classes.items() if isinstance(cls, type) and issubclass(cls, torch.nn.Module)}


def _components(directory: Path) -> dict[str, tuple[str, str]]:
    """The library and the class of each component, but for those that pipelines do without."""
    return {
        name: (entry[0], entry[1])
        for name, entry in _index(directory).items()
        if isinstance(entry, list) and len(entry) > 1 and entry[0] is not None and name not in _NOT_IN_FILES
    }


def pipeline_of(directory: Path, modules: dict[str, Any]) -> Any:
    """The pipeline with these modules, and with the tokenizers and the scheduler of a directory.

    Raises:
        ConfigError: where it lacks some of these.
    """
    import diffusers

    index = _index(directory)
    cls = getattr(diffusers, str(index.get("_class_name")), None)
    if cls is None:
        raise ConfigError(location=str(directory), cause=f"diffusers has no pipeline {index.get('_class_name')!r}")
    # Without their files, some libraries make them empty.
    lacking = [name for name in _components(directory) if name not in modules and not (directory / name).is_dir()]
    if lacking:
        cause = f"the pipeline could not be put together: there is nothing of its {', '.join(lacking)}"
        raise ConfigError(location=str(directory), cause=cause, remedy=_REMEDY)
    without = {name: None for name in _NOT_IN_FILES if name in index}
    try:
        return cls.from_pretrained(str(directory), **modules, **without)
    except (OSError, ValueError) as error:
        cause = f"the pipeline could not be put together: {error}"
        raise ConfigError(location=str(directory), cause=cause, remedy=_REMEDY) from error


def _index(directory: Path) -> dict[str, Any]:
    try:
        index = json.loads((directory / "model_index.json").read_text())
    except ValueError as error:
        raise ConfigError(location=str(directory / "model_index.json"), cause=f"it is no JSON: {error}") from error
    return index if isinstance(index, dict) else {}


def _class(directory: Path, library: str, name: str) -> Any:
    from diffusers import pipelines

    try:
        return getattr(getattr(pipelines, library, None) or import_module(library), name)
    except (ImportError, AttributeError) as error:
        cause = f"its model_index.json names {library}.{name}, which is not installed"
        raise ConfigError(location=str(directory), cause=cause, remedy="Install or update it") from error
