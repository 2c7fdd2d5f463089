"""Why the extension module is not there: the system, the kind of Python, or a clone that was not built.

This module imports nothing of Penstock.
"""

from __future__ import annotations

import os
import sys
import sysconfig

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - as in penstock.namesake


def missing(error: ModuleNotFoundError, package: str = _HERE) -> ImportError:
    """``error`` in words that say what to do, if it is the extension that it misses."""
    if error.name != "penstock._native":
        return error
    if not sys.platform.startswith("linux"):
        says = f"Penstock runs on Linux only, and this is {sys.platform!r}. On Windows, use WSL 2"
    elif any(name.startswith("_native.") and name.endswith(".so") for name in os.listdir(package)):  # noqa: PTH208
        kind = "free-threaded Python" if sysconfig.get_config_var("Py_GIL_DISABLED") else "Python"
        says = (
            f"{package} was installed for another Python than this {kind} {sys.version.split()[0]}: "
            "pip install --force-reinstall --no-deps penstock-loader"
        )
    else:
        says = f"{package} has no extension module: in a clone, run `make build`, which needs Rust"
    return ImportError(says, name="penstock")
