"""Which class a model of transformers is built by, and with which configuration.

transformers decides this in its ``from_pretrained`` by the path of a model. Penstock gives it no path but a
``state_dict``, so it is decided here, by the same rules: what the caller names, what the configuration names, code
that lies beside the weights where that is trusted, and classes that the caller has registered before either.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.integrations.shared.files import Place

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def configuration(
    model_class: Any, place: Place, given: Any, kwargs: dict[str, Any]
) -> tuple[PretrainedConfig, dict[str, Any]]:
    """The model's configuration, and the keywords that were not for it.

    Args:
        model_class: what the caller named.
        place: where the model's small files are.
        given: a configuration, which is taken as it is; where to read it (a file, a directory, a name); or None.
        kwargs: keywords of the call.
    """
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(given, PretrainedConfig):
        return given, kwargs
    # What a class without a configuration of its own needs is told by the file.
    config_class = getattr(model_class, "config_class", None) or AutoConfig
    # Concerns the weights and not the configuration, which would take it for an attribute.
    kept = {name: kwargs.pop(name) for name in ("quantization_config",) if name in kwargs}
    source = place.local if given is None else os.fspath(given)
    config, unused = config_class.from_pretrained(source, return_unused_kwargs=True, **kwargs)
    return config, unused | kept


def resolve(
    model_class: Any, config: PretrainedConfig, place: Place, trust_remote_code: bool | None
) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """The class to build, and the part of the configuration that it takes.

    Raises:
        ConfigError: for what is no class of models, and one that knows none for this configuration.
    """
    if isinstance(model_class, str) and model_class == "auto":
        model_class = named_by(config)
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is None:
        if not hasattr(model_class, "from_pretrained"):
            raise ConfigError(f"{model_class!r} is neither 'auto' nor a class of transformers with from_pretrained")
        return model_class, config
    found = _mapped(mapping, config)
    remote = (getattr(config, "auto_map", None) or {}).get(model_class.__name__)
    # A class that the caller registered for this configuration goes before code that lies beside the weights.
    if remote and trust_remote_code and (found is None or found.__module__.startswith("transformers.")):
        return _remote(model_class, remote, config, place, is_known=found is not None), config
    if found is None:
        hint = ". Its code lies beside the weights; trust_remote_code=True lets it run" if remote else ""
        raise ConfigError(
            f"{place.local}: {model_class.__name__} knows no model for {type(config).__name__}{hint}",
            location=place.local,
        )
    text = getattr(config, "sub_configs", {}).get("text_config")
    if text is not None and getattr(found, "config_class", None) == text:
        quantization = getattr(config, "quantization_config", None)
        config = config.get_text_config()
        if quantization is not None:
            config.quantization_config = quantization
    return found, config


def named_by(config: PretrainedConfig) -> Any:
    """The class that a configuration names, or one that finds the class."""
    import transformers

    names = config.architectures or []
    for name in names:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for finder, reference in (getattr(config, "auto_map", None) or {}).items():
        # Of code that lies beside the weights: "modeling_x.XForCausalLM", found by "AutoModelForCausalLM".
        is_model = finder.startswith("AutoModel") and hasattr(transformers, finder)
        if is_model and isinstance(reference, str) and reference.rpartition(".")[2] in names:
            return getattr(transformers, finder)
    return transformers.AutoModel


def quantisation(config: PretrainedConfig, name: str) -> Any:
    """A setting of how a checkpoint is quantised: of a dict as read from a file, or an object as made by hand."""
    settings = getattr(config, "quantization_config", None)
    return settings.get(name) if isinstance(settings, dict) else getattr(settings, name, None)


def _mapped(mapping: Any, config: PretrainedConfig) -> Any:
    """The class that is known for a configuration; of several, the one that it names."""
    if type(config) not in mapping:
        return None
    found = mapping[type(config)]
    if isinstance(found, (list, tuple)):
        by_name = {candidate.__name__: candidate for candidate in found}
        found = next((by_name[name] for name in config.architectures or [] if name in by_name), found[0])
    return found


def _remote(finder: Any, reference: str, config: PretrainedConfig, place: Place, *, is_known: bool) -> Any:
    """A class of code that lies beside the weights, made known as transformers does: it saves its code with it."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto import auto_factory

    cls = get_class_from_dynamic_module(reference, place.local)
    if not is_known:
        finder.register(type(config), cls, exist_ok=True)
    cls.register_for_auto_class(auto_class=finder)
    add_generation = getattr(auto_factory, "add_generation_mixin_to_remote_model", None)
    return cls if add_generation is None else add_generation(cls)
