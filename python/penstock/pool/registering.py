"""What a model is registered with, whichever way it was given: for each component a checkpoint, and how it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoint


@dataclass
class Sources:
    """Where the components of a model come from."""

    checkpoints: Mapping[str, Checkpoint]
    """Or a ``ConvertedCheckpoint``, which does what the pool asks of one."""
    build: Mapping[str, Callable[[], Any]]
    whole: Any = None
    """The pipeline that they make."""


def sources_of(
    name: str,
    locations: Any,
    build: Mapping[str, Callable[[], Any]] | None,
    *,
    config: Any = None,
    components: Sequence[str] | None = None,
) -> Sources:
    """The sources of a model: components with locations, or one file of which they are found out.

    Raises:
        ConfigError: for a component that only one of the mappings has; for arguments that do not belong together; and
            for what ``open_single_file`` refuses.
        PenstockError: what opening a checkpoint raises.
    """
    from penstock.checkpoint import Checkpoint, open

    if isinstance(locations, Mapping) and not isinstance(locations, Checkpoint):
        if config is not None or components is not None:
            cause = f"config= and components= are for a single file, and {name!r} has locations by component"
            raise ConfigError(cause=cause, remedy="Leave them out")
        build = build or {}
        for of in [*locations, *build]:
            if of not in locations or of not in build:
                lacks = "build" if of in locations else "locations"
                raise ConfigError(cause=f"component {of!r} of {name!r} is not in {lacks}", remedy="Name it in both")
        opened = {of: one if isinstance(one, Checkpoint) else open(one) for of, one in locations.items()}
        return Sources(opened, build)
    if build is not None:
        cause = f"build= belongs to locations by component, and {name!r} has a single file"
        raise ConfigError(cause=cause, remedy="Leave it out, or give both by component")
    from penstock.pool.single_file import open_single_file

    file = open_single_file(locations, config=config, components=components)
    checkpoints = cast("Mapping[str, Checkpoint]", file.checkpoints)
    return Sources(checkpoints, {of: partial(_same, made) for of, made in file.modules.items()}, file.pipeline())


def _same(made: Any) -> Any:
    """A module that is built already."""
    return made
