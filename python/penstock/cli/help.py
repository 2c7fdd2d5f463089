"""How help is written: without types that say nothing (``<list[str]>``, ``<bool>``), and one example to a line.

The names of arguments and values (``PATH``, ``SIZE``) say what is meant. Versions of typer differ in both; so neither
is left to them. It knows no command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from penstock.cli.failures import CODES_HELP

if TYPE_CHECKING:
    _Base = TyperCommand
else:
    _Base = object


class _Plain(_Base):
    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)
        for parameter in parameters:
            shown = parameter.metavar if parameter.param_type_name == "option" else None
            vars(parameter)["display_type_rich"] = lambda ctx, shown=shown: shown  # noqa: ARG005 - typer names it
        return parameters

    def format_help(self, ctx: Any, formatter: Any) -> None:
        epilog, self.epilog = self.epilog, None
        try:
            super().format_help(ctx, formatter)
        finally:
            self.epilog = epilog
        Console().print(Padding(Text(epilog or ""), (0, 1)))


class Command(_Plain, TyperCommand):
    """A command with such help."""


class Group(_Plain, TyperGroup):
    """A group of commands with such help."""


def epilog(*examples: str) -> str:
    """What stands below a command's help: examples, and the exit codes."""
    return "\n".join(["Examples:", *(f"  penstock {example}" for example in examples)]) + f"\n\n{CODES_HELP}"
