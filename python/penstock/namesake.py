"""Another project's distribution called ``penstock``, whose import name is the same.

Two distributions that own one import name overwrite each other's files, and removing either breaks the other. So where
both are installed, importing says so before anything fails in stranger ways. This module imports nothing of Penstock.
"""

from __future__ import annotations

import os

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would be a third of the import


def refuse(site: str = os.path.dirname(_HERE)) -> None:  # noqa: PTH120
    """Looks at what is installed beside this package.

    Raises:
        ImportError: the distribution ``penstock`` is there too.
    """
    try:
        installed = os.listdir(site)  # noqa: PTH208
    except OSError:  # in an archive, say
        return
    for name in installed:
        if name.startswith("penstock-") and name.endswith((".dist-info", ".egg-info")):
            raise ImportError(
                f"another project's distribution {name.rpartition('.')[0]!r} is installed in {site}, beside "
                "penstock-loader: both own the import name 'penstock'. Uninstall both, then install the one you want: "
                "pip uninstall -y penstock penstock-loader; pip install penstock-loader",
                name="penstock",
            )
