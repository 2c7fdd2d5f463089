"""Commands and their options; typer makes the parser and the help of them.

Nothing heavy is imported before a command runs, so that ``--help`` and ``--version`` are immediate.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import partial
from glob import escape, glob
from typing import Annotated, Any

import typer

import penstock
from penstock.arguments import is_url
from penstock.cli import starting
from penstock.cli.failures import handled
from penstock.cli.help import Command, Group, epilog
from penstock.errors import ConfigError
from penstock.units import size_meant

app = typer.Typer(
    name="penstock",
    cls=Group,
    help="Inspect, load and download safetensors checkpoints.",
    epilog=epilog("inspect model.safetensors", "load hf://org/name --stats", "pull s3://bucket/model/ models/model"),
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


ORDERS = ("name", "offset", "size")
POLICIES = ("auto", "use", "bypass", "populate")
"""``LoadOptions.cache``."""
VERIFY = ("auto", "require", "off")
"""``LoadOptions.verify``."""


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


def check_remote(text: str) -> None:
    """What is on this machine need not be fetched.

    Not for an argument's parser, which would complain before the next argument is missed.

    Raises:
        BadParameter: for what is no URL.
    """
    if "://" not in text:
        named = f" For the hub's, write hf://{text}." if re.fullmatch(r"\w[\w.-]*/[\w.-]+", text) else ""
        raise typer.BadParameter(
            f"This is not a URL such as s3://bucket/model/ or hf://org/name: only remote objects are pulled.{named}",
            param_hint="'URL'",
        )


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


_argument = partial(typer.Argument, show_default=False)
Paths = Annotated[
    list[str],
    _argument(
        metavar="PATH",
        help="A file, several, a directory, a quoted glob, a shard index, or a model of a Hugging Face cache; or a "
        "URL: s3://, gs://, az://, abfss://, https://, hf://org/name\\[@revision].",
        autocompletion=completed_paths,
    ),
]
_PATHS = ("model.safetensors", "s3://bucket/llama-3-8b/", "hf://openai-community/gpt2")

_flag = partial(typer.Option, metavar="")
"""An option that takes no value."""
_selection = partial(typer.Option, rich_help_panel="Selection")
_setting = partial(typer.Option, rich_help_panel="Settings (found by themselves when left out)")
_disk_cache = partial(typer.Option, rich_help_panel="Disk cache")

Filter = Annotated[
    list[str] | None, _selection(metavar="GLOB", help="Only tensors whose names match (*, ?, [...]). Repeat for more.")
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
Json = Annotated[bool, _flag("--json", help="Print JSON on stdout, errors too.")]
Debug = Annotated[bool, _flag("--debug", help="Show the traceback of an error.")]


def _log(wanted: bool) -> None:
    if wanted:
        import logging

        logging.basicConfig(format="%(name)s: %(message)s")  # on stderr
        logging.getLogger("penstock").setLevel(logging.DEBUG)


Verbose = Annotated[
    bool,
    _flag("--verbose", "-v", callback=_log, help="Log what is opened and loaded, and retries, on stderr."),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {penstock.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, _flag("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


@app.command("inspect", cls=Command, epilog=epilog(*(f"inspect {path}" for path in _PATHS)))
def inspect_command(
    paths: Paths,
    filter: Filter = None,  # noqa: A002 - the option's name
    sort: Annotated[
        str, one_of(ORDERS, typer.Option, "By name, by place in the files, or the largest first.")
    ] = "name",
    limit: Annotated[
        int, typer.Option("--limit", "-n", parser=parse_count, metavar="N", help="Rows of the table; 0 for all.")
    ] = 50,
    storage_option: StorageOption = None,
    verbose: Verbose = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a checkpoint holds: tensors, dtypes, shapes, files. Reads headers only.

    Of a prefix on an object store without a checkpoint directly in it: the objects and prefixes that are there.
    """
    del verbose  # its callback has done it
    with handled(as_json=json, debug=debug):
        from penstock.cli.inspect import inspect

        inspect(paths, filter or [], sort, limit, json=json, options=storage_options(storage_option))


