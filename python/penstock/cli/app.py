"""Options and commands; typer makes the parser and the help of them."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

import penstock
from penstock.cli.failures import handled

app = typer.Typer(
    name="penstock",
    help="Looks into and loads safetensors checkpoints.",
    epilog="Exit codes: 0 well, 1 other, 2 usage, 3 not found, 4 malformed, 5 not readable, 6 storage failed or file "
    "changed, 7 device or memory, 8 impossible setting or selection, 130 interrupted.",
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


Paths = Annotated[
    list[str],
    typer.Argument(help="A file, several, a directory, a glob, a shard index, or a model of a Hugging Face cache."),
]
Filter = Annotated[str | None, typer.Option(help="Only tensors whose names match this pattern (*, ?, [...]).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {penstock.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


@app.command("inspect")
def inspect_command(
    paths: Paths,
    filter: Filter = None,  # noqa: A002 - the option's name
    sort: Annotated[Order, typer.Option(help="Order of the tensors.")] = Order.name,
    limit: Annotated[int, typer.Option(min=0, help="Rows of the table; 0 for all.")] = 50,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a checkpoint holds: tensors, dtypes, shapes, shards, bytes. Reads headers only."""
    with handled(as_json=json, debug=debug):
        from penstock.cli.inspect import inspect

        inspect(paths, pattern=filter, order=sort.value, limit=limit, as_json=json)


@app.command("load")
def load_command(
    paths: Paths,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    filter: Filter = None,  # noqa: A002
    framework: Annotated[str | None, typer.Option(help="pt, np, jax or dlpack; pt where torch is installed.")] = None,
    mmap: Annotated[
        bool, typer.Option("--mmap", help="Map the files and bring their pages in, without a copy.")
    ] = False,
    readers: Annotated[int | None, typer.Option(help="Reader threads; found by itself.")] = None,
    block_bytes: Annotated[int | None, typer.Option(help="Bytes of a block; found by itself.")] = None,
    cache: Annotated[Cache | None, typer.Option(help="Use of the page cache; auto decides by block.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print all figures of the load.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Load a checkpoint for real, and say how long that took."""
    with handled(as_json=json, debug=debug):
        from penstock.cli.load import load

        config = penstock.Config(readers=readers, block_bytes=block_bytes, cache=None if cache is None else cache.value)
        load(paths, device, filter, framework, config, mmap=mmap, stats=stats, quiet=quiet, as_json=json)


def run() -> None:
    """Runs the command line."""
    app()
