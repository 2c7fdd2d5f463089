"""How SGLang comes to know the format, by its own registry of hooks.

Its formats are a closed enumeration, and its loaders are chosen by one function. Three functions are wrapped: the one
that checks a format's name, the one that chooses the loader, and the one that decides whether models copy weights in
threads of their own. With every other format each calls the original with the same arguments. ``penstock.patches``
lists them.
"""

from __future__ import annotations

import logging
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from penstock.integrations.shared.plugin import FORMAT
from penstock.patches import listed

logger = logging.getLogger(__name__)


def register() -> None:
    """Registers the hooks, which SGLang applies when all plugins have registered theirs; once.

    Raises:
        ImportError, AttributeError: this SGLang lacks something that is to be wrapped. Nothing was changed then.
    """
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices

    around(
        {
            "sglang.srt.configs.load_config.LoadConfig._verify_load_format": _verify,
            "sglang.srt.model_loader.loader.get_model_loader": _choose,
            "sglang.srt.model_loader.utils.should_async_load": _in_threads,
        }
    )
    if FORMAT not in LOAD_FORMAT_CHOICES:
        listed(f"sglang.srt.arg_groups.choices.LOAD_FORMAT_CHOICES[{FORMAT}]")
        add_load_format_choices([FORMAT])


def around(hooks: dict[str, Callable[..., Any]]) -> None:
    """Registers functions around others, by the others' names: all of them, each once, or none."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target in hooks:
        # Applying a hook that has no target would be a stack trace in the log.
        where, _, name = listed(target).rpartition(".")
        getattr(pkgutil.resolve_name(where), name)
    for target, hook in hooks.items():
        if all(registered is not hook for _, registered, *_ in HookRegistry._hooks.get(target, ())):
            HookRegistry.register(target, hook, HookType.AROUND)


def before_step(step: str, hook: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """Registers a hook around a step of SGLang's resolution of its arguments; once."""
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS, register_resolution_hook

    listed(f"sglang.srt.arg_groups.resolution_hooks._HOOKS[{step}]")
    if hook not in _HOOKS.get(step, ()):
        register_resolution_hook(step)(hook)


def _verify(original: Callable[..., Any], load_config: Any, *args: Any, **kwargs: Any) -> Any:
    """``LoadConfig._verify_load_format``."""
    name = load_config.load_format
    if isinstance(name, str) and name.lower() == FORMAT:
        load_config.load_format = FORMAT
        return None
    return original(load_config, *args, **kwargs)


def _choose(original: Callable[..., Any], load_config: Any, *args: Any, **kwargs: Any) -> Any:
    """``get_model_loader``."""
    if load_config.load_format != FORMAT:
        return original(load_config, *args, **kwargs)
    return _ours_for(original, load_config, *args, **kwargs)


def _ours_for(original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
    """The loader for the format, or the one that SGLang quantises this model with."""
    from sglang.srt.configs.load_config import LoadFormat
    from sglang.srt.model_loader.loader import DefaultModelLoader

    from penstock.integrations.sglang.loader import PenstockModelLoader, with_load_format

    ours = PenstockModelLoader(load_config)
    stock = original(with_load_format(load_config, LoadFormat.AUTO), model_config)
    if type(stock) is DefaultModelLoader:
        return ours
    # Loaders that quantise what they load; what is quantised already they load as the default loader does.
    if isinstance(stock, DefaultModelLoader) and model_config is not None and model_config._is_already_quantized():
        return ours
    logger.warning(
        "%s is what SGLang loads this model with, to quantise it: loaded as by --load-format auto", type(stock).__name__
    )
    return stock


def _in_threads(original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """``should_async_load``: recording copies is not for several threads at once, and takes no time."""
    # A process that loads with another loader need not import this one.
    loader = sys.modules.get("penstock.integrations.sglang.loader")
    if loader is not None and loader.PenstockModelLoader.recording:
        return False
    return original(*args, **kwargs)
