"""Suggestions for URLs at which nothing is: what lies beside them.

Asking costs a request, so it is done where an error is on its way to a person, and not where the next name is tried.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock import _native
from penstock.arguments import is_url
from penstock.errors import LocationNotFoundError


def with_neighbours(
    error: LocationNotFoundError, paths: Iterable[str], storage: list[tuple[str, str]] | None
) -> LocationNotFoundError:
    """The same, with what is most like a URL at which nothing is; of files of this machine, the core has said it."""
    missing = next((path for path in paths if is_url(path) and _native.shown(path) == error.location), None)
    if missing is None or "holds" in (error.remedy or ""):
        return error
    remedy = _native.remedy_for_missing(missing, storage)
    if remedy is None:
        return error
    return LocationNotFoundError(
        location=error.location, cause=error.cause, remedy=remedy, code=error.code, details=error.details
    )
