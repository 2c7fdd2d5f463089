"""The command: ``list``, ``report``, ``merge``, and one subcommand for each experiment."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from penstock.bench import loaders, machine, result, schedule, tables

from . import experiments

WIDTH = 79
# Options of which a result keeps no directory.
PATHS = {"--output", "--tmpfs", "--program", "--source"}


def main(arguments: list[str] | None = None, prog: str = "python -m benchmarks") -> None:
    """Carries out a command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = make_parser(prog).parse_args(arguments)
    if options.command == "list":
        for experiment in experiments.every().values():
            print(f"{experiment.name:14}{experiment.summary}")
        return
    try:
        if options.command == "run":
            print(run(options, shown(arguments, prog)))
            return
        read = [result.read(path) for path in options.results]
        merged = result.merge(read)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyError as error:
        raise SystemExit(f"error: {error.args[0]}") from error
    if options.output:
        result.write(options.output, merged)
    known = experiments.every().get(merged["experiment"])
    print(tables.tables(merged, known.beside if known else ()))


def make_parser(prog: str) -> argparse.ArgumentParser:
    def form(prog: str) -> argparse.HelpFormatter:
        return argparse.RawDescriptionHelpFormatter(prog, max_help_position=24, width=WIDTH)

    names = {"list": "the experiments", "report": "tables of results", "merge": "one result of several"}
    names |= {experiment.name: experiment.summary for experiment in experiments.every().values()}
    listed = "\n".join(f"  {name:14}{what}" for name, what in names.items())
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} COMMAND [options]",
        description="Measures loads beside the machine's limits and other loaders.",
        epilog=f"commands:\n{listed}\n\nCOMMAND --help lists the options of one.",
        formatter_class=form,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, help=argparse.SUPPRESS, prog=prog)
    listing = commands.add_parser("list", description="Lists the experiments.", formatter_class=form)
    listing.set_defaults(command="list")
    for name in ("report", "merge"):
        about = f"Prints {names[name]}."
        reading = commands.add_parser(name, description=about, formatter_class=form)
        reading.add_argument("results", type=Path, nargs="+", metavar="FILE")
        reading.add_argument("--output", type=Path, metavar="FILE", required=name == "merge", help="as JSON")
        reading.set_defaults(command=name)
    for experiment in experiments.every().values():
        one = commands.add_parser(
            experiment.name,
            usage=f"{prog} {experiment.name} [DIRECTORY] [options]",
            description=f"{experiment.name}: {experiment.summary}\n\n{experiment.about}",
            epilog=_defaults(experiment.defaults),
            formatter_class=form,
        )
        _add_common(one)
        experiment.add_options(one)
        one.set_defaults(command="run", experiment=experiment, **experiment.defaults)
    return parser


def _defaults(defaults: dict[str, Any]) -> str:
    """What an experiment does where nothing is said, by lines that fit."""
    lines = ["defaults:"]
    for name, value in defaults.items():
        if value and isinstance(value, str | int | float) and not isinstance(value, bool):
            text = f"--{name} {value}".replace(",", ", ")
            wrapped = textwrap.wrap(text, WIDTH - 6, break_long_words=False, break_on_hyphens=False)
            lines += [f"  {'' if line is wrapped[0] else '    '}{line}" for line in wrapped]
    return "\n".join(lines)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", type=Path, nargs="?", metavar="DIRECTORY", help="where checkpoints are, or are made; else /tmp")
    add("--output", type=Path, metavar="FILE", help="the result, as JSON")
    add("--device", metavar="DEVICE", help="cuda:N or cpu")
    add("--rounds", type=int, metavar="N")
    add("--loaders", metavar="A,B", help="rows, such as penstock:readers=8|16")
    add(
        "--site", type=_site, action="append", default=[], metavar="NAME=DIR", help="a row's packages, which come first"
    )
    add("--cores", type=_cores, metavar="0-3", help="the cores that may be used")
    add("--timeout", type=float, metavar="S", help="seconds after which a loader is taken to hang")
    add("--budget", type=float, metavar="S", help="seconds after which nothing is begun")
    add("--resume", action="store_true", help="measure what OUTPUT does not have yet")
    add("--note", metavar="TEXT", help="what else there is to know, kept in the result")


