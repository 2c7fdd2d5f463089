"""The processes that load one model together, and what they say to each other.

They are the ranks of a group of ``torch.distributed`` that an engine made, and each does the same in the same order:

1. ``negotiate``, once: every rank says what it wants, or why it stays out, and gets what the others said.
2. Where all want to: rounds of ``all_ok``, each but the last followed by an ``exchange``. Where not all are well
   there may be one of ``failure_reasons``, and then silence.

Nobody is left waiting by a rank that fails: whatever happens to a load, ``opt_out`` ends it by telling the others, if
nothing was told yet; and after an agreement a rank that cannot go on says so in the next round, upon which all stop. A
rank that is interrupted (Ctrl-C) in a round takes part in it to its end, as the others wait for that. A process that is
gone ends the group's connections, which the others see as a failure. Loads of a rank alone, such as a draft model's,
are given no peers and say nothing to anyone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

import torch
from torch import distributed

from penstock.recording.lazy import unwatched

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Peers:
    """The ranks of one group, for one load.

    Args:
        control: a process group that takes tensors of the CPU (gloo).
        data: a process group of the same ranks that takes tensors of the device that weights go to; ``control`` where
            nothing is said.
    """

    def __init__(self, control: Any, data: Any = None) -> None:
        self._control = control
        self._data = control if data is None else data
        self.rank: int = distributed.get_rank(control)
        self.size: int = distributed.get_world_size(control)
        self._has_spoken = False
        self.interruption: BaseException | None = None
        """What a signal's handler raised while this rank took part in a round, such as ``KeyboardInterrupt``."""

    def negotiate(self, proposal: object) -> list[Any]:
        """What every rank proposes, in their order; can be had once.

        Raises:
            RuntimeError: a rank is gone.
        """
        if self._has_spoken:
            raise RuntimeError("the ranks have agreed already")
        self._has_spoken = True
        return self._to_its_end(lambda: self._gathered(proposal))

    def _gathered(self, proposal: object) -> list[Any]:
        proposals: list[Any] = [None] * self.size
        distributed.all_gather_object(proposals, proposal, group=self._control)
        return proposals

    def opt_out(self, why: str, seconds: float | None = None) -> None:
        """Tells the others that this rank stays out, if they have not heard from it yet.

        Args:
            why: what they are sent.
            seconds: how long to wait until they have heard, for as long as it takes by default. They hear it even
                where that is later, as long as this process lives.

        Where no thread can be started, this one notifies them and waits; but not where ``seconds`` are given, since it
        may not wait then: the others hear nothing before this process ends.
        """
        if self._has_spoken:
            return
        self._has_spoken = True

        def notify() -> None:
            # Not watched: a recording that ends waits for this, and may hold its lock.
            with unwatched():
                try:
                    self._gathered(why)
                except RuntimeError as error:
                    logger.debug("no rank could be notified that this one stays out: %s", error)

        # In a thread, whose end Ctrl-C does not have to wait for.
        thread = threading.Thread(target=notify, name="penstock-opt-out", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if seconds is not None:
                logger.warning("the other ranks were not notified that this one stays out: %s", error)
                return
            notify()
            return
        thread.join(seconds)

    def all_ok(self, ok: bool, seconds: float | None = None) -> bool:
        """Whether all ranks are well, which this one is or is not.

        Args:
            ok: whether this one is.
            seconds: how long to wait for the others. They are told even where they ask for it later.

        Raises:
            RuntimeError: a rank is gone, or did not answer in time.
        """

        def answer() -> bool:
            state = torch.tensor([int(ok)], device="cpu")
            distributed.all_reduce(state, distributed.ReduceOp.MIN, group=self._control)
            return bool(state.item())

        return self._to_its_end(answer, seconds)

    def exchange(
        self, into: torch.Tensor, into_bytes: Sequence[int], of: torch.Tensor, of_bytes: Sequence[int]
    ) -> None:
        """Gives every other rank its part of ``of``, in their order, and fills ``into`` with what they give.

        Raises:
            RuntimeError: a rank is gone.
        """
        if into.device.type != "cpu":
            # Queued on the current stream, and not waited for.
            distributed.all_to_all_single(into, of, list(into_bytes), list(of_bytes), group=self._data)
            return
        self._to_its_end(lambda: self._messages(into, into_bytes, of, of_bytes))

    def _messages(
        self, into: torch.Tensor, into_bytes: Sequence[int], of: torch.Tensor, of_bytes: Sequence[int]
    ) -> None:
        # Between CPUs messages take a third of the time that gloo's own collective does.
        comes, goes = torch.split(into, list(into_bytes)), torch.split(of, list(of_bytes))
        others = [rank for rank in range(self.size) if rank != self.rank]
        processes = [distributed.get_global_rank(self._data, rank) for rank in range(self.size)]
        under_way = [distributed.irecv(comes[rank], processes[rank], self._data) for rank in others if into_bytes[rank]]
        # Each begins with the one after it, so that not all send to the same first.
        for rank in others[self.rank :] + others[: self.rank]:
            if of_bytes[rank]:
                under_way.append(distributed.isend(goes[rank], processes[rank], self._data))  # noqa: PERF401 - in order
        for message in under_way:
            if message is not None:
                message.wait()

    def _to_its_end(self, collective: Callable[[], _T], seconds: float | None = None) -> _T:
        """Takes part in a collective until it has ended, even where a signal comes meanwhile.

        Handlers of signals run in the main thread only, so another takes part where this is that. What they raise is
        kept in ``interruption``; a second time it is raised at once.

        Raises:
            RuntimeError: a rank is gone, or none has answered after ``seconds``.
        """
        if threading.current_thread() is not threading.main_thread():
            return collective()
        done: Future[_T] = Future()
        is_inference = torch.is_inference_mode_enabled()

        def take_part() -> None:
            with unwatched(), torch.inference_mode(mode=is_inference):
                try:
                    done.set_result(collective())
                except BaseException as error:  # noqa: BLE001 - it is who waits that it is for
                    done.set_exception(error)

        thread = threading.Thread(target=take_part, name="penstock-peers", daemon=True)
        try:
            # A signal may come while this waits for the thread to run.
            thread.start()
            return done.result(seconds)
        except FutureTimeoutError:
            if done.done():
                raise
            raise RuntimeError(f"the other ranks did not answer within {seconds} s") from None
        except BaseException as error:
            not_started = thread.ident is None and isinstance(error, RuntimeError)
            if not_started or (done.done() and done.exception() is error) or self.interruption is not None:
                raise
            self.interruption = error
        return done.result(seconds)

    def failure_reasons(self, why: str | None) -> list[str | None]:
        """Why each rank is not well, where one is not; None of one that is.

        Raises:
            RuntimeError: a rank is gone.
        """
        reasons: list[str | None] = [None] * self.size
        distributed.all_gather_object(reasons, why, group=self._control)
        return reasons
