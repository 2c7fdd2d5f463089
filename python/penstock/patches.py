"""What Penstock replaces in other packages: the complete list, the switch that turns it off, and one safe way to do it.

Promises: an attribute of another package is only replaced if it is listed in ``PATCHES`` (docs/engines/patches.md is
the same list, and a test compares the two); a replacement that has no active user calls the original with the same
arguments; restoring never overwrites a replacement that another package has made in the meantime.

It imports no other package, and must not know which engine uses it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

DISABLE = "PENSTOCK_DISABLE"
"""The environment variable that turns integrations off."""

FOREVER = "until the process ends"
WITHIN = "until the last such block or call ends"
_RECORDS = "a `Recorder` is entered: vLLM's or SGLang's loader fills a model with lazy tensors"

_TRANSFORMERS = "`penstock.integrations.transformers.from_pretrained` loads a model"


class Patch(NamedTuple):
    """One attribute (or registry entry) of another package that Penstock replaces or adds."""

    target: str
    """Its dotted name; for a registry, the registry's, with the key in brackets."""
    when: str
    """When it is installed."""
    until: str
    """How long it stays."""
    effect: str
    """What it does, and for whom."""


def _group(when: str, until: str, effects: dict[str, str]) -> list[Patch]:
    """Patches that are installed together, from targets to effects."""
    return [Patch(target, when, until, effect) for target, effect in effects.items()]


