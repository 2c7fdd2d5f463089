"""A single file, opened: its components' modules, each with a checkpoint of its own, and the pipeline they make.

Promises that a file is refused, before anything enters a pool, if it is not all of what it is taken for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint import Checkpoint, open
from penstock.errors import ConfigError
from penstock.optional import installed_version, required
from penstock.pool.single_file.components import module_of, tensors_of
from penstock.pool.single_file.configs import classes_in, config_directory, pipeline_of
from penstock.pool.single_file.converted import ConvertedCheckpoint
from penstock.pool.single_file.kinds import variant_of
from penstock.recording import LazyTensor, Recorder
from penstock.state import state_of

if TYPE_CHECKING:
    import torch

    from penstock.arguments import AnyPath


@dataclass
class SingleFile:
    """What a file was split into."""

    kind: str
    """The variant, as diffusers calls it."""
    modules: dict[str, torch.nn.Module]
    """By component, without memory for parameters."""
    checkpoints: dict[str, ConvertedCheckpoint]
    directory: Path
    """With the settings."""
    is_whole: bool
    """Whether these are all components of the pipeline."""

    def pipeline(self) -> Any:
        """The pipeline with these modules; None where that needs others too.

        Raises:
            ConfigError: where the directory lacks what is no module.
        """
        return pipeline_of(self.directory, self.modules) if self.is_whole else None


def open_single_file(
    location: Any, *, config: AnyPath | None = None, components: Sequence[str] | None = None
) -> SingleFile:
    """Opens a file and finds out what it holds. Nothing of its weights is read.

    Args:
        location: what ``penstock.open`` takes, or a ``Checkpoint``.
        config: a directory of a pipeline in diffusers' layout, or the name of a repository, for the settings of
            components. By default the repository that diffusers takes for such files.
        components: those that are wanted, by their names in the pipeline; all by default.

    Raises:
        ConfigError: for an architecture that is unknown, files that mix several, files without one of the components,
            and components that the pipeline does not have.
        LocationNotFoundError: where the settings are not to be had.
        MissingDependencyError: where diffusers, transformers or accelerate is not installed.
        PenstockError: what opening a checkpoint raises.
    """
    required("torch", "diffusers", "transformers", "accelerate", by="ModelPool.register of a single file")
    checkpoint = location if isinstance(location, Checkpoint) else open(location)
    where = checkpoint.files[0][0]
    kind = variant_of(checkpoint, where)
    directory = config_directory(config, kind)
    classes = classes_in(directory)
    wanted = list(classes if components is None else components)
    for name in wanted:
        if name not in classes:
            there = ", ".join(map(repr, classes))
            raise ConfigError(location=where, cause=f"its pipeline has no component {name!r}, only {there}")
    # Not entered: nothing is recorded but what each tensor is made of.
    lazy = dict(Recorder("cpu").weights(checkpoint))
    modules = {name: module_of(classes[name], directory, name) for name in wanted}
    found = {name: _values(module, name, lazy, kind, where) for name, module in modules.items()}
    lacking = [name for name, values in found.items() if values is None]
    if lacking:
        holds = [name for name in found if name not in lacking]
        cause = f"it holds {_listed(holds)} of a model of the kind {kind}, and not its {_listed(lacking)}"
        remedy = f"Give components={holds!r}, and register the others with locations and build functions"
        raise ConfigError(location=where, cause=cause, remedy=remedy if holds else None)
    version = installed_version("diffusers")
    checkpoints = {
        name: ConvertedCheckpoint(checkpoint, values, (kind, name, classes[name].__name__, version))
        for name, values in found.items()
        if values is not None
    }
    return SingleFile(kind, modules, checkpoints, directory, is_whole=len(wanted) == len(classes))


def _values(
    module: torch.nn.Module, name: str, lazy: Mapping[str, Any], kind: str, where: str
) -> dict[str, Any] | None:
    """What each tensor of a component is, as far as the module has it; None if the file has nothing of it."""
    try:
        converted = tensors_of(module, name, lazy)
    except (KeyError, IndexError, RuntimeError) as error:
        cause = f"its {name} is not that of a model of the kind {kind}, or only a part of it: {error!r}"
        raise ConfigError(location=where, cause=cause, remedy="Give config= the settings of this model") from error
    if converted is None:
        return None
    _, tensors, aliases = state_of(module)
    held = {of: value for of, value in converted.items() if of in tensors}
    missing = [of for of in tensors if held.keys().isdisjoint(aliases[of])]
    if missing and not held:
        return None
    if missing:
        cause = f"it holds only a part of its {name}: {len(missing)} of {len(tensors)} tensors are missing"
        raise ConfigError(location=where, tensor=missing[0], cause=cause, remedy="Get the whole file")
    return {of: value.lazy_value if isinstance(value, LazyTensor) else value for of, value in held.items()}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "nothing"
