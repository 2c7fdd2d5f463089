"""Engines: Penstock in the programs and libraries that run models.

* ``vllm``: ``--load-format penstock``.

Nothing is imported here: each module needs its library, and says so.
"""
