"""Filling an engine's model: with lazy tensors, as one plan; with eager ones where the engine needs them.

A model's loading code runs once. What it does with a tensor that cannot be recorded is done with that tensor, read
eagerly; an error that it raises is the model's own.

What engines' plugins share once they know which checkpoints a model is made of, and which ranks load together: vLLM's
and SGLang's groups are of one descent, and have their ranks twice, for tensors of the CPU and of the device. It knows
torch and no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from penstock._native import shown
from penstock.checkpoint import Checkpoint
from penstock.distributed import Peers, Sharing
from penstock.errors import FormatError
from penstock.integrations.shared.extra_config import ExtraConfig
from penstock.recording import Recorder, Statistics
from penstock.recording.verifying import verify_equal

Pairs = Iterator[tuple[str, torch.Tensor]]
T = TypeVar("T")


class Weights(NamedTuple):
    """Some of a checkpoint's tensors, and what the model knows them as."""

    checkpoint: Checkpoint
    names: list[str]
    prefix: str


class Group(Protocol):
    """An engine's group of ranks."""

    world_size: int
    cpu_group: Any
    device_group: Any


def sharing_of(group: Group, extra: ExtraConfig, *, is_cpu: bool, logger: logging.Logger) -> Sharing | None:
    """What the ranks of ``group`` read together with, or None where each reads for itself.

    It comes out the same on every rank, and nothing is said to any. A rank that was given it has to use it or to
    ``opt_out``: the others wait for its word.

    Args:
        group: ranks each of which is about to load the same model, and says nothing else in the group until it has.
        extra: ``share`` among the rest.
        is_cpu: whether weights go to the CPU.
        logger: reports where the group is of a kind that does not serve.
    """
    if extra.share is False or group.world_size == 1:
        return None
    try:
        peers = Peers(group.cpu_group, group.cpu_group if is_cpu else group.device_group)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        # Groups that torch.distributed does not know, which some modes make; it is so on every rank.
        logger.info("Penstock: each rank reads for itself: %s", in_short(error))
        return None
    return Sharing(peers, always=bool(extra.share))


def lazy(recorder: Recorder, offered: Sequence[Weights]) -> Pairs:
    """``(name, lazy tensor)`` of everything."""
    for weights in offered:
        yield from recorder.weights(weights.checkpoint, weights.names, prefix=weights.prefix)


def eager(recorder: Recorder, offered: Sequence[Weights]) -> Pairs:
    """``(name, tensor)`` of everything, streamed to where the recorder has tensors."""
    for weights in offered:
        yield from recorder.eager(weights.checkpoint, weights.names, prefix=weights.prefix)


def fill(
    load: Callable[[Pairs], T],
    offered: Sequence[Weights],
    recorder: Callable[[Sharing | None], Recorder],
    *,
    why_eager: str | None,
    sharing: Sharing | None = None,
) -> tuple[T, Statistics]:
    """Has a model load itself; returns what it returned, and the figures.

    Args:
        load: the model's own code, which takes ``(name, tensor)`` pairs. It is called once.
        offered: what it gets.
        recorder: makes a recorder, which reads together with other ranks or not. It has tensors where the engine's own
            loaders have them, on the CPU: what the model's code computes has the same bytes then, recorded or not.
        why_eager: why it is not to get lazy tensors, or None.
        sharing: the other ranks, who are notified if this one cannot record. If this raises, the caller does that.

    Raises:
        PenstockError: the checkpoint cannot be read. What the model's code raises comes through.
    """
    if why_eager is None:
        recording = recorder(sharing)
        with recording:
            result = load(lazy(recording, offered))
        return result, recording.statistics
    if sharing is not None:
        sharing.opt_out(why_eager)
    plain = recorder(None)
    plain.statistics.notes.append(f"eager tensors: {why_eager}")
    return load(eager(plain, offered)), plain.statistics


def verify(
    load: Callable[[Pairs], object],
    offered: Sequence[Weights],
    recorder: Callable[[Sharing | None], Recorder],
    *,
    model: torch.nn.Module,
    reference: torch.nn.Module,
    logger: logging.Logger,
) -> None:
    """Fills a second model with eager tensors, and compares the two.

    Args:
        load: the second model's own code.
        offered: what the first model got.
        recorder: makes a recorder.
        model: the first model, which is loaded.
        reference: the second model. Before the first was loaded it was given the same bytes (``copy_state``), so that
            what no weight fills is the same.
        logger: reports that all are equal.

    Raises:
        VerificationError: tensors differ; it names the first of them.
    """
    load(eager(recorder(None), offered))
    count = verify_equal(model, reference)
    logger.info("Penstock: verified: all %d parameters and buffers are equal to those of an eager load", count)


def nothing_to_verify(logger: logging.Logger, reason: str) -> None:
    """Says that a model which was to be verified gets no lazy tensors: comparing would find it equal to itself."""
    logger.warning('Penstock: {"record": "verify"} has nothing to compare, since nothing is recorded: %s', reason)


def no_safetensors(location: str) -> FormatError:
    """What to raise for a model whose files are of another format."""
    cause = "there are no safetensors files, which is all that --load-format penstock reads"
    return FormatError(location=shown(location), cause=cause, remedy="Use --load-format auto")


def log_load(logger: logging.Logger, seconds: float, statistics: Statistics) -> None:
    """Says what a load did, in the words that people look for in an engine's log."""
    logger.info("Loading weights took %.2f seconds", seconds)
    logger.info("Penstock: %s", statistics)
    for note in statistics.all_notes():
        logger.info("Penstock: %s", note)


def in_short(error: BaseException) -> str:
    """An error's type and first line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
