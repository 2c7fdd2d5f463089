"""Models that share a device: host masters, residency under a budget, leases.

* ``pool``: ``ModelPool``; ``catalogue``: how models come in and go; ``model``: what a name stands for.
* ``default``: the process's own pool. ``lease``: what ``ModelPool.use`` gives.
* ``requests``: what waits for room, and how it ends; ``turns``: in which order it is granted.
* ``movement``: fetching masters and copying them to the device, on the threads of ``worker``. Layers of what it moves:
  ``masters``: host copies of what was read to the device; ``departures``: eviction;
* ``vacating``: memory that is out of the books and still to be unmapped. ``lock``: the lock, and when Ctrl-C comes.
* ``twins``: components of equal bytes become one; ``changes``: writes to weights; ``adopting``: modules with weights.
* ``component``: tensors that travel together; ``bound``: the modules that have them; ``making``: how both come to be.
* ``registering``: what ``register`` was given, as a checkpoint and a module for each component; ``single_file``: of one
  file that holds a whole model.
* ``quantised``: components whose linear layers have float8 weights.
* ``ledger``: bytes against a budget, holds, and what to evict. ``workspace``: what runs need besides. Both are pure.
* ``layout``: where the tensors of a module lie in one slab; ``memory``, ``device_slab``: slabs, and copies to them.
* ``overlay``: what a copy on the device has beside its master; ``adapters``: LoRA of models.
* ``late_use``: what the debug mode finds.
* ``figures``: what people and metrics get to know.
"""

from penstock.pool.default import default_pool
from penstock.pool.figures import Explanation, PoolStats, Residence, Stages
from penstock.pool.lease import Lease
from penstock.pool.pool import ModelPool

__all__ = ["Explanation", "Lease", "ModelPool", "PoolStats", "Residence", "Stages", "default_pool"]
