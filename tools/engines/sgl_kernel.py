"""In the place of SGLang's kernels in the environment that tests run it in, which has no GPU.

SGLang imports names from ``sgl_kernel`` on a CPU too, where that package is to be compiled from its sources; its models
then compute with torch alone. Every name is here, and whatever it names refuses to be called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not in this environment, which has no kernels")

    return absent
