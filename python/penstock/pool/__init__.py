"""Models that share a device: host masters, residency under a budget, leases.

* ``layout``: where the tensors of a module lie in one slab, and views of them.
* ``memory``: slabs of the host and of a device, and copies between them.
* ``component``: a module's tensors, its master, its copy on the device, and who is bound to them.
* ``ledger``: the books: bytes against budgets, leases, and what to evict. Pure.
* ``pool``: ``ModelPool``: requests in their order, loading, switching.
* ``lease``: what ``ModelPool.use`` gives.
"""

from penstock.pool.lease import Lease
from penstock.pool.pool import ModelPool

__all__ = ["Lease", "ModelPool"]
