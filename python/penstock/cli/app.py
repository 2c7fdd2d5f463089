"""Commands and their options; typer makes the parser and the help of them.

Nothing heavy is imported before a command runs, so that ``--help`` and ``--version`` are immediate.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Annotated

import typer

import penstock
from penstock.cli.failures import CODES_HELP, handled

app = typer.Typer(
    name="penstock",
    help="Look into safetensors checkpoints, load them, and bring them here.",
    epilog=CODES_HELP,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Order(str, Enum):
    """How ``inspect`` sorts."""

    name = "name"
    offset = "offset"
    size = "size"


class Cache(str, Enum):
    """``Config.cache``."""

    auto = "auto"
    use = "use"
    bypass = "bypass"
    populate = "populate"


_UNITS = {"": 1, "B": 1, "K": 1 << 10, "KiB": 1 << 10, "M": 1 << 20, "MiB": 1 << 20, "G": 1 << 30, "GiB": 1 << 30}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: str) -> int:
    """Bytes, as the environment variables spell them: ``4194304``, ``4MiB``, ``4M`` or ``4MB`` (1e6)."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS:
        raise typer.BadParameter(f"{text!r} is not a size in bytes such as 4194304 or 4MiB")
    return int(match[1]) * _UNITS[match[2]]


Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH",
        help="A file, several, a directory, a quoted glob, a shard index, or a model of a Hugging Face cache.",
        show_default=False,
    ),
]
_SELECTION = "Selection"
_SETTINGS = "Settings (found by themselves when left out)"

Filter = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        help="Only tensors whose names match (*, ?, [...]). Repeat for more.",
        rich_help_panel=_SELECTION,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, errors too.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {penstock.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


@app.command("inspect", epilog=CODES_HELP)
def inspect_command(
    paths: Paths,
    filter: Filter = None,  # noqa: A002 - the option's name
    sort: Annotated[Order, typer.Option(help="By name, by place in the files, or the largest first.")] = Order.name,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="Rows of the table; 0 for all.")] = 50,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a checkpoint holds: tensors, dtypes, shapes, files. Reads headers only.

    Of a prefix on an object store without a checkpoint directly in it: the objects and prefixes that are there.
    """
    with handled(as_json=json, debug=debug):
        from penstock.cli.inspect import inspect

        inspect(paths, filter or [], sort.value, limit, json=json)


@app.command("load", epilog=CODES_HELP)
def load_command(
    paths: Paths,
    names: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this tensor. Repeat for more.", rich_help_panel=_SELECTION),
    ] = None,
    filter: Filter = None,  # noqa: A002
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.")] = "cpu",
    framework: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="pt, np, jax or dlpack (pt where torch is installed, else np)."),
    ] = None,
    mmap: Annotated[bool, typer.Option("--mmap", help="Map the files and bring all pages in; cpu only.")] = False,
    readers: Annotated[
        int | None, typer.Option(metavar="N", help="Threads that read.", rich_help_panel=_SETTINGS)
    ] = None,
    block_bytes: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="What is read at once, such as 4194304 or 4MiB.",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    cache: Annotated[
        Cache | None,
        typer.Option(help="Use of the page cache; auto decides block by block.", rich_help_panel=_SETTINGS),
    ] = None,
    cache_dir: Annotated[
        str | None,
        typer.Option(metavar="DIRECTORY", help="Keep what comes over the network here.", rich_help_panel="Disk cache"),
    ] = None,
    cache_bytes: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="At most so much of it (80 % of what the disk has free).",
            rich_help_panel="Disk cache",
        ),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print all figures of the load.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress bar.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Load a checkpoint for real, and say how long that took."""
    with handled(as_json=json, debug=debug):
        from penstock.cli.load import Wish, load

        config = penstock.Config(
            readers=readers,
            block_bytes=block_bytes,
            cache=cache.value if cache else None,
            cache_dir=cache_dir,
            cache_bytes=cache_bytes,
        )
        wish = Wish(paths, names or [], filter or [], device, framework, mmap, config)
        load(wish, stats=stats, quiet=quiet, json=json)


@app.command("pull", epilog=CODES_HELP)
def pull_command(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="A prefix of an object store, a repository (hf://org/name[@revision]), or one object.",
            show_default=False,
        ),
    ],
    directory: Annotated[
        str,
        typer.Argument(metavar="DIRECTORY", help="Where the files go; made where it is missing.", show_default=False),
    ],
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Only objects whose paths match (* also matches slashes). Repeat for more."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Leave out objects whose paths match. Repeat for more.")
    ] = None,
    readers: Annotated[int | None, typer.Option(metavar="N", help="Requests in flight (32).")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress bar.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Bring remote objects to a directory. What is there already stays; what was cut off goes on where it stopped."""
    with handled(as_json=json, debug=debug):
        from penstock.cli.pull import Wish, pull

        wish = Wish(url, directory, allow or None, ignore or [], penstock.Config(readers=readers))
        pull(wish, quiet=quiet, json=json)
