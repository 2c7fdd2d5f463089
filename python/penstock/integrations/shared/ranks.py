"""The ranks that fill a model together, of the groups that an engine has.

vLLM's and SGLang's groups are of one descent: each has its ranks twice, for tensors of the CPU and for those of the
device. Which group loads together, and when, the engine's loader knows; here is what the two do with it. It knows torch
and no engine.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from penstock.distributed import Peers, Sharing
from penstock.integrations.shared.filling import in_short
from penstock.integrations.shared.options import LoaderOptions


class Group(Protocol):
    """An engine's group of ranks."""

    world_size: int
    cpu_group: Any
    device_group: Any


def sharing(group: Group, options: LoaderOptions, *, is_cpu: bool, logger: logging.Logger) -> Sharing | None:
    """What the ranks of ``group`` read together with, or None where each reads for itself.

    It comes out the same on every rank, and nothing is said to any. A rank that was given it has to use it or to
    ``opt_out``: the others wait for its word.

    Args:
        group: ranks each of which is about to load the same model, and says nothing else in the group until it has.
        options: ``share`` among them.
        is_cpu: whether weights go to the CPU.
        logger: is told where the group is of a kind that does not serve.
    """
    if options.share is False or group.world_size == 1:
        return None
    try:
        peers = Peers(group.cpu_group, group.cpu_group if is_cpu else group.device_group)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        # Groups that torch.distributed does not know, which some modes make; it is so on every rank.
        logger.info("Penstock: each rank reads for itself: %s", in_short(error))
        return None
    return Sharing(peers, always=bool(options.share))
