"""vLLM's loader for ``--load-format penstock``.

The model gets lazy tensors; what its own loading code copies into its parameters is read as one plan, straight into
them (``penstock.recording``): each rank reads its share, experts and stages of others are never touched, and there is
no second copy on the GPU. What the ranks of a tensor-parallel group would each read whole they read together. Models
that process weights while they load (online quantisation, reloading layer by layer) get eager tensors.

Built on vLLM's default loader for what is the same: which files a model's name means, which experts are local, whether
every parameter got its weight.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import (
    BaseModelLoader,
    initialize_model,
    set_default_torch_dtype,
)
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.model_executor.model_loader.weight_utils import enable_tqdm
from vllm.platforms import current_platform

from penstock.arguments import is_http, is_url
from penstock.distributed import Sharing
from penstock.errors import ConfigError
from penstock.integrations.shared.filling import (
    Weights,
    eager,
    fill,
    log_load,
    no_safetensors,
    nothing_to_verify,
    sharing_of,
    verify,
)
from penstock.integrations.shared.objects import list_safetensors
from penstock.integrations.shared.plugin import FORMAT
from penstock.integrations.vllm import PLUGIN
from penstock.integrations.vllm.extra_config import VllmExtraConfig
from penstock.integrations.vllm.stores import install
from penstock.patterns import matches_any
from penstock.recording import Recorder, copy_state

# Under vLLM's own name, so that vLLM's handlers show what is logged.
logger = init_logger("vllm.penstock")

_CONFIGURED: dict[str, str] = {}
"""From models on object stores to the directories of their configurations, as they were first loaded."""


class PenstockModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads a model for `--load-format penstock`."""

    def __init__(self, load_config: Any) -> None:
        PLUGIN.warn_if_untried()
        install()
        self.extra = VllmExtraConfig.of(load_config.model_loader_extra_config or {})
        # The default loader's own constructor knows other extra settings.
        BaseModelLoader.__init__(self, load_config)
        self._stock = DefaultModelLoader(
            dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config={})
        )
        self._built: tuple[Any, str] | None = None
        self.local_expert_ids = None
        self._encoder_only_lm_prefixes = None
        self._encoder_only_weights_mapper = None
        self.enable_weights_track = self.extra.enable_weights_track

    # What is where

    def download_model(self, model_config: Any) -> None:
        """Brings a model of the Hub to the local cache; what is local or on an object store stays where it is."""
        location = _location(model_config.model, model_config)
        if not is_url(location):
            self._files(location, self._primary(model_config, None), model_config)

    def _primary(self, model_config: Any, model: nn.Module | None) -> DefaultModelLoader.Source:
        return DefaultModelLoader.Source(
            model_config.model,
            model_config.revision,
            fall_back_to_pt=False,
            allow_patterns_overrides=getattr(model, "allow_patterns_overrides", None),
        )

    def weights(self, model_config: Any, model: nn.Module) -> Iterator[Weights]:
        """The tensors that the model is to be offered."""
        unused = getattr(model, "is_unused_checkpoint_weight", None)
        for number, source in enumerate([self._primary(model_config, model), *getattr(model, "secondary_weights", ())]):
            location = _location(source.model_or_path, model_config)
            if is_url(location):
                where: Any = self._objects(location, source, model_config)
            else:
                where = self._files(location, source, model_config)
            checkpoint = self.extra.open(where, _copies(model_config) if is_url(location) else ())
            names = [
                name
                for name in checkpoint.offset_keys()
                if not should_skip_weight(name, self.local_expert_ids)
                and not (number == 0 and unused is not None and unused(name))
            ]
            yield Weights(checkpoint, names, source.prefix)

    def _objects(self, location: str, source: DefaultModelLoader.Source, model_config: Any) -> Any:
        """What to read at a URL: all of it, unless the model names its files or is in Mistral's format."""
        where = f"{location.rstrip('/')}/{source.subfolder}" if source.subfolder else location
        of_mistral = getattr(model_config, "config_format", None) == "mistral"
        patterns = source.allow_patterns_overrides or (["consolidated*.safetensors"] if of_mistral else [])
        if not patterns or is_http(where):
            return where
        present = list_safetensors(where)
        found = ([file for file in present if matches_any(file.rpartition("/")[2], [pattern])] for pattern in patterns)
        return next(filter(None, found), where)

    def _files(self, location: str, source: DefaultModelLoader.Source, model_config: Any) -> list[str]:
        # vLLM 0.24 returns three things, 0.32 a fourth.
        try:
            prepared = self._stock._prepare_weights(
                location, source.subfolder, source.revision, False, source.allow_patterns_overrides
            )
        except RuntimeError as error:
            # Which it says of other formats too, when it is asked for safetensors.
            if "Cannot find any model weights" in str(error) and any(Path(location).glob("*.bin")):
                raise no_safetensors(location) from error
            raise
        files: list[str] = prepared[1]
        use_safetensors: bool = prepared[2]
        if not use_safetensors:
            raise no_safetensors(location)
        # Some repositories hold the model twice: in shards, and in Mistral's own format.
        of_mistral = [file for file in files if file.rpartition("/")[2].startswith("consolidated")]
        if of_mistral and len(of_mistral) < len(files):
            wanted = getattr(model_config, "config_format", None) == "mistral"
            files = of_mistral if wanted else [file for file in files if file not in of_mistral]
        return files

    # Eager tensors: for reloading, which processes layer by layer

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Generator[tuple[str, torch.Tensor], None, None]:
        """``(name, tensor)`` of everything, streamed: what ``reload_weights`` asks for."""
        yield from eager(self._recorder(), list(self.weights(model_config, model)))

    # Loading

    def load_model(self, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        """Builds the model and fills it."""
        self._built = vllm_config, kwargs.get("prefix", args[0] if args else "")
        try:
            model: nn.Module = super().load_model(vllm_config, model_config, *args, **kwargs)
            return model
        finally:
            self._built = None

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fills the model's parameters."""
        if model_config.quantization == "torchao":
            logger.warning("torchao's checkpoints keep tensors in pieces that vLLM joins itself: loaded as by 'auto'")
            if self.extra.record == "verify":
                nothing_to_verify(logger, "torchao's checkpoints are loaded as by 'auto'")
            self._stock.load_weights(model, model_config)
            return
        sharing = self._sharing(model_config)
        try:
            self._load(model, model_config, sharing)
        except BaseException as error:
            if sharing is not None:
                sharing.opt_out(error)
            raise

    def _load(self, model: Any, model_config: Any, sharing: Sharing | None) -> None:
        began = time.perf_counter()
        self._init_ep_weight_filter(model_config)
        offered = list(self.weights(model_config, model))
        reason = self._reason_for_eager(model)
        reference = self._reference(model, model_config, reason) if self.extra.record == "verify" else None
        loaded, statistics = fill(model.load_weights, offered, self._recorder, why_eager=reason, sharing=sharing)
        if reference is not None:
            verify(reference.load_weights, offered, self._recorder, model=model, reference=reference, logger=logger)
        PLUGIN.last_load = statistics
        log_load(logger, time.perf_counter() - began, statistics)
        track = self.enable_weights_track
        if track is None:
            track = model_config.quantization is None and loaded is not None
        if track:
            self.track_weights_loading(model, loaded, **_tracking(model_config))

    def _sharing(self, model_config: Any) -> Sharing | None:
        """The other ranks of the tensor-parallel group, where they load this model too.

        Not every rank loads a draft model: it is loaded without a word to the others. All else that is asked here is
        the same on all ranks.
        """
        is_draft = getattr(model_config, "runner_type", None) == "draft"
        if is_draft or not model_parallel_is_initialized():
            return None
        is_cpu = _device(self.load_config) == "cpu"
        return sharing_of(get_tp_group(), self.extra, is_cpu=is_cpu, logger=logger)

    def _recorder(self, sharing: Sharing | None = None) -> Recorder:
        progress = True if enable_tqdm(self.load_config.use_tqdm_on_load) else None
        # As vLLM's own loaders have them.
        return Recorder(
            "cpu",
            progress=progress,
            options=self.extra.load_options(),
            sharing=sharing,
            keep="eager",
            shared_on=_device(self.load_config),
        )

    def _reference(self, model: nn.Module, model_config: Any, why_eager: str | None) -> Any:
        """A second model like one that is not loaded yet, with the same bytes; None where nothing is recorded."""
        if self._built is None:
            raise ConfigError('{"record": "verify"} is for models that this loader builds, not for reloading weights')
        if why_eager is not None:
            nothing_to_verify(logger, why_eager)
            return None
        vllm_config, prefix = self._built
        # Layers register by name in the configuration, each name once, and experts in a list that is gone through while
        # the model computes.
        compilation = copy.copy(vllm_config.compilation_config)
        compilation.static_forward_context = {}
        compilation.static_all_moe_layers = []
        vllm_config = copy.copy(vllm_config)
        vllm_config.compilation_config = compilation
        target = torch.device(self.load_config.device or vllm_config.device_config.device)
        with set_default_torch_dtype(model_config.dtype), target:
            reference = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        copy_state(model, reference)
        return reference

    def _reason_for_eager(self, model: nn.Module) -> str | None:
        """Why this model is not to be recorded, or None."""
        if not self.extra.record:
            return "record is False"
        for module in model.modules():
            if getattr(getattr(module, "quant_method", None), "uses_meta_device", False):
                return "vLLM quantises while it loads"
            # Loaders that count what they copy, and process a layer when it is complete.
            for parameter in module.parameters(recurse=False):
                if getattr(getattr(parameter, "weight_loader", None), "__name__", "") == "online_process_loader":
                    return "vLLM processes weights while it loads"
        return None


def register() -> None:
    """Makes vLLM know the loader; once."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    if _LOAD_FORMAT_TO_MODEL_LOADER.get(FORMAT) is not PenstockModelLoader:
        register_model_loader(FORMAT)(PenstockModelLoader)


def _location(model_or_path: str, model_config: Any) -> str:
    """Where weights are: of a model on an object store, vLLM's ``model`` is a directory with its configuration."""
    elsewhere = getattr(model_config, "model_weights", None)
    if not elsewhere or model_or_path != model_config.model:
        return model_or_path
    # To reload from another path, vLLM 0.24 changes ``model`` alone: the object store is then that of the model before.
    configured = _CONFIGURED.setdefault(elsewhere, model_or_path)
    return elsewhere if configured == model_or_path else model_or_path


def _copies(model_config: Any) -> list[str]:
    """Where vLLM has put the small files of a model on an object store."""
    places = dict.fromkeys((model_config.model, getattr(model_config, "tokenizer", None)))
    return [str(place) for place in places if place and Path(place).is_dir()]


def _device(load_config: Any) -> str:
    """The device that weights go to: lazy tensors say they are there, and eager ones come to be there."""
    wanted = load_config.device or current_platform.device_type
    if torch.device(wanted).type != "cuda":
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}"


def _tracking(model_config: Any) -> dict[str, bool]:
    """What this version's ``track_weights_loading`` wants to know."""
    import inspect

    known = inspect.signature(DefaultModelLoader.track_weights_loading).parameters
    return {"quantized": model_config.quantization is not None} if "quantized" in known else {}
