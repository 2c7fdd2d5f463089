"""Tensor libraries: how each adopts host memory, allocates destinations, and names dtypes and devices.

* ``base``: the interface. ``torch``, ``numpy``, ``dlpack``: one module each, imported when asked for.
"""

from __future__ import annotations

from penstock.frameworks.base import Framework, framework

__all__ = ["Framework", "framework"]
