"""What must hold of a pool whenever nothing is on its way: for the tests to check after every operation."""

from __future__ import annotations

from collections import Counter

from penstock.pool import ModelPool


def settle(pool: ModelPool) -> None:
    """Waits for masters, which are made behind a request, and for their comparison."""
    pool._requests.settle(list(pool._movement.states))


def check_books(pool: ModelPool) -> None:
    """That books, slabs, leases and bindings agree."""
    movement, requests = pool._movement, pool._requests
    with movement.changed:
        settle(pool)
        for component in movement.states:
            there = 0 if component.slab is None or component.slab.tensor is None else component.slab.device_bytes
            assert component.arrived <= there or not component.nbytes, component
            held = movement.device.is_held(component)
            granularity = 1 if component.slab is None else component.slab.granularity
            counted = movement.device.bytes_of(component) + movement.vacating.bytes_of(component.slab)
            assert there <= -(-counted // granularity) * granularity, component
            assert movement.device.bytes_of(component) == (component.nbytes if held else component.arrived), component
            assert movement.host.bytes_of(component) == (component.nbytes if component.host is not None else 0)
        for ledger in (movement.device, movement.host):
            assert set(ledger) <= movement.states.keys()
            assert ledger.used <= max(ledger.budget, ledger.held)
        check_adapters(pool)
        beside = sum(pool._tier.device.values())
        assert movement.vacating.reserved == sum(one.workspace for one in requests.granted) + beside
        assert not any(one.adapters for one in requests.granted)
        granted = Counter(component for one in requests.granted for component in one.held)
        bases = Counter(one.source.of for one in movement.states if hasattr(one.source, "of"))
        models = [bound for model in pool._models.values() for bound in model.modules]
        lent = Counter(bound for one in requests.granted for bound in one.lent)
        assert Counter(bound for component in movement.states for bound in component.bound) == Counter(models)
        for component in movement.states:
            assert component.bound or component.derived or granted[component], component
            assert movement.device.holds(component) == granted[component], component
            lasting = sum(bound.lasting for bound in component.bound)
            assert movement.host.holds(component) == lasting + bases[component], component
            assert component.derived == bases[component]
        for bound in models:
            component = bound.component
            assert bound.leases == lent[bound]
            device = bound.leases if component.host is not None else True
            home = "device" if device and component.on_device else "host" if component.host is not None else None
            # What failed to come, or was written to by another lease's model, has nothing.
            assert bound.home == home or bound.home is None, (bound.home, home)
            for tensor in bound.tensors:
                assert tensor.is_meta == (bound.home is None)


def check_adapters(pool: ModelPool) -> None:
    """That what adapters have is what is counted of them, and that what they are merged into is known to be so."""
    tier, movement = pool._tier, pool._movement
    known = [one for model in pool._models.values() for one in model.adapters.by_name.values()]
    assert set(tier.host) == {one for one in known if one.host is not None}
    assert set(tier.device) == {one for one in known if one.there}
    assert tier.host.used <= tier.host.budget
    for adapter in known:
        assert not adapter.is_busy
        assert not adapter.gone
        assert tier.host.holds(adapter) == 0
        assert (adapter.slab is not None) == bool(adapter.there)
        if adapter.host is not None:
            assert tier.host.bytes_of(adapter) == adapter.nbytes == adapter.host.numel()
        if adapter.slab is not None:
            assert tier.device[adapter] == adapter.slab.device_bytes == adapter.slab.filled
    assert not tier._held
    for model in pool._models.values():
        chosen = {adapter for adapter, _ in model.adapters.chosen.weights}
        assert chosen <= set(model.adapters.by_name.values())
        for bound, branches in model.adapters.branches.items():
            assert {adapter for adapter, _ in branches.active} <= chosen
            if bound.leases:
                assert all(adapter.there for adapter, _ in branches.active)
    for component in movement.states:
        if component.overlay is not None:
            assert len(component.bound) == 1, component
            assert not component.derived, component
            assert not component.overlay.is_empty, component
