"""Penstock beside its rivals: the same checkpoints, the same states of the page cache, one machine, one run.

    python -m benchmarks rivals DIRECTORY --output FILE.json
    python -m benchmarks rivals DIRECTORY --cases llama --states cold,half --budget 550 --output A.json
    python -m benchmarks rivals --merge A.json B.json --output BOTH.json

Checkpoints are made under DIRECTORY, or the one that lies there is taken. Every loader that is installed is measured,
each time in a fresh process whose CUDA context exists; loaders take turns within a round, in an order that changes from
round to round, beside the machine's own limits. The page cache is made cold, half cached or warm before each
measurement, and proved: what cannot be proved is not measured. The bytes of all tensors are checked once for every
loader and state. A loader that fails, crashes or hangs is a row that says so.

The rivals are installed from wheels (``fetch_rivals.sh``), which needs no network and changes no environment:

    python -m pip install --no-index --no-deps --target SITE WHEELS/rivals/*.whl
    PYTHONPATH=SITE python -m benchmarks rivals DIRECTORY --output FILE.json --site safetensors-prefetch=SITE_0.9

``NAME@LABEL`` is the loader NAME once more, with what ``--site`` puts before everything else that is installed;
``penstock:readers=16`` and the like is Penstock with that setting.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from . import checkpoints, comparison, loaders, report


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.merge:
        result = report.merge([report.read(path) for path in options.merge])
        report.write(options.output, result)
        print(report.table(result))
        return
    if options.directory is None:
        parser.error("DIRECTORY is needed, or --merge")
    complete(parser, options)
    # What a comparison has put into memory goes away with it, also when it is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    options.directory.mkdir(parents=True, exist_ok=True)
    if options.cores:
        os.sched_setaffinity(0, options.cores)
    result = report.read(options.output) if options.resume and options.output.exists() else report.empty()
    with tempfile.TemporaryDirectory(prefix="penstock-rivals-") as work:
        comparison.Comparison(options, result, Path(work), command(arguments or sys.argv[1:])).everything()
    print(report.table(result))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("directory", type=Path, nargs="?", metavar="DIRECTORY", help="where checkpoints are, or are made")
    add("--output", type=Path, required=True, help="the result, as JSON")
    add("--device", default="cuda:0", help="cuda:N or cpu")
    add("--rounds", type=int, default=3)
    add("--states", type=words, default=comparison.STATES, help=f"by comma; all: {','.join(comparison.STATES)}")
    add("--cases", type=words, default=checkpoints.NAMES, help=f"by comma; all: {','.join(checkpoints.NAMES)}")
    add("--loaders", type=words, default=loaders.USUAL, help=f"by comma; all: {','.join(loaders.LOADERS)}")
    add("--site", type=site, action="append", default=[], metavar="NAME=DIR", help="packages that come first for one")
    add("--cores", type=cores, metavar="0-3", help="the cores that may be used, like taskset's")
    add("--gb", type=float, default=15.19, help="size of the case llama")
    add("--tensors", type=int, default=100_000, help="how many the case small-tensors has")
    add("--one-gb", type=float, default=12.0, help="size of the case one-tensor")
    add("--tmpfs", type=Path, default=Path("/dev/shm"), help="where the state tmpfs is made")
    add("--timeout", type=float, default=120.0, help="seconds after which a loader is taken to hang")
    add("--budget", type=float, help="seconds after which no measurement begins that would not end in time")
    add("--no-limits", action="store_true", help="measure loaders beside each other, not beside the machine's limits")
    add("--resume", action="store_true", help="measure what OUTPUT does not have yet")
    add("--merge", type=Path, nargs="+", metavar="FILE", help="make one result of several, and measure nothing")
    return parser


def complete(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Checks names, and adds the loaders that only ``--site`` names."""
    options.site = dict(options.site)
    options.loaders = list(dict.fromkeys([*options.loaders, *options.site]))
    for asked, known in (
        ([loaders.kind(name) for name in options.loaders], list(loaders.LOADERS)),
        (options.states, comparison.STATES),
        (options.cases, checkpoints.NAMES),
    ):
        for name in asked:
            if name not in known:
                parser.error(f"{name} is none of {', '.join(known)}")


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def site(text: str) -> tuple[str, str]:
    name, equals, directory = text.partition("=")
    if not equals or not Path(directory).is_dir():
        raise argparse.ArgumentTypeError(f"NAME=DIR with a directory that exists, not {text}")
    return name, str(Path(directory).resolve())


def cores(text: str) -> set[int]:
    chosen: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        chosen |= set(range(int(first), int(last or first) + 1))
    return chosen


def command(arguments: list[str]) -> str:
    """The command line, without the directories of this machine."""
    shown, value_of = [], None
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if value_of == "--site":
            shown.append(f"{option}=DIR")
        elif value_of in {"--output", "--tmpfs"}:
            shown.append(Path(argument).name)
        elif option in {"--output", "--tmpfs"} and equals:
            shown.append(f"{option}={Path(value).name}")
        elif option == "--site" and equals:
            shown.append(f"{option}={value.partition('=')[0]}=DIR")
        elif value_of is None and not argument.startswith("-"):
            shown.append("DIRECTORY")
        else:
            shown.append(argument)
        takes_value = argument.startswith("--") and not equals and argument not in {"--resume", "--no-limits"}
        value_of = argument if takes_value else None
    return " ".join(["python -m benchmarks rivals", *shown])


if __name__ == "__main__":
    main()
