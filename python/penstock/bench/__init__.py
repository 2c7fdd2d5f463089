"""Measurements of loads: one scheduler, one worker, one schema of results. ``penstock bench`` and ours use it.

``schedule`` draws the order, keeps the budget and ends rows whose interval is narrow; ``files`` and ``rows`` say what
is measured of files, ``loaders`` with what. ``processes`` and ``worker`` carry a task out in a process of its own, and
``measure`` has the clock. ``states``, ``limits``, ``checkpoints`` and ``machine`` are what is measured on; ``result``,
``tables`` and ``bars`` are what comes of it.

Modules import each other relatively: a worker imports the package under another name. Nothing else of Penstock may
import it, and importing it imports none of its modules.
"""
