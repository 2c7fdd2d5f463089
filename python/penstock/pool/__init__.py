"""Models that share a device: host masters, residency under a budget, leases.

* ``pool``: ``ModelPool``; ``default``: the process's own; ``model``: what a name in it stands for.
* ``lease``: what ``ModelPool.use`` gives.
* ``requests``: who gets room on the device, in which order.
* ``movement``: fetching masters, copying them to the device, evicting, on the threads of ``worker``.
* ``twins``: components of equal bytes become one; ``changes``: writes to weights; ``adopting``: modules with weights.
* ``component``: tensors that travel together; ``bound``: the modules that have them; ``making``: how both come to be.
* ``ledger``: the books: bytes against budgets, holds, and what to evict. ``workspace``: what runs need besides. Pure.
* ``layout``: where the tensors of a module lie in one slab; ``slab``, ``memory``: slabs, and copies between them.
* ``figures``: what people and metrics get to know.
"""

from penstock.pool.default import default_pool
from penstock.pool.figures import Explanation, PoolStats, Residence, Stages
from penstock.pool.lease import Lease
from penstock.pool.pool import ModelPool

__all__ = ["Explanation", "Lease", "ModelPool", "PoolStats", "Residence", "Stages", "default_pool"]