def run(options: argparse.Namespace, command: str) -> str:
    """Carries out an experiment: its tables."""
    experiment: experiments.Experiment = options.experiment
    _complete(options)
    # What a measurement has put into memory goes away with it, also when it is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    if options.cores:
        os.sched_setaffinity(0, options.cores)
    resumed = options.resume and options.output and options.output.exists()
    document = result.read(options.output) if resumed else result.empty(experiment.name)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        options.directory = options.directory or Path(scratch) / "checkpoints"
        options.directory.mkdir(parents=True, exist_ok=True)
        work = Path(scratch) / "work"
        work.mkdir()
        bench = experiment.make(options, work)
        limits = schedule.Limits(options.rounds, options.timeout, options.budget)
        about = _about(options, bench, command)
        schedule.Schedule(bench, document, about, limits, options.output).everything()
    return tables.tables(document, experiment.beside)


def _about(options: argparse.Namespace, bench: Any, command: str) -> dict[str, Any]:
    rows = getattr(bench, "rows", None)
    versions = {name: machine.version_of(name) for name in ("penstock-loader", "torch", "safetensors", "numpy")}
    return {
        "command": command,
        "device": options.device,
        "machine": machine.about(options.directory, options.device),
        "versions": versions | (rows.versions if rows else {}),
        "skipped": dict(rows.skipped) if rows else {},
    } | ({"note": options.note} if options.note else {})


def _complete(options: argparse.Namespace) -> None:
    """Splits lists, adds the loaders that only ``--site`` names, and checks names."""
    options.site = dict(options.site)
    for name in ("loaders", "states", "cases", "networks", "rows"):
        if isinstance(getattr(options, name, None), str):
            setattr(options, name, [word for word in getattr(options, name).split(",") if word])
    options.loaders = [row for name in options.loaders for row in loaders.expand(name)]
    if getattr(options, "no_limits", False):
        options.limits = {}
    if options.experiment.name not in {"remote", "disk_cache", "sharing"}:
        have = {loaders.labelled(name) for name in options.loaders}
        options.loaders += [name for name in options.site if name not in have]
        missing = [name for name in have if "@" in name and name not in options.site]
        if missing:
            raise ValueError(f"--site {missing[0]}=DIR is needed: the packages of {missing[0]}")
    from penstock.bench import files
    from penstock.bench.checkpoints import NAMES

    from .experiments import remote

    known = {
        "states": files.STATES,
        "cases": NAMES,
        "networks": [*remote.NETWORKS, *remote.TLS],
    }
    for key, names in known.items():
        for name in getattr(options, key, []):
            if name not in names:
                raise ValueError(f"{name} is none of {', '.join(names)}")


def _site(text: str) -> tuple[str, str]:
    name, equals, directory = text.partition("=")
    if not equals or not Path(directory).is_dir():
        raise argparse.ArgumentTypeError(f"NAME=DIR with a directory that exists, not {text}")
    return name, str(Path(directory).resolve())


def _cores(text: str) -> set[int]:
    chosen: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        chosen |= set(range(int(first), int(last or first) + 1))
    return chosen


def shown(arguments: list[str], prog: str) -> str:
    """The command line, without the directories of this machine."""
    words, value_of = [prog, *arguments[:1]], None
    for argument in arguments[1:]:
        option, equals, value = argument.partition("=")
        if value_of == "--site":
            words.append(f"{option}=DIR")
        elif value_of in PATHS:
            words.append(Path(argument).name)
        elif option in PATHS and equals:
            words.append(f"{option}={Path(value).name}")
        elif option == "--site" and equals:
            words.append(f"{option}={value.partition('=')[0]}=DIR")
        elif value_of is None and not argument.startswith("-"):
            words.append("DIRECTORY")
        else:
            words.append(argument)
        takes_value = argument.startswith("--") and not equals and argument not in {"--resume", "--no-limits"}
        value_of = argument if takes_value else None
    return " ".join(words)
