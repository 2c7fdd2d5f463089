"""``penstock start-report``: a command that is started and watched, and a timeline of its start."""

from __future__ import annotations

import json as json_module
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from penstock.cli.output import NARROW, Output, bare_table, plural, printable, shortened
from penstock.errors import ConfigError
from penstock.start import profile as profiles
from penstock.start import report
from penstock.start.command import NOT_EXECUTABLE, NOT_FOUND, end_as
from penstock.start.observe import Observer, Readiness, Start
from penstock.units import size

_WIDE = 100
"""The columns from which on all figures are shown."""


def start_report(
    command: Sequence[str],
    *,
    readiness: tuple[str | None, str | None, str | None],
    cold: bool,
    stop: bool,
    files: int,
    output: str | None,
    save_profile: str | None,
    json: bool,
) -> int:
    """Starts the command, reports when it answers, and waits for it. The exit code is the command's.

    Raises:
        ConfigError: for a readiness that cannot be.
    """
    url, body, log = readiness
    if body is not None and url is None:
        raise ConfigError(cause="--ready-body is posted to --ready-url, which is not given", remedy="Give both")
    try:
        pattern = None if log is None else re.compile(log)
    except re.error as error:
        raise ConfigError(
            cause=f"--ready-log is no regular expression: {error}", remedy="Escape what is meant as it is"
        ) from None

    def write(start: Start) -> None:
        if save_profile is not None:
            keep(start, save_profile)
        document = json_module.dumps(report.as_dict(start), indent=2) + "\n"
        if output is not None:
            try:
                if json:
                    Path(output).write_text(document, encoding="ascii")
                else:
                    with Path(output).open("w", encoding="utf-8") as file:
                        show(start, files, Output(file))
            except OSError as error:
                sys.stderr.write(f"penstock: the report could not be written to {output}: {error.strerror}\n")
        elif json:
            sys.stdout.write(document)
            sys.stdout.flush()
        else:
            show(start, files, Output(sys.stderr))

    # With --json alone stdout holds the document and nothing else: what the command prints goes to stderr.
    stdout_to = 2 if json and output is None else 1
    look = files > 0 or save_profile is not None
    observer = Observer(command, Readiness(url, body, pattern), look=look, cold=cold, stdout_to=stdout_to)
    try:
        status = observer.run(write, stop_when_ready=stop)
    except OSError as error:
        sys.stderr.write(f"error: {printable(command[0])} cannot be started: {os.strerror(error.errno or 0)}\n")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    return end_as(status)


def keep(start: Start, path: str) -> None:
    """Writes the start's profile. A start that failed has none."""
    if not start.ready:
        sys.stderr.write("penstock: no start profile was written, as no answer was seen\n")
        return
    found = profiles.of_start(start)
    try:
        profiles.save(found, path)
    except OSError as error:
        sys.stderr.write(f"penstock: the start profile could not be written to {path}: {error.strerror}\n")
        return
    told = f"{size(found.nbytes)} of {plural(len(found.wanted), 'read')}"
    sys.stderr.write(f"penstock: start profile {path}: {told}\n")


def show(start: Start, files: int, out: Output) -> None:
    """Prints the timeline for people."""
    env = start.environment
    name = f"{env.engine} {env.version or ''}".strip() if env.engine != "python" else "program"
    took = report.seconds(start)
    out.print()
    end = f"{took:.1f} s to the first answer" if took is not None else "no answer was seen"
    out.lines([f"Start of {name}: {end}"], style="bold")
    wide = out.width >= _WIDE
    narrow = out.width < NARROW + 1
    table = bare_table()
    table.add_column("step", no_wrap=True)
    for title in ("from", "seconds", "CPU s"):
        if not (narrow and title == "from"):
            table.add_column(title, justify="right", no_wrap=True)
    if not narrow:
        table.add_column("from disk", justify="right", no_wrap=True)
    table.add_column("new in cache" if not narrow else "cached", justify="right", no_wrap=True)
    if wide:
        table.add_column("files", justify="right", no_wrap=True)
    used, read = start.used_by_step(), report.by_file(start.reads)
    for step in start.steps:
        use, here = used.get(step.name), read.get(step.name, {})
        took = step.seconds
        cells = [step.name]
        cells += [] if narrow else ["" if took is None else f"{step.begun:.1f}"]
        cells += ["not seen" if took is None else f"{took:.1f}", "" if use is None else f"{use.cpu_seconds:.1f}"]
        cells += [] if narrow else ["" if use is None else size(use.disk_bytes)]
        cells += [size(sum(here.values())) if here else ""]
        cells += [f"{len(here):,}" if here else ""] if wide else []
        table.add_row(*map(Text, cells))
    out.print(table)
    if files:
        _files(start, files, out)
    resident, of = start.before
    if not of:
        return
    out.print()
    share = f"{resident / of:.0%}"
    out.lines([f"{share} of {size(of)} that it may read was in the page cache before; --cold puts it out"], style="dim")
    if start.hidden:
        out.lines(
            [f"of {plural(start.hidden, 'file')} the kernel does not say: they belong to another user"], style="dim"
        )


def _files(start: Start, files: int, out: Output) -> None:
    for step, here in report.by_file(start.reads).items():
        out.print()
        out.lines([f"Largest in {step}"], style="bold")
        width = max(min(out.width, 400) - 14, 20)
        out.lines(
            f"  {size(nbytes):>9}  {shortened(printable(path), width)}" for path, nbytes in list(here.items())[:files]
        )
