"""transformers' ``from_pretrained``: as it is, within ``patch_safetensors``, and through ``penstock.integrations``.

``transformers-mapped`` is Penstock's views of the files on the CPU, which is what stock's parameters are there.
``:dtype=float32`` converts; the bytes of such a model are not compared with the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import Load, Loader, Tensors, Use

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def _loading(from_pretrained: Any) -> Any:
    def prepare(use: Use) -> Load:
        import torch
        import transformers.models.llama.modeling_llama  # noqa: F401 - the class is imported before the clock

        dtype = getattr(torch, use.settings.get("dtype", "bfloat16"))
        call = from_pretrained()

        def load(files: list[str]) -> Tensors:
            model = call(str(Path(files[0]).parent), use.device, dtype)
            return {name: parameter.detach() for name, parameter in model.named_parameters()}

        return load

    return prepare


def _stock() -> Any:
    import transformers

    def load(model: str, device: str, dtype: Any) -> Any:
        # The class itself, as the other loader finds it by the configuration too.
        return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype, device_map={"": device})

    return load


def _patched() -> Any:
    import penstock

    return penstock.patch_safetensors()(_stock())


def _by_penstock(**options: Any) -> Any:
    from penstock.integrations.transformers import from_pretrained

    return lambda model, device, dtype: from_pretrained("auto", model, device=device, dtype=dtype, **options)


LOADERS = {
    name: Loader("transformers", _loading(how), OFFLINE, watched=True)
    for name, how in {
        "transformers": _stock,
        "transformers-patched": _patched,
        "transformers-penstock": _by_penstock,
        "transformers-mapped": lambda: _by_penstock(mmap=True),
    }.items()
}
