"""Has a recorder get something wrong: what verifying is for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from penstock.recording import Recorder


@contextmanager
def one_place_left_out(which: int) -> Iterator[list[str]]:
    """Of what is recorded, one place (by turns, whatever ``which`` is) is not read to; gives the name of its tensor.

    New memory does not hold what was there before: the weights of a model of the same class that has gone.
    """
    left_out: list[str] = []
    taken = Recorder._take_pending

    def short(self: Recorder) -> list[Any]:
        writes = taken(self)
        if writes and not left_out:
            left_out.append(writes.pop(which % len(writes)).part.name)
        return writes

    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        with mock.patch.object(Recorder, "_take_pending", short):
            yield left_out
    finally:
        torch.use_deterministic_algorithms(was)
