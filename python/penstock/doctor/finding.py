"""A finding: what is wrong, or slower than it need be, with one cause and one remedy.

Text never holds what is private: paths, hosts and names stand in it as ``{mount}`` and are filled in for the owner of
the machine alone. A ticket shows ``<mount>`` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from penstock.doctor.facts import Facts

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One shortfall."""

    code: str
    """For programs. Codes are added to, never renamed; docs/doctor.md lists them."""
    severity: Severity
    """``error``: a load fails. ``warning``: it is slower than it need be. ``note``: worth knowing."""
    cause: str
    remedy: str
    private: dict[str, str] = field(default_factory=dict)

    def said(self, *, anonymous: bool = False) -> tuple[str, str]:
        """Cause and remedy for people."""
        values = {name: f"<{name}>" if anonymous else value for name, value in self.private.items()}
        return _filled(self.cause, values), _filled(self.remedy, values)


def _filled(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


Rule = Callable[[Facts], Finding | None]
"""A pure function of the facts."""