@app.command("load", cls=Command, epilog=epilog(*(f"load {path}" for path in _PATHS)))
def load_command(
    paths: Paths,
    names: Annotated[list[str] | None, _selection(metavar="NAME", help="Only this tensor. Repeat for more.")] = None,
    filter: Filter = None,  # noqa: A002
    device: Annotated[
        str, typer.Option("--device", parser=parse_device, metavar="DEVICE", help="cpu, cuda or cuda:N.")
    ] = "cpu",
    framework: Annotated[
        str | None, typer.Option(metavar="NAME", help="pt, np, jax or dlpack (pt where torch is installed, else np).")
    ] = None,
    mmap: Annotated[bool, _flag("--mmap", help="Map the files and bring all pages in; cpu only.")] = False,
    readers: Annotated[int | None, _setting(parser=parse_count, metavar="N", help="Threads that read.")] = None,
    block_bytes: Annotated[
        int | None, _setting(parser=parse_size, metavar="SIZE", help="What is read at once, such as 4194304 or 4MiB.")
    ] = None,
    cache: Annotated[
        str | None, one_of(POLICIES, _setting, "Use of the page cache; auto decides block by block.")
    ] = None,
    cache_dir: Annotated[
        str | None,
        _disk_cache(metavar="DIRECTORY", help="Keep what comes over the network here.", autocompletion=completed_paths),
    ] = None,
    cache_bytes: Annotated[
        int | None,
        _disk_cache(parser=parse_size, metavar="SIZE", help="At most so much of it (80 % of what the disk has free)."),
    ] = None,
    verify: Annotated[
        str | None, one_of(VERIFY, _setting, "Compare what is read with a manifest; auto where there is one.")
    ] = None,
    storage_option: StorageOption = None,
    stats: Annotated[bool, _flag("--stats", help="Print what was read, from where, and what limited it.")] = False,
    all_stats: Annotated[bool, _flag("--all-stats", help="Print every figure, those that are zero too.")] = False,
    verbose: Verbose = False,
    quiet: Annotated[bool, _flag("--quiet", "-q", help="Show no progress bar.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Load a checkpoint into memory, and say how long that took."""
    with handled(as_json=json, debug=debug):
        from penstock.cli.load import load

        options = penstock.LoadOptions(
            readers=readers,
            block_bytes=block_bytes,
            cache=cache,  # type: ignore[arg-type]
            cache_dir=cache_dir,
            cache_bytes=cache_bytes,
            verify=verify,  # type: ignore[arg-type]
        )
        if cache_dir and not any(is_url(path) for path in paths):
            sys.stderr.write("note: --cache-dir is ignored: what lies on this machine needs no disk cache\n")
        load(
            paths,
            names or [],
            filter or [],
            device,
            framework,
            mmap=mmap,
            options=options,
            storage_options=storage_options(storage_option),
            stats=stats,
            all_stats=all_stats,
            quiet=quiet or verbose,  # a bar and a log would tear each other up
            json=json,
        )


@app.command(
    "pull",
    cls=Command,
    epilog=epilog(
        "pull hf://org/name models/name",
        "pull s3://bucket/model/ models/model --include '*.safetensors' --include '*.json'",
    ),
)
def pull_command(
    url: Annotated[
        str,
        _argument(
            metavar="URL",
            help="A prefix of an object store, a repository (hf://org/name\\[@revision]), or one object.",
        ),
    ],
    directory: Annotated[
        str,
        _argument(
            metavar="DIRECTORY",
            help="Where the files go; made where it is missing.",
            autocompletion=completed_paths,
        ),
    ],
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Only objects whose paths match (* also matches slashes). Repeat for more."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Leave out objects whose paths match. Repeat for more.")
    ] = None,
    readers: Annotated[
        int | None, typer.Option(parser=parse_count, metavar="N", help="Requests in flight (32).")
    ] = None,
    storage_option: StorageOption = None,
    dry_run: Annotated[bool, _flag("--dry-run", help="List what would be fetched; fetch and make nothing.")] = False,
    verbose: Annotated[bool, _flag("--verbose", "-v", help="List each file, and how it came to be there.")] = False,
    quiet: Annotated[bool, _flag("--quiet", "-q", help="Show no progress bar.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Download a model (resumable): files that are complete are kept, files that were cut off are continued."""
    check_remote(url)
    with handled(as_json=json, debug=debug):
        from penstock.cli.pull import pull

        pull(
            url,
            directory,
            include=include or None,
            exclude=exclude or [],
            storage_options=storage_options(storage_option),
            options=penstock.LoadOptions(readers=readers),
            dry_run=dry_run,
            verbose=verbose,
            quiet=quiet,
            json=json,
        )


@app.command("manifest", cls=Command, epilog=epilog("manifest models/llama-3-8b"))
def manifest_command(
    directory: Annotated[
        str,
        _argument(metavar="DIRECTORY", help="A local directory with a checkpoint.", autocompletion=completed_paths),
    ],
    verbose: Annotated[bool, _flag("--verbose", "-v", help="List each file and its BLAKE3 hash.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Hash a checkpoint's files, and write the hashes beside them: loads verify what they read."""
    with handled(as_json=json, debug=debug):
        from penstock.cli.manifest import manifest

        manifest(directory, verbose=verbose, json=json)


@app.command(
    "doctor",
    cls=Command,
    epilog=epilog("doctor model.safetensors", "doctor s3://bucket/llama-3-8b/ --device cuda:0", "doctor --anonymous"),
)
def doctor_command(
    paths: Annotated[
        list[str] | None,
        _argument(
            metavar="PATH",
            help="The checkpoint, as for load; the machine alone where it is left out.",
            autocompletion=completed_paths,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            parser=parse_device,
            metavar="DEVICE",
            help="cpu, cuda or cuda:N; the first GPU that torch can use, else cpu.",
        ),
    ] = None,
    storage_option: StorageOption = None,
    anonymous: Annotated[
        bool, _flag("--anonymous", help="Print a text for a ticket: no paths, hosts or names.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Find what limits loads here, and how long one will take. Changes nothing, and takes at most 20 seconds."""
    if json and anonymous:
        raise typer.BadParameter("--json and --anonymous are two forms of one report: give one of them.")
    with handled(as_json=json, debug=debug):
        from penstock.cli.doctor import doctor

        doctor(
            paths or [],
            device,
            storage_options=storage_options(storage_option),
            anonymous=anonymous,
            json=json,
        )


cache_app = typer.Typer(
    name="cache",
    cls=Group,
    help="Look after the disk cache behind object stores.",
    epilog=epilog("cache ls", "cache rm 's3://bucket/old-model/*'", "cache prune --bytes 200GiB"),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cache_app)

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
    _argument(metavar="PATTERN", help="Entries whose location matches (*, ?, [...]), or of that name."),
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
        _argument(metavar="PATTERN", help="Entries whose location matches (*, ?, [...]), or of that name."),
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


starting.add_to(app)

# Last: it uses what is defined above.
import penstock.cli.bench_commands  # noqa: E402
