"""What ``--model-loader-extra-config`` may hold for ``--load-format penstock``, in every engine that has the two.

An engine that knows more derives a class with more fields.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, cast

from penstock._native import LoadOptions
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

    from penstock.checkpoint import Checkpoint


@dataclass(frozen=True)
class ExtraConfig:
    """Settings of a load. None has to be set: each is found, or has a default that suits."""

    record: bool | Literal["verify"] = True
    """Record what the model does with its weights and read only that; False gives it eager tensors. ``"verify"``
    records, loads a second model with eager tensors, and raises if a parameter or buffer differs."""
    share: bool | None = None
    """Whether tensor-parallel ranks read together what several of them want of a tensor; by default where it comes over
    a network and, between GPUs, from a disk."""
    readers: int | None = None
    block_bytes: int | str | None = None
    staging_bytes: int | str | None = None
    window_bytes: int | str | None = None
    cache: str | None = None
    verify: str | None = None
    """``"auto"``, ``"require"`` or ``"off"``: whether what is read is compared with a manifest."""
    trust: dict[str, Any] | str | None = None
    """Whose signatures are trusted: a policy's names and values, or the path of a JSON file with them
    (``penstock.Policy``)."""

    @classmethod
    def of(cls, extra: Any) -> Self:
        """What a dict says.

        Raises:
            ConfigError: for what is no dict, has unknown keys (it lists the known ones), or a value of another type.
        """
        if not isinstance(extra, Mapping):
            raise ConfigError(f"model_loader_extra_config must be a dict, not {type(extra).__name__}")
        known = {field.name: str(field.type) for field in fields(cls)}
        if unknown := sorted(set(map(str, extra)) - set(known)):
            raise ConfigError(
                f"model_loader_extra_config: --load-format penstock does not know {', '.join(map(repr, unknown))}. "
                f"It knows {', '.join(sorted(known))}",
                remedy="Leave it out: nothing has to be set",
            )
        for key, value in extra.items():
            if key == "record" and value == "verify":
                continue
            words = (word.partition("[")[0] for word in known[key].split(" | "))
            wanted = [word for word in words if word in {"bool", "int", "str", "dict"}]
            if value is not None and type(value).__name__ not in wanted:
                raise ConfigError(
                    f"model_loader_extra_config: {key!r} must be of type {' or '.join(wanted)}, not {value!r}"
                )
        made = cls(**extra)
        made.load_options()  # which refuses impossible values
        if made.trust is not None:
            from penstock.trust.policy import Policy

            Policy.of(made.trust)
        return made

    def load_options(self) -> LoadOptions:
        """The core's settings among them."""
        return LoadOptions(
            readers=self.readers,
            block_bytes=self.block_bytes,
            staging_bytes=self.staging_bytes,
            window_bytes=self.window_bytes,
            cache=cast("Literal['auto', 'use', 'bypass', 'populate'] | None", self.cache),
            verify=cast("Literal['auto', 'require', 'off'] | None", self.verify),
        )

    def open(self, path: Any, copies: Sequence[Any] = ()) -> Checkpoint:
        """Opens the weights at ``path``, as these settings say.

        Args:
            path: what ``penstock.open`` takes.
            copies: directories of this machine with small files of the same model, which the engine has fetched. They
                have to be the signed ones, too.

        Raises:
            PenstockError: see ``penstock.open``.
        """
        from penstock.checkpoint import is_trust_asked, open

        checkpoint = open(path, trust=self.trust, options=self.load_options())
        if copies and is_trust_asked(self.trust):
            from penstock.trust.directory import root_of
            from penstock.trust.opening import Guard

            first = path if isinstance(path, (str, os.PathLike)) else path[0]
            guard = Guard.of(root_of(os.fspath(first)), self.trust)
            if guard is not None:
                for copy in copies:
                    guard.check_copy(str(copy))
        return checkpoint
