"""Who has which component: modules join components and leave them, and components that nobody has are dropped.

Promises that a component stays while a module has it or another one derives from it, and that a master which nothing
could bring back is held. Knows nothing of what moves when. All of it is called with the lock held.
"""

from __future__ import annotations

from penstock.pool.books import Books, State
from penstock.pool.bound import Bound
from penstock.pool.component import Component, Derived
from penstock.pool.memory import Memory
from penstock.pool.twins import Twins


class Members(Books):
    """Components, and the modules that are bound to them."""

    def __init__(self, memory: Memory, host_budget: int, device_budget: int) -> None:
        super().__init__(memory, host_budget, device_budget)
        self._twins = Twins(self)

    def add(self, component: Component) -> None:
        """Enters a component that is nowhere yet."""
        self.states[component] = State()

    def forget(self, component: Component) -> None:
        """Drops a component that nobody holds and nobody waits for."""
        for ledger in (self.device, self.host):
            ledger.forget(component)
        self.vacating.leave_for_good(component)
        component.drop_host()
        self._twins.forget(component)
        del self.states[component]

    def settle_books(self, component: Component) -> None:
        """Takes what never came, and nobody waits for, out of the device's books, and gives its memory back."""
        here = component.is_whole or self.device.is_held(component) or component not in self.device
        if not here:
            for bound in component.bound:
                if bound.home == "device":
                    bound.to(None)
            self.vacating.leave(component, component.arrived)
            self.device.keep(component, component.arrived)

    def idle(self, component: Component) -> None:
        """A component is in nobody's lease any more: it may become one with its twin, or go if no module has it."""
        self.settle_books(component)
        if component.bound or component.derived:
            self._twins.merge_if_idle(component)
        else:
            self._drop_unused(component)

    def find_equal(self, bound: Bound) -> tuple[Component, int] | None:
        """A component with the bytes that a module's tensors have, whose master is held once for the caller, and its
        edits when it was compared.
        """
        return self._twins.find_of(bound)

    def is_as_compared(self, component: Component, edits: int) -> bool:
        """Whether a component has the bytes that it had when it was compared."""
        return self._twins.is_as_compared(component, edits)

    def join(self, bound: Bound, component: Component) -> None:
        """Binds a module to a component, which has a master if the module's is to last."""
        bound.component = component
        component.bound.append(bound)
        if bound.lasting:
            self.host.hold(component, component.nbytes)
        bound.to("host" if component.host is not None else "device" if component.on_device else None)

    def leave_for(self, bound: Bound, component: Component) -> None:
        """Takes a module from its component to another one."""
        old, lasting = bound.component, bound.lasting
        old.bound.remove(bound)
        bound.lasting = lasting and component.host is not None
        self.join(bound, component)
        if lasting:
            self.host.release(old)
        self._drop_unused(old)

    def leave(self, bound: Bound) -> None:
        """Takes a module from its component, which is dropped if nobody else has it. The module keeps its tensors."""
        component = bound.component
        component.bound.remove(bound)
        if bound.lasting:
            self.host.release(component)
        self._drop_unused(component)

    def _drop_unused(self, component: Component) -> None:
        if component.bound or component.derived or self.device.is_held(component):
            # Its model may have left it under a pin, which ends later.
            return
        self.forget(component)
        if isinstance(component.source, Derived):
            base = component.source.of
            base.derived -= 1
            self.host.release(base)
            self._drop_unused(base)

    def derive(self, shared: Component) -> Component:
        """A component that begins as a copy of this one, which stays as long as that one needs it; nowhere yet."""
        source = shared.source
        base = source.of if isinstance(source, Derived) else shared if source is None else None
        if base is not None:
            source = Derived(base)
            base.derived += 1
            self.host.hold(base, base.nbytes)
        own = Component(shared.name, shared.layout, source)
        own.kept = dict(shared.kept)
        own.edits = 1
        self.add(own)
        return own

    def derived_from(self, component: Component) -> list[Component]:
        """Components that begin as copies of this one."""
        found = self.states if component.derived else ()
        return [one for one in found if isinstance(one.source, Derived) and one.source.of is component]
