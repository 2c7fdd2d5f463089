"""Commands around another command: what they take. ``add_to`` puts them into the application.

What stands behind ``--`` is another program's: nothing of it is parsed here.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from penstock.cli import help
from penstock.cli.failures import handled
from penstock.cli.options import Debug, Json, parse_size

_PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}

Command = Annotated[
    list[str], typer.Argument(metavar="-- COMMAND...", help="The command and its arguments.", show_default=False)
]
Profile = Annotated[str | None, typer.Option(metavar="FILE", help="A start profile of penstock start-report.")]
NoWeights = Annotated[
    bool, typer.Option("--no-weights", metavar="", help="Leave out the files of weights that the command names.")
]


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    for name, command, examples in (
        (
            "start-report",
            start_report_command,
            ("start-report -- vllm serve models/llama", "start-report --cold --stop -- vllm serve models/llama"),
        ),
        (
            "run",
            run_command,
            (
                "run -- vllm serve models/llama",
                "run --profile llama.start -- vllm serve models/llama",
                "run --start-cache /mnt/starts -- vllm serve s3://bucket/llama",
            ),
        ),
        ("warm", warm_command, ("warm --profile llama.start", "warm -- vllm serve models/llama")),
    ):
        written = help.epilog(*examples)
        app.command(name, cls=help.Command, epilog=written, context_settings=_PASS_ON)(command)


def start_report_command(
    command: Command,
    ready_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="It has answered when this does, such as http://localhost:8000/health."),
    ] = None,
    ready_body: Annotated[
        str | None, typer.Option(metavar="JSON", help="Post this to the URL: a prompt, for the first token.")
    ] = None,
    ready_log: Annotated[
        str | None, typer.Option(metavar="REGEX", help="It has answered when a line of its output matches.")
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold", metavar="", help="Put its files out of the page cache first.")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", metavar="", help="End it with SIGTERM once it has answered.")] = False,
    files: Annotated[
        int, typer.Option(min=0, metavar="N", help="Files to list for each step; with 0 files are not looked at.")
    ] = 5,
    save_profile: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a start profile for penstock run and penstock warm.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Write the report here; else to stderr.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Start a command, and show what its start waits for: six steps, their time, CPU, disk and files.

    Its output, its signals and its exit status are the command's own. The report comes when it has answered.
    """
    with handled(as_json=json, debug=debug):
        from penstock.cli.start_report import start_report

        status = start_report(
            command,
            readiness=(ready_url, ready_body, ready_log),
            cold=cold,
            stop=stop,
            files=files,
            output=output,
            save_profile=save_profile,
            json=json,
        )
    sys.exit(status)


def run_command(
    command: Command,
    profile: Profile = None,
    no_weights: NoWeights = False,
    start_cache: Annotated[
        str | None,
        typer.Option(
            metavar="LOCATION", help="Restore compile caches from this directory or URL; save new ones to a directory."
        ),
    ] = None,
    start_cache_bytes: Annotated[
        int | None,
        typer.Option(parser=parse_size, metavar="SIZE", help="Most that it keeps; 10GiB if not given."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Start a command, and bring what it reads into the page cache ahead of it.

    The command takes the place of this process. A helper reads at idle priority, and ends with the command.
    What is restored from a start cache is code that will run: name a location that only you can write to.
    """
    with handled(as_json=False, debug=debug):
        from penstock.cli.start_run import run

        status = run(
            command,
            profile,
            with_weights=not no_weights,
            start_cache=start_cache,
            start_cache_bytes=start_cache_bytes,
        )
    sys.exit(status)


def warm_command(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND...]", help="The command that will be started.", show_default=False),
    ] = None,
    profile: Profile = None,
    no_weights: NoWeights = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Bring what a start reads into the page cache, and end: for init containers and nodes."""
    with handled(as_json=json, debug=debug):
        from penstock.cli.start_run import warm

        warm(command or [], profile, with_weights=not no_weights, json=json)
