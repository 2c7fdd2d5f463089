"""The application, and the commands that stand alone; typer makes the parser and the help of them.

Nothing heavy is imported before a command runs, so that ``--help`` and ``--version`` are immediate.
"""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

import penstock
from penstock.arguments import is_url
from penstock.cli import signing, starting
from penstock.cli.bench_commands import bench_app
from penstock.cli.cache_commands import cache_app
from penstock.cli.failures import handled
from penstock.cli.help import Command, Group, epilog
from penstock.cli.options import (
    Debug,
    Filter,
    Json,
    Paths,
    StorageOption,
    Verbose,
    argument,
    completed_paths,
    disk_cache,
    flag,
    one_of,
    parse_count,
    parse_device,
    parse_size,
    selection,
    setting,
    storage_options,
)
from penstock.cli.signing import Trust

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


_PATHS = ("model.safetensors", "s3://bucket/llama-3-8b/", "hf://openai-community/gpt2")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {penstock.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, flag("--version", callback=_version, is_eager=True, help="Print the version and exit.")
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
    names: Annotated[list[str] | None, selection(metavar="NAME", help="Only this tensor. Repeat for more.")] = None,
    filter: Filter = None,  # noqa: A002
    device: Annotated[
        str, typer.Option("--device", parser=parse_device, metavar="DEVICE", help="cpu, cuda or cuda:N.")
    ] = "cpu",
    framework: Annotated[
        str | None, typer.Option(metavar="NAME", help="pt, np, jax or dlpack (pt where torch is installed, else np).")
    ] = None,
    mmap: Annotated[bool, flag("--mmap", help="Map the files and bring all pages in; cpu only.")] = False,
    readers: Annotated[int | None, setting(parser=parse_count, metavar="N", help="Threads that read.")] = None,
    block_bytes: Annotated[
        int | None, setting(parser=parse_size, metavar="SIZE", help="What is read at once, such as 4194304 or 4MiB.")
    ] = None,
    cache: Annotated[
        str | None, one_of(POLICIES, setting, "Use of the page cache; auto decides block by block.")
    ] = None,
    cache_dir: Annotated[
        str | None,
        disk_cache(metavar="DIRECTORY", help="Keep what comes over the network here.", autocompletion=completed_paths),
    ] = None,
    cache_bytes: Annotated[
        int | None,
        disk_cache(parser=parse_size, metavar="SIZE", help="At most so much of it (80 % of what the disk has free)."),
    ] = None,
    verify: Annotated[
        str | None, one_of(VERIFY, setting, "Compare what is read with a manifest; auto where there is one.")
    ] = None,
    trust: Trust = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Add a time line of the load to this file, for ui.perfetto.dev."),
    ] = None,
    storage_option: StorageOption = None,
    stats: Annotated[bool, flag("--stats", help="Print what was read, from where, and what limited it.")] = False,
    all_stats: Annotated[bool, flag("--all-stats", help="Print every figure, those that are zero too.")] = False,
    verbose: Verbose = False,
    quiet: Annotated[bool, flag("--quiet", "-q", help="Show no progress bar.")] = False,
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
            trace=trace,
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
            trust=trust,
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
        argument(
            metavar="URL",
            help="A prefix of an object store, a repository (hf://org/name\\[@revision]), or one object.",
        ),
    ],
    directory: Annotated[
        str,
        argument(
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
    dry_run: Annotated[bool, flag("--dry-run", help="List what would be fetched; fetch and make nothing.")] = False,
    verbose: Annotated[bool, flag("--verbose", "-v", help="List each file, and how it came to be there.")] = False,
    quiet: Annotated[bool, flag("--quiet", "-q", help="Show no progress bar.")] = False,
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
        argument(metavar="DIRECTORY", help="A local directory with a checkpoint.", autocompletion=completed_paths),
    ],
    verbose: Annotated[bool, flag("--verbose", "-v", help="List each file and its BLAKE3 hash.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Hash a checkpoint's files, and write the hashes beside them: loads verify what they read."""
    with handled(as_json=json, debug=debug):
        from penstock.cli.manifest import manifest

        manifest(directory, verbose=verbose, json=json)


signing.add_to(app)


@app.command(
    "convert",
    cls=Command,
    epilog=epilog("convert pytorch_model.bin models/name", "convert old-model/ s3://bucket/name/ --manifest"),
)
def convert_command(
    source: Annotated[
        str,
        argument(
            metavar="SOURCE",
            help="A .bin, .pt, .pth or .ckpt file, or a directory with one or with their index.",
            autocompletion=completed_paths,
        ),
    ],
    location: Annotated[
        str,
        argument(
            metavar="LOCATION",
            help="A directory, a file that ends in .safetensors, or a new prefix of an object store.",
            autocompletion=completed_paths,
        ),
    ],
    shard_bytes: Annotated[
        int | None,
        typer.Option(
            "--shard-bytes", parser=parse_size, metavar="SIZE", help="The most bytes of a file, such as 5GB (50GB)."
        ),
    ] = None,
    manifest: Annotated[bool, flag("--manifest", help="Make a manifest of the bytes as they are written.")] = False,
    overwrite: Annotated[
        bool, flag("--overwrite", help="Replace weights that are there; other files of a directory stay.")
    ] = False,
    storage_option: StorageOption = None,
    verbose: Annotated[bool, flag("--verbose", "-v", help="List each file.")] = False,
    quiet: Annotated[bool, flag("--quiet", "-q", help="Show no progress bar.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Convert weights that torch pickled to safetensors; no code of the pickle runs."""
    with handled(as_json=json, debug=debug):
        from penstock.cli.convert import convert

        convert(
            source,
            location,
            shard_bytes=shard_bytes,
            manifest=manifest,
            overwrite=overwrite,
            storage_options=storage_options(storage_option),
            verbose=verbose,
            quiet=quiet,
            json=json,
        )


@app.command(
    "doctor",
    cls=Command,
    epilog=epilog("doctor model.safetensors", "doctor s3://bucket/llama-3-8b/ --device cuda:0", "doctor --anonymous"),
)
def doctor_command(
    paths: Annotated[
        list[str] | None,
        argument(
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
        bool, flag("--anonymous", help="Print a text for a ticket: no paths, hosts or names.")
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


app.add_typer(cache_app)
app.add_typer(bench_app)
starting.add_to(app)
