"""What ``ModelPool.use`` gives: a model that is not evicted for as long as the lease is open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from penstock.pool.pool import Model, ModelPool
    from penstock.pool.residency import Request


class Lease(Mapping[str, "torch.nn.Module"]):
    """A model's components by name. Each can be used as soon as its own bytes have arrived.

    ::

        with pool.use("flux") as m:
            embeddings = m["text_encoder_2"](ids)  # while the transformer is on its way
            m["transformer"](embeddings)

    Tensors of the model are valid until the lease ends, and on the stream that is current then. What outlives it is to
    be cloned. Work that was queued on another stream has to be waited for by the stream that is current at the end.
    """

    def __init__(self, pool: ModelPool, model: Model, request: Request) -> None:
        self.model, self.request = model, request
        self._pool, self._open = pool, True

    def __getitem__(self, component: str) -> torch.nn.Module:
        """The module, once its weights are on the device.

        Raises:
            KeyError: for a component that the model does not have.
            ConfigError: after the lease has ended.
            PenstockError: what loading it failed with.
        """
        if not self._open:
            cause = f"the lease of {self.model.name!r} has ended"
            raise ConfigError(cause=cause, remedy="Use its modules within the with-statement")
        return self._pool.wait_for(self, component)

    def __iter__(self) -> Iterator[str]:
        return iter(self.model.parts)

    def __len__(self) -> int:
        return len(self.model.parts)

    def wait(self) -> Any:
        """Waits for all components. Returns the pipeline or module that was adopted, else the lease."""
        for component in self:
            self[component]
        return self if self.model.whole is None else self.model.whole

    def close(self) -> None:
        """Ends the lease."""
        if self._open:
            self._open = False
            self._pool.end(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
