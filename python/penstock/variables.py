"""The environment variables that Penstock has, and a word about those that it has not.

A variable with a typing error changes nothing and says nothing, so names that begin as Penstock's do and are none are
logged once, when the package is imported. docs/python.md explains the variables; a test holds the two together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

KNOWN = (
    *("PENSTOCK_READERS", "PENSTOCK_BLOCK_BYTES", "PENSTOCK_STAGING_BYTES", "PENSTOCK_WINDOW_BYTES", "PENSTOCK_CACHE"),
    *("PENSTOCK_CACHE_DIR", "PENSTOCK_CACHE_BYTES", "PENSTOCK_VERIFY", "PENSTOCK_TRUST", "PENSTOCK_DISABLE"),
    *("PENSTOCK_LORA_LOCATIONS", "PENSTOCK_TRACE"),
)
"""Every variable that this package or the core under it reads."""

_OTHERS = r"PENSTOCK_TEST_|.*_SERVICE_(HOST|PORT)|.*_PORT(_\d+|$)"
"""Those of Penstock's own tests, and what Kubernetes tells a pod of a service called ``penstock…``."""


def unknown(names: Iterable[str]) -> list[str]:
    """Of the names of variables, those that look like Penstock's and are none."""
    found = sorted(name for name in names if name.startswith("PENSTOCK_") and name not in KNOWN)
    if found:
        import re  # here, as logging below: importing Penstock costs nothing where all is well

        found = [name for name in found if not re.match(_OTHERS, name)]
    return found


def warn() -> None:
    """Logs a line for each variable of this process that has no meaning. Their values are not shown."""
    for name in unknown(os.environ):
        import difflib
        import logging

        nearest = difflib.get_close_matches(name, KNOWN, 1, cutoff=0)[0]
        logging.getLogger(__name__).warning(
            "the environment variable %s means nothing to Penstock: did you mean %s?", name, nearest
        )
