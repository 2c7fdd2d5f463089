"""What Penstock replaces in other packages: the complete list, a switch, and one safe way to do it.

Promises: an attribute of another package is only replaced if it is listed in ``PATCHES`` (docs/engines/patches.md says
what each replacement does, and a test compares the two lists); a replacement that has no active user calls the original
with the same arguments; restoring never overwrites a replacement that another package has made in the meantime.

It imports no other package, and must not know which integration uses it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

DISABLE = "PENSTOCK_DISABLE"
"""The environment variable that turns off what happens without a call by name: plugins, and ``patch_safetensors``."""

START_CACHE_IN_USE = "_PENSTOCK_START_CACHE"
"""The environment variable by which ``penstock run --start-cache`` tells engines. Internal."""

PATCHES = {
    "vLLM loads its plugins, in each process": (
        "vllm.model_executor.model_loader._LOAD_FORMAT_TO_MODEL_LOADER[penstock]",
        "vllm.engine.arg_utils.EngineArgs.create_model_config",
        "vllm.engine.arg_utils.EngineArgs.create_engine_config",
    ),
    "`--load-format penstock` is first used in a process": ("vllm.config.VllmConfig.try_verify_and_update_config",),
    "`--load-format penstock` is first used in a process that has no `runai_model_streamer`": (
        "vllm.transformers_utils.runai_utils.runai_pull_files",
        "vllm.transformers_utils.runai_utils.runai_list_safetensors",
    ),
    "vLLM loads its plugins in a process that `penstock run --start-cache` started": (
        "vllm.config.ModelConfig.compute_hash",
    ),
    "SGLang loads its plugins, in each process": (
        "sglang.srt.arg_groups.choices.LOAD_FORMAT_CHOICES[penstock]",
        "sglang.srt.configs.load_config.LoadConfig._verify_load_format",
        "sglang.srt.model_loader.loader.get_model_loader",
        "sglang.srt.model_loader.utils.should_async_load",
        "sglang.srt.utils.runai_utils.is_runai_obj_uri",
        "sglang.srt.utils.runai_utils.ObjectStorageModel.download_and_get_path",
        "sglang.srt.arg_groups.resolution_hooks._HOOKS[handle_model_source_paths]",
        "sglang.srt.arg_groups.resolution_hooks._HOOKS[handle_load_format]",
    ),
    "`patch_safetensors()` is entered": (
        "safetensors.safe_open",
        "safetensors.torch.load_file",
    ),
    "`penstock.load_model`, `penstock.model.no_init` or an integration's `from_pretrained` builds a model": (
        "torch.nn.Module.register_parameter",
    ),
    "a `Recorder` is entered: vLLM's or SGLang's loader fills a model with lazy tensors": (
        "threading.Thread.start",
        "concurrent.futures.ThreadPoolExecutor.submit",
        "concurrent.futures.Future.add_done_callback",
        "torch.nn.Parameter.__new__",
        "torch.nn.Buffer.__new__",
        "torch.Tensor._make_subclass",
        "torch.Tensor.as_subclass",
        "torch.to_dlpack",
        "torch.utils.dlpack.to_dlpack",
    ),
    "`penstock.integrations.transformers.from_pretrained` loads to a GPU": (
        "transformers.modeling_utils.caching_allocator_warmup",
    ),
    "`penstock.integrations.transformers.from_pretrained` loads a model": (
        "transformers.modeling_utils._get_resolved_checkpoint_files",
        "transformers.modeling_utils.safe_open",
        "transformers.quantizers.quantizer_torchao.safe_open",
    ),
}
"""What is replaced or added, by when: attributes of other packages, and entries of registries with the key in brackets.
In the order of the manual's table, which says how long each stays, what it does, and for whom."""

_TARGETS = {target for targets in PATCHES.values() for target in targets}


def is_disabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``PENSTOCK_DISABLE`` turns plugins and ``patch_safetensors`` off. Empty, 0, false and no do not."""
    return environment.get(DISABLE, "").strip().lower() not in {"", "0", "false", "no"}


def listed(target: str) -> str:
    """``target``, which has to be in the list.

    Raises:
        KeyError: it is not.
    """
    if target not in _TARGETS:
        raise KeyError(f"{target} is not listed in penstock.patches.PATCHES")
    return target


class Replacement:
    """An attribute of another package that is replaced while it has users, and restored when the last has gone.

    If another package has replaced it too in the meantime, theirs stays, and so does ours below it, which then calls
    the original. Safe for several threads.

    Args:
        target: the attribute, from the list.
        make: makes the replacement from the original. It has to behave as the original where nobody uses it, and to
            work if it replaces another of its kind.
    """

    def __init__(self, target: str, make: Callable[[Any], Any]) -> None:
        self._name = listed(target).rpartition(".")[2]
        self._make = make
        self._is_own = True
        self._users = 0
        self._original: Any = None
        self._ours: Any = None

    @contextmanager
    def on(self, owner: Any) -> Iterator[bool]:
        """Replaces the attribute of ``owner``, a module or a class. Yields whether it has such an attribute."""
        with _lock:
            if not self._users:
                self._install(owner)
            self._users += 1
        try:
            yield self._ours is not None
        finally:
            with _lock:
                self._users -= 1
                if not self._users:
                    self._restore(owner)

    def _there(self, owner: Any) -> Any:
        """What the owner has, as it has it: of a static method, that and not the function in it."""
        return vars(owner).get(self._name, getattr(owner, self._name, None))

    def _install(self, owner: Any) -> None:
        current = self._there(owner)
        # It may have stayed below a replacement of another package that is gone now.
        if current is not None and current is not self._ours:
            self._is_own = self._name in vars(owner)
            self._original, self._ours = current, self._make(getattr(owner, self._name))
            setattr(owner, self._name, self._ours)

    def _restore(self, owner: Any) -> None:
        if self._ours is None:
            return
        if self._there(owner) is not self._ours:
            logger.debug("%s was replaced by another package meanwhile and is left as it is", self._name)
            return
        if self._is_own:
            setattr(owner, self._name, self._original)
        else:
            delattr(owner, self._name)
        self._original = self._ours = None


_lock = threading.Lock()


def _unlock_in_child() -> None:
    """Another thread may have held the lock when the process was forked."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)


def replace_for_good(owner: Any, target: str, make: Callable[[Any], Any]) -> None:
    """Replaces an attribute of ``owner`` for the rest of the process, at most once.

    Args:
        target: the attribute, from the list.
        make: makes the replacement from the original.

    Raises:
        AttributeError: there is no such attribute; nothing was changed.
    """
    name = listed(target).rpartition(".")[2]
    original = getattr(owner, name)
    # Not by getattr: placeholders of packages that are absent raise what they like.
    if getattr(original, "__dict__", {}).get("_penstock") == target:
        return
    replacement = make(original)
    replacement._penstock = target
    setattr(owner, name, replacement)
