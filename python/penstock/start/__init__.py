"""Starts of engines: what they wait for, files that are brought in ahead of them, compile caches that they find.

* ``steps``: the six steps of a start, and what an engine's log says about them. Pure.
* ``environment``: which engine a command starts, with which Python, and which files it may read.
* ``residency``: which ranges of a file the page cache holds. ``usage``: CPU and disk of a process and its children.
* ``command``: a command as a child, its output passed on, its signals and its exit status.
* ``observe``: all of these together, for ``penstock start-report``. ``hooks`` is for Python programs without log lines.
* ``profile``: what a start reads, in a file. ``prefetch``: bringing it in. ``run``: ``penstock run``.

Linux only. Nothing here imports a framework or an engine, and ``import penstock`` imports nothing of this.
"""
