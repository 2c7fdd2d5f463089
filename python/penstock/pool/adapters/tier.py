"""Where adapters' bytes are: host memory of their own budget, and whole copies on the device beside the pool's books.

Bytes are read on first use. What goes first is told by cost and recency, as for masters. A master never goes for an
adapter. On the device, copies count as bytes that leases want to stay free (``Vacating.reserved``); those of
models that nobody leases go when a model has no room otherwise. Promises exact books after every failure, and that
bytes which are used stay: in host memory within ``in_host``, on the device while their model is leased. Takes the
pool's lock, and reads and copies without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock._native import shown
from penstock.errors import AdapterError, InsufficientMemoryError, LocationChangedError
from penstock.pool.adapters.adapter import Adapter, Branch
from penstock.pool.adapters.fitting import Fitted, fitted
from penstock.pool.adapters.formats import pairs_of
from penstock.pool.adapters.reading import read
from penstock.pool.bound import plain_tensors
from penstock.pool.device_slab import PlainSlab
from penstock.pool.layout import layout_of
from penstock.pool.ledger import Ledger
from penstock.pool.lock import deferred, let_in
from penstock.units import size

if TYPE_CHECKING:
    import torch

    from penstock.pool.model import Model
    from penstock.pool.movement import Movement
    from penstock.pool.turns import Request

logger = logging.getLogger(__name__)


class Tier:
    """The bytes of all adapters of a pool."""

    def __init__(self, movement: Movement, budget: int) -> None:
        self._movement = movement
        self.host = Ledger("host memory for adapters", budget, lambda adapter: adapter.read_seconds)
        self.device: dict[Adapter, int] = {}
        """Bytes on the device, those that were used last at the end."""
        self._held: dict[Adapter, int] = {}
        """By how many a copy on the device is held that no lease has yet."""
        movement.on_short = self.spare

    # Host memory

    @contextmanager
    def in_host(self, adapter: Adapter) -> Iterator[torch.Tensor]:
        """Has an adapter's bytes in host memory, and holds them there.

        Raises:
            AdapterError: where it does not fit its model.
            InsufficientMemoryError: where the budget can never have it.
            LocationChangedError: where it is not what it was at first.
            PenstockError: what reading it fails with.
        """
        with self._movement.changed:
            while adapter.is_busy and not adapter.gone:
                self._movement.changed.wait()
            self._check(adapter)
            self.host.begin_request()
            self.host.touch(adapter)
            is_missing = adapter.host is None
            if is_missing:
                adapter.is_busy = True
            else:
                self.host.hold(adapter, adapter.nbytes)
        if is_missing:
            self._read(adapter)
        try:
            if adapter.host is None:
                raise AssertionError(f"{adapter} is not in host memory")
            yield adapter.host
        finally:
            with self._movement.changed:
                self.host.release(adapter)
                if adapter.gone and not self.host.is_held(adapter):
                    self.host.forget(adapter)
                    adapter.drop_host()
                self._movement.changed.notify_all()

    def _read(self, adapter: Adapter) -> None:
        """Reads an adapter, which is marked as busy. Afterwards it is held, or all is as before."""
        began, is_held = time.monotonic(), False
        try:
            found, version = self._found(adapter)
            with plain_tensors():
                named = [(str(number), half.contiguous()) for number, one in enumerate(found) for half in one[1:]]
                layout = layout_of(named)
                with self._movement.changed:
                    self._check(adapter)
                    self._take_room(adapter, layout.nbytes)
                    is_held = True
                slab = self._movement.memory.host_slab(layout.nbytes)
                for view, (_, half) in zip(layout.views(slab), named, strict=True):
                    view.copy_(half)
            parts = [part for part, _, _ in found]
            for number, part in enumerate(parts):
                part.index = number
        except BaseException:
            with self._movement.changed:
                adapter.is_busy = False
                if is_held:
                    self.host.release(adapter)
                    self.host.keep(adapter)
                self._movement.changed.notify_all()
            raise
        with self._movement.changed:
            adapter.is_busy = False
            adapter.host, adapter.layout, adapter.parts, adapter.version = slab, layout, parts, version
            adapter.nbytes, adapter.read_seconds = layout.nbytes, time.monotonic() - began
            if not adapter.touches:
                for part in parts:
                    adapter.touches.setdefault(part.bound, {})[part.layer] = part.number
            stats = self._movement.stats
            stats.adapters_read += 1
            stats.adapters_read_bytes += layout.nbytes
            self._movement.changed.notify_all()

    def _found(self, adapter: Adapter) -> tuple[list[Fitted], Any]:
        """What an adapter's files hold for its model, and their version."""
        from penstock.checkpoint import open

        location, model = shown(adapter.location), adapter.model
        with let_in():
            checkpoint = open(adapter.location, storage_options=adapter.storage_options)
            version = checkpoint.core.fingerprint()
            if adapter.version is not None and version != adapter.version:
                cause = f"{adapter} is not what it was when it was read first"
                raise LocationChangedError(
                    location=location, cause=cause, remedy="Unload the adapter, and load it again"
                )
            self.host.check_fits(str(adapter), checkpoint.nbytes)
            content = read(checkpoint, adapter.location, adapter.storage_options)
            modules = {of: bound.module for of, bound in model.bounds.items()}
            with plain_tensors():
                pairs = pairs_of(content, location, modules, model.whole)
                found = fitted(pairs, location, model.bounds, component=adapter.component, strict=adapter.strict)
        if len({part.layer for part, _, _ in found}) < len(found):
            raise AdapterError(location=location, cause="it has two pairs of matrices for one layer")
        return found, version

    def _take_room(self, adapter: Adapter, nbytes: int) -> None:
        self.host.check_fits(str(adapter), nbytes)
        while (room := self.host.room_for([(adapter, nbytes)])) is None:
            # Whoever has the rest needs no other room meanwhile.
            self._movement.check_open()
            self._movement.changed.wait()
        for victim, _ in room:
            self.host.keep(victim)
            victim.drop_host()
            logger.info("%s, %s, left host memory: made room for %s", victim, size(victim.nbytes), adapter)
        self.host.hold(adapter, nbytes)

    def shrink(self) -> None:
        """Drops what a lowered budget has no room for, as far as nobody holds it. With the lock held."""
        for victim, _ in self.host.excess():
            self.host.keep(victim)
            victim.drop_host()

    # The device

    @contextmanager
    def on_device(
        self, adapters: Iterable[Adapter], points: list[Any] | None, request: Request | None = None
    ) -> Iterator[None]:
        """Has adapters on the device, and holds them there.

        Args:
            adapters: which, of one model.
            points: the work of this thread's leases of the model, which is changed; None where there are none. Then
                what there is no room for at present is left out: it comes with the next lease.
            request: of a lease that has taken room for them.

        Raises:
            InsufficientMemoryError: where there can be no room.
            PenstockError: as ``in_host``.
        """
        held: list[Adapter] = []
        try:
            for adapter in adapters:
                self._bring(adapter, points, request, held)
            yield
        finally:
            with self._movement.changed:
                for adapter in held:
                    self._held[adapter] -= 1
                    if not self._held[adapter]:
                        del self._held[adapter]
                self._movement.changed.notify_all()

    def _bring(self, adapter: Adapter, points: list[Any] | None, request: Request | None, held: list[Adapter]) -> None:
        """Adds an adapter to those that are held, unless there is no room for it at present."""
        while True:
            with self._movement.changed:
                self._check(adapter)
                if adapter.there:
                    self.device[adapter] = self.device.pop(adapter)
                    self._held[adapter] = self._held.get(adapter, 0) + 1
                    held.append(adapter)
                    return
            with self.in_host(adapter) as host, deferred():
                with self._movement.changed:
                    if adapter.there or adapter in self.device:
                        # Another thread was faster, or is at it.
                        while adapter in self.device and not adapter.there:
                            self._movement.changed.wait()
                        continue
                    if not self._has_room(adapter, points, request):
                        return
                self._copy(adapter, host)

    def _copy(self, adapter: Adapter, host: torch.Tensor) -> None:
        """Copies an adapter to the device, where it was given room."""
        movement = self._movement
        slab = PlainSlab(movement.memory, adapter.nbytes)
        try:
            movement.vacating.make_room()
            movement.give_back()
            with plain_tensors():
                slab.fill(host)
        except BaseException:
            with movement.changed:
                del self.device[adapter]
                movement.vacating.reserved -= adapter.nbytes
                movement.on_moved()
            raise
        with movement.changed:
            adapter.slab = slab
            of = slab.map()
            adapter.there = {part.layer: Branch(*adapter.matrices(part, of), part) for part in adapter.parts}
            movement.stats.adapters_copied_bytes += adapter.nbytes
            movement.changed.notify_all()

    def _has_room(self, adapter: Adapter, points: list[Any] | None, request: Request | None) -> bool:
        """Takes room on the device, with the lock held: that of its request, of adapters which are idle, of models."""
        movement = self._movement
        if request is not None and request.adapters >= adapter.nbytes:
            request.adapters -= adapter.nbytes
            self.device[adapter] = adapter.nbytes
            return True
        movement.device.check_fits(str(adapter), adapter.nbytes)
        while True:
            needed = movement.vacating.reserved + adapter.nbytes
            room = movement.device.room_for([], needed)
            if room is not None:
                break
            if not self.spare(None if points is None else adapter.model, points or ()):
                if points is None and request is None:
                    return False
                cause = f"{adapter} needs {size(adapter.nbytes)} of {movement.memory.device}, and all is in use"
                raise InsufficientMemoryError(cause=cause, remedy="Raise device_budget, or merge adapters")
        for victim, keep in room:
            movement.evict_from_device(victim, f"made room for {adapter}", keep)
        self.device[adapter] = adapter.nbytes
        movement.vacating.reserved += adapter.nbytes
        return True

    def spare(self, changing: Model | None = None, points: Iterable[Any] = ()) -> bool:
        """Drops the copy on the device that was used longest ago and that no lease has. If the only one who leases a
        model changes it, its copies may go too, after these points. With the lock held. Says whether there was one.
        """
        for adapter in list(self.device):
            model = adapter.model
            is_set = any(one is adapter for one, _ in model.adapters.chosen.weights)
            is_leased = is_set and any(bound.leases for bound in model.modules)
            if not adapter.there or adapter in self._held or (is_leased and model is not changing):
                continue
            self.leave_device(adapter, points if model is changing else ())
            return True
        return False

    def leave_device(self, adapter: Adapter, points: Iterable[Any] = ()) -> None:
        """Drops an adapter's copy on the device, if there is one, after the work of leases. With the lock held."""
        slab, nbytes = adapter.slab, self.device.get(adapter, 0)
        if slab is None or not adapter.there:
            return
        adapter.slab, adapter.there = None, {}
        of_leases = [point for bound in adapter.touches for point in bound.points or ()]
        slab.evict([*of_leases, *points])
        del self.device[adapter]
        self._movement.vacating.reserved -= nbytes

    def leave(self, adapter: Adapter, *, host: bool) -> None:
        """Drops an adapter's copy on the device, and in host memory too, unless it is held. With the lock held."""
        if adapter not in self._held:
            self.leave_device(adapter)
        if host and adapter in self.host and not self.host.is_held(adapter):
            self.host.keep(adapter)
            adapter.drop_host()

    def forget(self, adapter: Adapter) -> None:
        """Drops an adapter for good, with the lock held. Who reads it is told."""
        adapter.gone = True
        self.leave_device(adapter)
        if not self.host.is_held(adapter):
            self.host.forget(adapter)
            adapter.drop_host()

    # For those who add them

    def sent(self, host: torch.Tensor) -> torch.Tensor:
        """An adapter's bytes on the device, for a moment."""
        memory = self._movement.memory
        if not memory.is_gpu:
            return host
        slab = memory.device_slab(host.numel())
        memory.to_device(slab, host)
        return slab

    def _check(self, adapter: Adapter) -> None:
        self._movement.check_open()
        if adapter.gone:
            raise AdapterError(cause=f"{adapter} was unloaded meanwhile")
