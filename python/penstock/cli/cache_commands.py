"""The commands of ``penstock cache`` and their options. What they do is in ``cache``."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.failures import handled
from penstock.cli.help import Command, Group, epilog
from penstock.cli.options import Debug, Json, argument, completed_paths, parse_size

cache_app = typer.Typer(
    name="cache",
    cls=Group,
    help="Look after the disk cache behind object stores.",
    epilog=epilog("cache ls", "cache rm 's3://bucket/old-model/*'", "cache prune --bytes 200GiB"),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
CacheDirectory = Annotated[
    str | None,
    typer.Option(
        "--cache-dir",
        metavar="DIRECTORY",
        help="The cache's directory (PENSTOCK_CACHE_DIR).",
        autocompletion=completed_paths,
    ),
]
Locations = Annotated[
    list[str] | None,
    argument(metavar="PATTERN", help="Entries whose location matches (*, ?, [...]), or of that name."),
]


@cache_app.command("ls", cls=Command, epilog=epilog("cache ls", "cache ls 's3://bucket/model/*'"))
def cache_ls_command(
    patterns: Locations = None, cache_dir: CacheDirectory = None, json: Json = False, debug: Debug = False
) -> None:
    """List what is cached: location, size, how much of it is there, when it was used last."""
    with handled(as_json=json, debug=debug):
        from penstock.cli import cache

        cache.ls(cache.directory_of(cache_dir), patterns or [], json=json)


@cache_app.command("verify", cls=Command, epilog=epilog("cache verify", "cache verify 'hf://org/name*'"))
def cache_verify_command(
    patterns: Locations = None, cache_dir: CacheDirectory = None, json: Json = False, debug: Debug = False
) -> None:
    """Compare what is cached with its checksums. What is damaged is fetched again by the next load."""
    with handled(as_json=json, debug=debug):
        from penstock.cli import cache

        cache.verify(cache.directory_of(cache_dir), patterns or [], json=json)


@cache_app.command("rm", cls=Command, epilog=epilog("cache rm 's3://bucket/old-model/*'", "cache rm '*'"))
def cache_rm_command(
    patterns: Annotated[
        list[str],
        argument(metavar="PATTERN", help="Entries whose location matches (*, ?, [...]), or of that name."),
    ],
    cache_dir: CacheDirectory = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove entries. Those that a load uses stay."""
    with handled(as_json=json, debug=debug):
        from penstock.cli import cache

        cache.rm(cache.directory_of(cache_dir), patterns, json=json)


@cache_app.command("prune", cls=Command, epilog=epilog("cache prune --bytes 200GiB"))
def cache_prune_command(
    nbytes: Annotated[
        int, typer.Option("--bytes", parser=parse_size, metavar="SIZE", help="What may stay, such as 200GiB.")
    ],
    cache_dir: CacheDirectory = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove entries, those used longest ago first, until the rest fits."""
    with handled(as_json=json, debug=debug):
        from penstock.cli import cache

        cache.prune(cache.directory_of(cache_dir), nbytes, json=json)
