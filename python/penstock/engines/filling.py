"""Filling an engine's model: with lazy tensors, as one plan; with ordinary ones where that is not possible.

What engines' plugins share once they know which checkpoints a model is made of. It knows torch and no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

from penstock.checkpoint import Checkpoint
from penstock.errors import FormatError, PenstockError
from penstock.recording import Recorder, Sharing, Statistics

Pairs = Iterator[tuple[str, torch.Tensor]]
T = TypeVar("T")


class Weights(NamedTuple):
    """Some of a checkpoint's tensors, and what the model knows them as."""

    checkpoint: Checkpoint
    names: list[str]
    prefix: str


def lazy(recorder: Recorder, offered: Sequence[Weights]) -> Pairs:
    """``(name, lazy tensor)`` of everything."""
    for weights in offered:
        yield from recorder.weights(weights.checkpoint, weights.names, prefix=weights.prefix)


def ordinary(recorder: Recorder, offered: Sequence[Weights]) -> Pairs:
    """``(name, tensor)`` of everything, streamed to the recorder's device."""
    for weights in offered:
        yield from recorder.ordinary(weights.checkpoint, weights.names, prefix=weights.prefix)


def fill(
    load: Callable[[Pairs], T],
    offered: Sequence[Weights],
    recorder: Callable[[Sharing | None], Recorder],
    *,
    why_ordinary: str | None,
    logger: logging.Logger,
    sharing: Sharing | None = None,
) -> tuple[T, Statistics]:
    """Has a model load itself; returns what it returned, and the figures.

    Args:
        load: the model's own code, which takes ``(name, tensor)`` pairs. It is called once more, with ordinary tensors,
            if it fails with lazy ones for a reason other than that they cannot be read.
        offered: what it gets.
        recorder: makes a recorder, which reads together with other ranks or not.
        why_ordinary: why it is not to get lazy tensors, or None.
        logger: is told of a second attempt.
        sharing: the other ranks, who are told if this one cannot record. If this raises, telling them is the caller's.

    Raises:
        PenstockError: the checkpoint cannot be read. What the model's code raises comes through.
    """
    if why_ordinary is None:
        recording = recorder(sharing)
        try:
            with recording:
                result = load(lazy(recording, offered))
        except PenstockError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, ordinary tensors decide whether it is the model's
            logger.warning("Penstock: %s; loading once more, with ordinary tensors", in_short(error))
            why_ordinary = f"loading failed with lazy tensors: {in_short(error)}"
        else:
            return result, recording.statistics
    elif sharing is not None:
        sharing.withdraw(why_ordinary)
    plain = recorder(None)
    plain.statistics.notes.append(f"ordinary tensors: {why_ordinary}")
    return load(ordinary(plain, offered)), plain.statistics


def no_safetensors(location: str) -> FormatError:
    """What to raise for a model whose files are of another format."""
    cause = "there are no safetensors files"
    return FormatError(
        f"{location}: {cause}, which is all that --load-format penstock reads. Use --load-format auto",
        object=location,
        cause=cause,
        remedy="Use --load-format auto",
    )


def report(logger: logging.Logger, seconds: float, statistics: Statistics) -> None:
    """Says what a load did, in the words that people look for in an engine's log."""
    logger.info("Loading weights took %.2f seconds", seconds)
    logger.info("Penstock: %s", statistics)
    for note in statistics.all_notes():
        logger.info("Penstock: %s", note)


def in_short(error: BaseException) -> str:
    """An error's type and first line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
