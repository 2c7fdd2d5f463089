"""Measurements of loads: one scheduler, one worker, one schema of results. Needs no repository around it.

``cli`` is the command. ``experiments`` say what is compared, ``loaders`` with what; ``schedule`` draws the order and
keeps the budget, ``processes`` and ``worker`` carry a task out in a process of its own, ``measure`` has the clock.
``states``, ``limits``, ``checkpoints``, ``servers`` and ``machine`` are what is measured on; ``result`` and ``report``
are what comes of it. Modules import each other relatively, so the package can be moved.
"""
