"""SGLang's loader for ``--load-format penstock``.

The model gets lazy tensors; what its own loading code copies into its parameters is read as one plan, straight into
them (``penstock.recording``): each rank reads its share, experts and stages of others are never touched, and there is
no second copy on the GPU. What the ranks of a tensor-parallel group would each read whole they read together, when the
engine starts. Where recording is not possible the model gets eager tensors.

Built on SGLang's default loader for what is the same: which files a model's name means, how a model is built, what
becomes of its weights when they are there, how they are updated while it serves.
"""

from __future__ import annotations

import copy
import logging
import time
from functools import partial
from typing import Any, ClassVar

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.distributed.parallel_state import get_tp_group, model_parallel_is_initialized
from sglang.srt.model_loader.loader import (
    BaseModelLoader,
    DefaultModelLoader,
    _get_quantization_config,
    _initialize_model,
    set_default_torch_dtype,
)
from sglang.srt.model_loader.weight_utils import maybe_add_mtp_safetensors
from sglang.srt.runtime_context import get_exec, get_model

import penstock
from penstock._native import shown
from penstock.arguments import is_url, joined
from penstock.distributed import Sharing
from penstock.errors import ConfigError, LocationNotFoundError
from penstock.integrations.sglang import PLUGIN
from penstock.integrations.sglang.stores import small_files_of
from penstock.integrations.shared.extra_config import ExtraConfig
from penstock.integrations.shared.filling import (
    Pairs,
    Weights,
    eager,
    fill,
    log_load,
    no_safetensors,
    nothing_to_verify,
    sharing_of,
    verify,
)
from penstock.recording import Recorder, copy_state

logger = logging.getLogger(__name__)


class Offered:
    """The weights that a model is to be offered: as often as they are needed, and as lazy tensors to who knows how.

    To everyone else it is what SGLang's loaders give, pairs of names and eager tensors.
    """

    def __init__(self, loader: PenstockModelLoader, weights: list[Weights], names: dict[str, str]) -> None:
        self.weights = weights
        self._loader = loader
        self._names = names

    def __iter__(self) -> Pairs:
        return self.renamed(eager(self._loader.recorder(), self.weights))

    def renamed(self, pairs: Pairs) -> Pairs:
        """With the names that the model knows its only layer by, where it is one of several draft models."""
        for name, tensor in pairs:
            yield self._names.get(name, name), tensor


class PenstockModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads a model for `--load-format penstock`."""

    recording: ClassVar[bool] = False
    """Whether a model of this process is being given lazy tensors right now."""

    def __init__(self, load_config: Any) -> None:
        PLUGIN.warn_if_untried()
        self.extra = ExtraConfig.of(load_config.model_loader_extra_config or {})
        # The default loader's own constructor knows other extra settings.
        BaseModelLoader.__init__(self, load_config)
        self._stock = DefaultModelLoader(with_load_format(load_config, LoadFormat.SAFETENSORS))
        self._device = "cpu"
        self._together: Sharing | None = None
        self._built: tuple[Any, Any] | None = None

    # What is where

    def _prepare_weights(self, *args: Any, **kwargs: Any) -> tuple[str, list[str], bool]:
        found: tuple[str, list[str], bool] = self._stock._prepare_weights(*args, **kwargs)
        return found

    def _get_weights_iterator(self, source: Any, **_: Any) -> Any:
        return self._offered([source])

    def _get_all_weights(self, model_config: Any, model: Any) -> Any:
        first = DefaultModelLoader.Source.init_new(model_config, model)
        return self._offered([first, *getattr(model, "secondary_weights", ())])

    def _offered(self, sources: list[Any]) -> Offered:
        offered: list[Weights] = []
        renamed: dict[str, str] = {}
        wanted = self.load_config.draft_model_idx
        for source in sources:
            location = _location(source)
            checkpoint = self._on_store(location, source) if is_url(location) else self._in_files(location, source)
            names = []
            for name in checkpoint.offset_keys():
                layer = self._MTP_PATTERN.match(name) if wanted is not None else None
                if layer is not None:
                    if int(layer[1]) != wanted:
                        continue
                    renamed[source.prefix + name] = f"{source.prefix}model.mtp.layers.0.{name[layer.end() :]}"
                names.append(name)
            offered.append(Weights(checkpoint, names, source.prefix))
        return Offered(self, offered, renamed)

    def _on_store(self, url: str, source: Any) -> penstock.Checkpoint:
        if get_model().model_checksum is not None:
            raise ConfigError(f"{shown(url)}: checksums are verified of local files only. Leave out --model-checksum")
        patterns = source.allow_patterns_overrides
        for number, place in enumerate(
            [url] if patterns is None else [joined(url, pattern) for pattern in patterns], 1
        ):
            try:
                return self.extra.open(place, [small_files_of(url)])
            except LocationNotFoundError:  # noqa: PERF203 - few, and the first is there
                if number == len(patterns or [url]):
                    raise
        raise LocationNotFoundError(f"{shown(url)}: the model names no files", location=shown(url))

    def _in_files(self, location: str, source: Any) -> penstock.Checkpoint:
        folder, files, is_safetensors = self._prepare_weights(
            location, source.revision, False, source.allow_patterns_overrides
        )
        if not is_safetensors or not all(file.endswith(".safetensors") for file in files):
            raise no_safetensors(location)
        if source.model_config is not None:
            hf_config = source.model_config.hf_config
            files = maybe_add_mtp_safetensors(files, folder, "model.safetensors.index.json", hf_config)
        # SGLang may have each rank begin with another file (SGLANG_SORT_WEIGHT_FILES); here all go by one order.
        return self.extra.open(sorted(files))

    # Loading

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        """Builds the model and fills it, as the engine starts; with the other ranks of its group where that pays."""
        together = self._together = self._sharing(model_config, device_config)
        self._built = model_config, device_config
        try:
            model = super().load_model(model_config=model_config, device_config=device_config)
        except BaseException as error:
            if together is not None:
                together.opt_out(error)
            raise
        finally:
            self._together = self._built = None
        if together is not None:
            # No word if they have heard: some models are not filled by this loader.
            together.opt_out("it needs no weights of this loader")
        return model

    def _sharing(self, model_config: Any, device_config: Any) -> Sharing | None:
        """The other ranks of the tensor-parallel group, where they start with this model too.

        With data-parallel attention these are all ranks of a stage, each of which loads it; stages have groups of their
        own. Updates have none: ranks take them up when they come to it, some only what they lack, and one that fails
        loads again. Nor have drafts, which not every rank loads, nor ranks that join others who serve already
        (elastic expert parallelism).
        """
        config = self.load_config
        is_draft = getattr(model_config, "is_draft_model", False) or config.draft_model_idx is not None
        # SGLang's word for loads that others take no part in.
        is_alone = getattr(config, "load_group", config) is None
        device, reason = _device(device_config.device)
        if is_draft or is_alone or reason is not None or not model_parallel_is_initialized():
            return None
        if get_exec().moe.elastic_ep_backend is not None:
            return None
        return sharing_of(get_tp_group(), self.extra, is_cpu=device == "cpu", logger=logger)

    def load_weights_and_postprocess(
        self, model: Any, weights: Any, target_device: Any, *, model_config: Any = None
    ) -> None:
        """Fills the model's parameters, and has SGLang do with them what it does when they are there.

        Versions after 0.5.23 say of the load at the start whose it is, and have a hook for it.
        """
        self.counter_before_loading_weights = time.perf_counter()
        self._device, reason = _device(target_device)
        if not isinstance(weights, Offered):
            # Some of them, in an update.
            DefaultModelLoader.load_weights_only(model, weights, target_device)
        else:
            reason = reason if self.extra.record else "record is False"

            def load(pairs: Pairs, filled: Any = model) -> None:
                DefaultModelLoader.load_weights_only(filled, weights.renamed(pairs), target_device)

            reference = self._reference(model, reason) if self.extra.record == "verify" else None
            PenstockModelLoader.recording = reason is None
            try:
                _, statistics = fill(load, weights.weights, self.recorder, why_eager=reason, sharing=self._together)
            finally:
                PenstockModelLoader.recording = False
            if reference is not None:
                load_reference = partial(load, filled=reference)
                verify(load_reference, weights.weights, self.recorder, model=model, reference=reference, logger=logger)
            PLUGIN.last_load = statistics
            log_load(logger, time.perf_counter() - self.counter_before_loading_weights, statistics)
        if model_config is not None:
            DefaultModelLoader.pre_weight_processing_hook(model, model_config)
        DefaultModelLoader.postprocess_weights(model, target_device)

    def recorder(self, sharing: Sharing | None = None) -> Recorder:
        """A recorder for the latest load, of tensors on the CPU, as SGLang's own loaders have them."""
        is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        progress = True if is_first else None
        options = self.extra.load_options()
        return Recorder(
            "cpu", progress=progress, options=options, sharing=sharing, keep="eager", shared_on=self._device
        )

    def _reference(self, model: Any, why_eager: str | None) -> Any:
        """A second model like one that is not loaded yet, with the same bytes; None where nothing is recorded."""
        if self._built is None:
            raise ConfigError('{"record": "verify"} is for models that this loader builds, not for updates of weights')
        if why_eager is not None:
            nothing_to_verify(logger, why_eager)
            return None
        model_config, device_config = self._built
        quantisation = _get_quantization_config(model_config, self.load_config)
        with set_default_torch_dtype(model_config.dtype), torch.device(device_config.device):
            reference = _initialize_model(model_config, self.load_config, quantisation)
        copy_state(model, reference)
        return reference


def with_load_format(load_config: Any, load_format: LoadFormat) -> Any:
    """A copy of ``load_config`` with that format and no options of a loader."""
    # Making a new one would log what it ignores, once more.
    other = copy.copy(load_config)
    other.load_format, other.model_loader_extra_config = load_format, {}
    return other


def _location(source: Any) -> str:
    """Where weights are: of a model on an object store, ``model_path`` is a directory with its small files."""
    elsewhere = getattr(source.model_config, "model_weights", None)
    if elsewhere and is_url(elsewhere) and source.model_or_path == small_files_of(elsewhere):
        return str(elsewhere)
    return str(source.model_or_path)


def _device(target: Any) -> tuple[str, str | None]:
    """The device that weights go to, and why they are not to be recorded on their way there, or None."""
    kind = torch.device(target).type
    if kind == "cuda" and not torch.version.hip:
        return f"cuda:{torch.cuda.current_device()}", None
    if kind == "cpu":
        return "cpu", None
    return "cpu", f"devices of type {'hip' if kind == 'cuda' else kind} are filled by the model's own code"
