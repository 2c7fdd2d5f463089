"""What ``ModelPool.use`` gives: a model that is not evicted for as long as the lease is open."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.pool.figures import Stages
from penstock.pool.lock import deferred

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from penstock.pool.model import Model
    from penstock.pool.requests import Requests
    from penstock.pool.turns import Request


logger = logging.getLogger(__name__)


class Lease(Mapping[str, "torch.nn.Module"]):
    """A model's components by name. Each can be used as soon as its own bytes have arrived.

    ::

        with pool.use("flux") as m:
            embeddings = m["text_encoder_2"](ids)  # while the transformer is on its way
            m["transformer"](embeddings)

    Tensors of the model are valid until the lease ends: what outlives it is to be cloned. Its memory is given to nobody
    else before the work is done that was queued by then on the stream that is current at the end, and on those of
    ``record_stream``. The lease belongs to the thread that made it, or entered it.
    """

    def __init__(self, requests: Requests, model: Model, request: Request, ended: Callable[[Lease], object]) -> None:
        self.model, self.request = model, request
        self.stages = Stages()
        """Where its time went so far; ``compute`` is known when it has ended."""
        self._requests, self._ended = requests, ended
        self._process, self._open = os.getpid(), True
        self._began = time.monotonic()

    def __getitem__(self, component: str) -> torch.nn.Module:
        """The module, once its weights are on the device.

        Raises:
            KeyError: for a component that the model does not have.
            ConfigError: after the lease has ended.
            PenstockError: what loading it failed with.
        """
        bound = self.model.bounds[component]
        if not self._open or os.getpid() != self._process:
            cause = f"the lease of {self.model.name!r} has ended, or is another process's"
            raise ConfigError(cause=cause, remedy="Use its modules within the with-statement")
        self._requests.wait_for(bound, self.request, self.stages)
        return bound.module

    def __iter__(self) -> Iterator[str]:
        return iter(self.model.bounds)

    def __len__(self) -> int:
        return len(self.model.bounds)

    def wait(self) -> Any:
        """Waits for all components. Returns the pipeline or module that was adopted, else the lease."""
        for component in self:
            self[component]
        return self if self.model.whole is None else self.model.whole

    def record_stream(self, stream: Any) -> None:
        """Notes a stream that the model is used on, where that is not the one that is current at the end.

        On the CPU there are no streams, and nothing is done.
        """
        if stream is not None and stream not in self.request.streams:
            self.request.streams.append(stream)

    def close(self) -> None:
        """Ends the lease. Calling it twice is fine; in a forked child it does nothing."""
        try:
            self._close()
        except BaseException:
            # Ctrl-C may have come before it began.
            self._close()
            raise

    def _close(self) -> None:
        requests = self._requests
        if os.getpid() != self._process:
            return
        with deferred():
            with requests.changed:
                if not self._open:
                    return
                self._open = False
            requests.end(self.request, self._points())
            waited = self.stages.total - self.stages.queue
            self.stages.compute = max(time.monotonic() - self._began - waited, 0.0)
        self._ended(self)

    def _points(self) -> list[Any]:
        """Work on the device that may still use the model."""
        memory = self._requests.movement.memory
        if self._requests.movement.closed:
            return []
        try:
            points = [memory.now(), *(memory.now(stream) for stream in self.request.streams)]
            if any(bound.is_changed() for bound in self.request.lent):
                # What was written is read next, on another stream.
                memory.wait_for(points)
        except RuntimeError:
            # A stream that is gone, or a device that failed: the lease ends all the same.
            logger.exception("the work of a lease of %s could not be noted, so all work is waited for", self.model.name)
            memory.synchronise()
            return []
        return points

    def __enter__(self) -> Self:
        self.request.thread = threading.get_ident()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
