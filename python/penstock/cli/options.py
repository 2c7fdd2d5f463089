"""What several commands take: options and arguments, and how they are parsed. Knows no command."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from glob import escape, glob
from typing import Annotated, Any

import typer

from penstock.errors import ConfigError
from penstock.units import size_meant


def one_of(words: tuple[str, ...], option: Callable[..., Any], meaning: str) -> Any:
    """An option that is one of these words."""

    def parse(text: str) -> str:
        if text not in words:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(words)}.")
        return text

    return option(parser=parse, metavar="|".join(words), help=meaning)


def parse_device(text: str) -> str:
    """``cpu``, ``cuda`` or ``cuda:N``. Whether it is there, the load will say."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", text):
        return text
    raise typer.BadParameter(f"{text!r} is not a device. Give cpu or cuda:N.")


def storage_options(given: list[str] | None) -> dict[str, str] | None:
    """The options of ``--storage-option KEY=VALUE``. Errors do not repeat what was written: it may be secret.

    Raises:
        ConfigError: for what has no ``=``, or nothing before it.
    """
    if not given:
        return None
    pairs = [text.partition("=") for text in given]
    if any(not name.strip() or not mark for name, mark, _ in pairs):
        cause, remedy = "--storage-option takes KEY=VALUE", "Write --storage-option endpoint_url=http://host:9000"
        raise ConfigError(cause=cause, remedy=remedy)
    return {name.strip(): value for name, _, value in pairs}


def completed_paths(incomplete: str) -> list[str]:
    """Paths that begin so, directories with a slash: a shell asks for them when the tab key is pressed."""
    found = glob(f"{escape(os.path.expanduser(incomplete))}*")  # noqa: PTH111, PTH207 - text as it was typed
    return sorted(f"{path}/" if os.path.isdir(path) else path for path in found)  # noqa: PTH112


def parse_count(text: object) -> int:
    """A number of things, 0 or more; typer gives defaults too, which are numbers already."""
    if re.fullmatch(r"\d{1,9}", str(text)):
        return int(str(text))
    raise typer.BadParameter(f"{text!r} is not a number of 0 or more.")


def parse_size(text: str) -> int:
    """Bytes, as people and the environment variables write them."""
    nbytes = size_meant(text)
    if nbytes is None:
        raise typer.BadParameter(f"{text!r} is not a size in bytes such as 4194304, 4MiB or 500GB")
    return nbytes


argument = partial(typer.Argument, show_default=False)
Paths = Annotated[
    list[str],
    argument(
        metavar="PATH",
        help="A file, several, a directory, a quoted glob, a shard index, or a model of a Hugging Face cache; or a "
        "URL: s3://, gs://, az://, abfss://, https://, hf://org/name\\[@revision].",
        autocompletion=completed_paths,
    ),
]
flag = partial(typer.Option, metavar="")
"""An option that takes no value."""
selection = partial(typer.Option, rich_help_panel="Selection")
setting = partial(typer.Option, rich_help_panel="Settings (found by themselves when left out)")
disk_cache = partial(typer.Option, rich_help_panel="Disk cache")

Filter = Annotated[
    list[str] | None, selection(metavar="GLOB", help="Only tensors whose names match (*, ?, [...]). Repeat for more.")
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="Credentials, endpoint or setting of the remote store, by its name in s3fs, gcsfs, adlfs or object_store. "
        "Repeat for more. Other users of the machine can see a command line: secrets are safer in the environment.",
        rich_help_panel="Remote store",
    ),
]
Json = Annotated[bool, flag("--json", help="Print JSON on stdout, errors too.")]
Debug = Annotated[bool, flag("--debug", help="Show the traceback of an error.")]


def _log(wanted: bool) -> None:
    if wanted:
        import logging

        logging.basicConfig(format="%(name)s: %(message)s")  # on stderr
        logging.getLogger("penstock").setLevel(logging.DEBUG)


Verbose = Annotated[
    bool,
    flag("--verbose", "-v", callback=_log, help="Log what is opened and loaded, and retries, on stderr."),
]
