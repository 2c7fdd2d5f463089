"""Bytes for people, who write and read them with units."""

from __future__ import annotations

import re

_DECIMAL = ("B", "kB", "MB", "GB", "TB")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def size(nbytes: float, *, binary: bool = False) -> str:
    """``nbytes`` with three or four digits: ``4.98 GB``, or ``2 MiB`` where powers of two are meant."""
    base, units = (1024, _BINARY) if binary else (1000, _DECIMAL)
    value, unit = float(nbytes), 0
    # Half of the last digit shown less than the base: 999,999 bytes are 1 MB, not 1000 kB.
    while value >= base - 0.5 and unit < len(units) - 1:
        value /= base
        unit += 1
    digits = 0 if unit == 0 else 2 if value < 10 else 1 if value < 100 else 0  # noqa: PLR2004
    number = f"{value:.{digits}f}"
    return f"{number.rstrip('0').rstrip('.') if binary and '.' in number else number} {units[unit]}"


def size_meant(text: str) -> int | None:
    """The bytes of ``4194304``, ``4MiB`` or ``4M`` (powers of 1024), ``4MB`` (of 1000), in any case; else None."""
    match = re.fullmatch(r"([0-9]+)\s*(?:([kmgt])(ib|b)?|b)?", text.strip().lower())
    if match is None:
        return None
    base = 1000 if match[3] == "b" else 1024
    nbytes: int = int(match[1]) * base ** " kmgt".index(match[2] or " ")
    return nbytes


def rate(nbytes: float, seconds: float) -> str:
    """So many bytes in so many seconds: ``4.98 GB/s``."""
    return f"{size(nbytes / seconds if seconds > 0 else 0)}/s"
