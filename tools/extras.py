"""Prints the requirements of extras of pyproject.toml, one to a line, for pip: ``python tools/extras.py test lint``.

``pip install .[test]`` would build the package once more; the Makefile has built it already.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def requirements(extra: str) -> list[str]:
    """The requirements of one extra. (``tomllib`` would do, but Python 3.10 has none.)"""
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    section = text.split("[project.optional-dependencies]", 1)[1].split("\n[", 1)[0]
    found = re.search(rf"^{re.escape(extra)} = \[(.*?)\]$", section, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"pyproject.toml has no extra {extra!r}")
    return re.findall(r'"([^"]+)"', found[1])


if __name__ == "__main__":
    for extra in sys.argv[1:]:
        sys.stdout.writelines(requirement + "\n" for requirement in requirements(extra))