PATCHES = (
    *_group(
        "vLLM loads its plugins, in each process",
        FOREVER,
        {
            "vllm.model_executor.model_loader._LOAD_FORMAT_TO_MODEL_LOADER[penstock]": "Adds the load format, by "
            "`register_model_loader`.",
            "vllm.engine.arg_utils.EngineArgs.create_model_config": "Installs the three below if `load_format` is "
            "`penstock`. Calls the original otherwise.",
            "vllm.engine.arg_utils.EngineArgs.create_engine_config": "As above.",
        },
    ),
    *_group(
        "`--load-format penstock` is first used in a process",
        FOREVER,
        {
            "vllm.config.VllmConfig.try_verify_and_update_config": "Accepts `penstock` for models on object stores. "
            "Calls the original for other formats.",
        },
    ),
    *_group(
        "`--load-format penstock` is first used in a process that has no `runai_model_streamer`",
        FOREVER,
        {
            "vllm.transformers_utils.runai_utils.runai_pull_files": "Fetches configuration and tokenizer of a model on "
            "an object store, while vLLM makes a configuration with that format. Calls the original otherwise.",
            "vllm.transformers_utils.runai_utils.runai_list_safetensors": "Lists an object store's files, as above.",
        },
    ),
    *_group(
        "SGLang loads its plugins, in each process",
        FOREVER,
        {
            "sglang.srt.arg_groups.choices.LOAD_FORMAT_CHOICES[penstock]": "Adds the load format, by "
            "`add_load_format_choices`.",
            "sglang.srt.configs.load_config.LoadConfig._verify_load_format": "Accepts `penstock`. Calls the original "
            "for other formats.",
            "sglang.srt.model_loader.loader.get_model_loader": "Gives Penstock's loader for `penstock`. Calls the "
            "original for other formats.",
            "sglang.srt.model_loader.utils.should_async_load": "Answers `False` while Penstock's loader fills a model. "
            "Calls the original otherwise.",
            "sglang.srt.utils.runai_utils.is_runai_obj_uri": "Knows `hf://`, `abfss://`, `https://` and the like for "
            "servers that asked for Penstock. Calls the original otherwise.",
            "sglang.srt.utils.runai_utils.ObjectStorageModel.download_and_get_path": "Fetches configuration and "
            "tokenizer for servers that asked for Penstock, from what SGLang does not know or if "
            "`runai_model_streamer` is not installed. Calls the original otherwise.",
            "sglang.srt.arg_groups.resolution_hooks._HOOKS[handle_model_source_paths]": "Notes whether a server asked "
            "for Penstock, then calls the original.",
            "sglang.srt.arg_groups.resolution_hooks._HOOKS[handle_load_format]": "Calls the original; keeps `penstock` "
            "for models on object stores if the server asked for it.",
        },
    ),
    *_group(
        "`patch_safetensors()` is entered",
        WITHIN,
        {
            "safetensors.safe_open": "Is Penstock's, in the namespace of every module that has it.",
            "safetensors.torch.load_file": "Is Penstock's, in the namespace of every module that has it.",
        },
    ),
    *_group(
        "`penstock.load_model`, `penstock.model.no_init` or an engine's `from_pretrained` builds a model",
        WITHIN,
        {
            "torch.nn.Module.register_parameter": "Parameters get no memory, in the thread that builds. Calls the "
            "original only, in other threads.",
        },
    ),
    *_group(
        _RECORDS,
        WITHIN,
        {
            "threading.Thread.start": "A thread that loading code starts is run under torch's modes that see what it "
            "does. Calls the original only, in other threads.",
            "concurrent.futures.ThreadPoolExecutor.submit": "What loading code submits is run under the same modes. "
            "Calls the original only, in other threads.",
            "gc.freeze": "Calls the original, and notes that it was called.",
            "torch.nn.Parameter.__new__": "Takes lazy tensors. Calls the original with what it is given otherwise.",
            "torch.nn.Buffer.__new__": "As above.",
            "torch.Tensor._make_subclass": "As above: parameters of other classes are made by it.",
            "torch.Tensor.as_subclass": "As above.",
            "torch._C._swap_tensor_impl": "Calls the original; a lazy tensor among the two is an ordinary one then.",
            "torch._C._to_dlpack": "What is to be read into a tensor that loading code gives to others by DLPack is "
            "read first. Then calls the original.",
            "torch._C._to_dlpack_versioned": "As above.",
            "torch.to_dlpack": "As above, in the namespace of every module that has it.",
        },
    ),
    *_group(
        "`penstock.integrations.transformers.from_pretrained` loads to a GPU",
        WITHIN,
        {
            "transformers.modeling_utils.caching_allocator_warmup": "Reserves no GPU memory, in the thread that loads. "
            "Calls the original in other threads.",
        },
    ),
    *_group(
        _TRANSFORMERS,
        WITHIN,
        {
            "transformers.modeling_utils._get_resolved_checkpoint_files": "Answers that the model is one file, for the "
            "model and in the thread that loads. Calls the original otherwise.",
            "transformers.modeling_utils.safe_open": "Opens that file, of which Penstock delivers the tensors. Calls "
            "the original for others.",
            "transformers.quantizers.quantizer_torchao.safe_open": "As above.",
        },
    ),
)
"""Everything, in the order of the manual's table."""

_TARGETS = {patch.target for patch in PATCHES}


def is_disabled() -> bool:
    """Whether ``PENSTOCK_DISABLE`` turns Penstock's integrations off. Empty, ``0`` and ``false`` do not."""
    return os.environ.get(DISABLE, "").strip().lower() not in {"", "0", "false", "no"}


def listed(target: str) -> str:
    """``target``, which has to be in the list.

    Raises:
        KeyError: it is not.
    """
    if target not in _TARGETS:
        raise KeyError(f"{target} is not listed in penstock.patches.PATCHES")
    return target


def table() -> list[str]:
    """The rows of the manual's table, in Markdown."""
    return [f"| `{patch.target}` | {patch.when} | {patch.until} | {patch.effect} |" for patch in PATCHES]


class Replacement:
    """An attribute of another package that is replaced while it has users, and restored when the last has gone.

    If another package has replaced it too in the meantime, theirs stays, and so does ours below it, which then calls
    the original. Safe for several threads.

    Args:
        target: the attribute, from the list.
        make: makes the replacement from the original. It has to behave as the original where nobody uses it, and to
            work if it replaces another of its kind.
        name: of the attribute, in a module that has it by another name.
    """

    def __init__(self, target: str, make: Callable[[Any], Any], name: str | None = None) -> None:
        self._name = listed(target).rpartition(".")[2] if name is None else name
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
