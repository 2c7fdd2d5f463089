"""The processes that stream the same files: when they do it together, and the groups they speak in.

When is as callers of the interface know it: asked for, torch's process groups in use, more than one process, a backend
that takes tensors of the device, and ``RUNAI_STREAMER_DIST``. By itself (``auto``) that is between GPUs (nccl) only.

Groups are of the processes of one machine, each of which then reads everything once, or of all with
``RUNAI_STREAMER_DIST_GLOBAL=1``. They are made for a streamer and end with it: their timeout is
``RUNAI_STREAMER_DIST_TIMEOUT`` (seconds, 600 by default), and nothing is left in the memory of a device.
"""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from penstock.distributed import Peers
from penstock.errors import PeerError
from runai_model_streamer import _penstock

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 600


def size() -> int:
    """How many processes there are: 1 where torch's process groups are not in use."""
    ready = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if ready else 1


def apply(is_distributed: bool, device: str) -> bool:
    """Whether files are streamed together; the same for all processes that say the same.

    Raises:
        ValueError: for a ``RUNAI_STREAMER_DIST`` other than 0, 1 and auto.
    """
    if not is_distributed:
        return False
    wish = os.environ.get("RUNAI_STREAMER_DIST", "auto")
    if wish not in {"0", "1", "auto"}:
        raise ValueError(f"Invalid value for RUNAI_STREAMER_DIST: {wish}")
    if wish == "0" or size() == 1:
        return False
    backend, kind = distributed.get_backend(), torch.device(device).type
    takes = {"nccl": {"cuda"}, "gloo": {"cpu"}}.get(backend, {"cpu", "cuda"})
    if kind not in takes:
        why = f"the backend {backend} is not for tensors on {kind}"
    elif wish == "auto" and backend != "nccl":
        why = f"the backend is {backend}; RUNAI_STREAMER_DIST=1 makes them"
    else:
        return True
    logger.info("[RunAI Streamer][Distributed] processes do not read together: %s", why)
    return False


class Ranks:
    """The groups of one streamer, made when they are first needed."""

    def __init__(self) -> None:
        self._control: Any = None
        self._data: Any = None
        self._kind = ""

    def peers(self, device: str) -> Peers:
        """The processes to stream one thing with. All of them call this, in the same order.

        Raises:
            PeerError: a process is gone, or did not come in time.
        """
        kind = torch.device(device).type
        try:
            if self._control is None or kind != self._kind:
                self.close()
                self._make(kind)
            return Peers(self._control, self._data)
        except RuntimeError as error:
            self.close()
            cause = f"the processes did not find together: {error}"
            raise PeerError(cause=cause, remedy="Look into the logs of the others") from error

    def _make(self, kind: str) -> None:
        timeout = timedelta(seconds=_penstock.number("RUNAI_STREAMER_DIST_TIMEOUT", least=1) or _TIMEOUT_SECONDS)
        all_ranks = list(range(size()))
        self._control, together = distributed.new_group(all_ranks, timeout=timeout, backend="gloo"), [all_ranks]
        if (_penstock.number("RUNAI_STREAMER_DIST_GLOBAL", least=0) or 0) != 1:
            hosts: list[Any] = [None] * len(all_ranks)
            distributed.all_gather_object(hosts, socket.gethostname(), group=self._control)
            together = [[rank for rank in all_ranks if hosts[rank] == host] for host in sorted(set(hosts))]
        if len(together) > 1:
            distributed.destroy_process_group(self._control)
            self._control = self._own(together, timeout, "gloo")
        # The bytes of a device go through a group of their own: the default one may never have been used for any.
        self._data = None if kind == "cpu" else self._own(together, timeout, "nccl")
        self._kind = kind

    @staticmethod
    def _own(together: list[list[int]], timeout: timedelta, backend: str) -> Any:
        # Every process takes part in making every group.
        made = [distributed.new_group(ranks, timeout=timeout, backend=backend) for ranks in together]
        rank = distributed.get_rank()
        return next(group for group, ranks in zip(made, together, strict=True) if rank in ranks)

    def close(self, *, orderly: bool = True) -> None:
        """Ends the groups. Others that still wait for a word in one of them hear that it is gone.

        Args:
            orderly: whether all came to the end of what they streamed, so that what is queued on a device ends too.
        """
        if distributed.is_initialized():
            if self._data is not None:
                if orderly:
                    torch.cuda.current_stream().synchronize()
                distributed.destroy_process_group(self._data)
            if self._control is not None:
                distributed.destroy_process_group(self._control)
        self._control = self._data = None
