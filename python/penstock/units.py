"""Bytes for people, who write and read them with units."""

from __future__ import annotations

from penstock._native import size_meant

__all__ = ["rate", "size", "size_meant"]

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


def rate(nbytes: float, seconds: float) -> str:
    """So many bytes in so many seconds: ``4.98 GB/s``."""
    return f"{size(nbytes / seconds if seconds > 0 else 0)}/s"
