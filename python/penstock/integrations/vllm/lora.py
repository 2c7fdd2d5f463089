"""LoRA adapters of object stores and the hub for ``vllm serve --enable-lora``: found when a request first names one.

A server's users choose the names, so only adapters below the locations of ``PENSTOCK_LORA_LOCATIONS`` are fetched, and
nothing is registered without it. What is fetched goes to a directory of this process: vLLM reads adapters by path. It
must not know how vLLM loads an adapter; vLLM compares its shapes with the model's.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

from penstock._native import shown
from penstock.arguments import is_url, joined
from penstock.errors import LocationNotFoundError, PenstockError
from penstock.integrations.shared.small_files import fresh_directory
from penstock.integrations.vllm import LORA_LOCATIONS
from penstock.pulling import pull

NAME = "Penstock"
"""What vLLM's registry calls the resolver."""
CONFIGURATION = "adapter_config.json"

# No escapes, queries or backslashes, which some servers take for a way out.
_STEP = re.compile(r"[\w.@+=~-]+", re.ASCII)

logger = logging.getLogger("vllm.penstock")


class PenstockLoRAResolver(LoRAResolver):  # type: ignore[misc]
    """Finds ``name`` below each location, and a location that is given in full if it is below one of them."""

    def __init__(self, locations: list[str]) -> None:
        self.locations = locations
        self._directory: str | None = None

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapter on the local disk, or None where there is none of that name."""
        del base_model_name  # A server's model may be called otherwise than the one that the adapter was made for.
        path = await asyncio.to_thread(self.fetch, lora_name)
        return None if path is None else LoRARequest(lora_name=lora_name, lora_int_id=1, lora_path=path)

    def fetch(self, name: str) -> str | None:
        """The local directory of the adapter. What a store refuses is logged, and the next location is asked."""
        return next(filter(None, map(self._fetched, self.candidates(name))), None)

    def candidates(self, name: str) -> list[str]:
        """Where an adapter of that name may be, never above or beside the locations that were allowed."""
        below = name
        if is_url(name):
            location = next((location for location in self.locations if name.startswith(location)), None)
            if location is None:
                return []
            below = name.removeprefix(location)
        steps = below.rstrip("/").split("/")
        if not all(_STEP.fullmatch(step) and step not in {".", ".."} for step in steps):
            return []
        return [name] if is_url(name) else [joined(location, name) for location in self.locations]

    def _fetched(self, location: str) -> str | None:
        if self._directory is None:
            self._directory = fresh_directory()
        # A name of its own for each: a location may be longer than a file's name can be.
        directory = Path(self._directory, hashlib.sha256(location.encode()).hexdigest()[:16])
        try:
            pulled = pull(f"{location.rstrip('/')}/", directory, ignore_patterns=["*/*", "*.bin", "*.pt"])
        except LocationNotFoundError:
            return None
        except PenstockError as error:
            logger.warning("a LoRA adapter could not be fetched: %s", error)
            return None
        if not (directory / CONFIGURATION).is_file():
            logger.warning("%s is no LoRA adapter: there is no %s", shown(location), CONFIGURATION)
            return None
        logger.info("Penstock: the LoRA adapter %s, %.1f MB", shown(location), pulled.nbytes / 1e6)
        return str(directory)


def register() -> None:
    """Registers the resolver if ``PENSTOCK_LORA_LOCATIONS`` names locations; one that is no URL is left out."""
    locations = []
    for location in filter(None, re.split(r"[,\s]+", os.environ.get(LORA_LOCATIONS, ""))):
        if is_url(location):
            locations.append(f"{location.rstrip('/')}/")
        else:
            logger.warning("%s names %r, which is no URL such as s3://bucket/loras/", LORA_LOCATIONS, shown(location))
    if locations:
        LoRAResolverRegistry.register_resolver(NAME, PenstockLoRAResolver(locations))
