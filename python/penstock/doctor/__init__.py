"""``penstock doctor``: what limits loads here, how long one will take, and what to do about it.

* ``diagnosis``: gathers ``Facts`` and judges them. ``facts``: what is known.
* ``tree``, ``machine``, ``engines``, ``network``: where facts come from. ``limits``, ``probes``: what is measured;
  ``prediction``: how long a load takes.
* ``finding``, ``storage_rules``, ``machine_rules``, ``network_rules``: pure functions from facts to findings.
* ``report``: a diagnosis for programs, and for a ticket.

Importing this package imports nothing of it: benchmarks use ``limits`` alone.
"""
