"""How much of the device a model's runs need beside its weights, learned from the last ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

_REMEMBERED = 4
"""Runs that are remembered of a model and a key."""


class Workspaces:
    """Bytes by model and key, where a key is what the need depends on: a resolution, a batch size."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[Hashable, deque[int]]] = {}
        self.measuring: object = None
        """What is being measured: the peak of two at once would be neither's."""

    def expected(self, model: str, key: Hashable) -> int:
        """What the next run will need: the most of the last ones with this key, else of any, else nothing."""
        by_key = self._runs.get(model, {})
        known = [by_key[key]] if key in by_key else by_key.values()
        return max((max(runs) for runs in known), default=0)

    def learn(self, model: str, key: Hashable, nbytes: int) -> None:
        """Notes what a run needed."""
        runs = self._runs.setdefault(model, {}).setdefault(key, deque(maxlen=_REMEMBERED))
        runs.append(max(nbytes, 0))

    def forget(self, model: str) -> None:
        """Drops what is known of a model."""
        self._runs.pop(model, None)
