"""The commands of ``penstock bench`` and their options. What they do is imported when one runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.failures import handled
from penstock.cli.help import Command, Group, epilog
from penstock.cli.options import Debug, Json, completed_paths, parse_device
from penstock.errors import MissingDependencyError

bench_app = typer.Typer(
    name="bench",
    cls=Group,
    help="Measure loads here, beside other loaders and the machine's limits. Needs penstock-loader\\[bench].",
    epilog=epilog("bench compare --quick", "bench compare models/llama --output report"),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ENGINE_SECONDS = 600.0
"""What one start of an engine may take: compiling, on busy cores."""
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        parser=parse_device,
        metavar="DEVICE",
        help="cpu, cuda or cuda:N; the first GPU that torch can use, else cpu.",
    ),
]
Directory = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="DIRECTORY",
        help="Write report.html, result.json, samples.csv and charts here.",
        autocompletion=completed_paths,
    ),
]
Budget = Annotated[
    float | None, typer.Option("--budget", min=1.0, metavar="SECONDS", help="Begin nothing that would end later.")
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="At most so many rounds.")]
Quick = Annotated[bool, typer.Option("--quick", metavar="", help="Two minutes: fewer rows, a small checkpoint.")]
Resume = Annotated[
    bool,
    typer.Option("--resume", metavar="", help="Go on with the result in --output: only what it lacks is measured."),
]
Loaders = Annotated[
    str | None,
    typer.Option("--loaders", metavar="A,B", help="Only these, such as penstock,safetensors,penstock:readers=8."),
]
States = Annotated[str, typer.Option("--states", metavar="A,B", help="Of the page cache: cold, half, warm, tmpfs.")]
Gigabytes = Annotated[
    float | None, typer.Option("--gb", min=0.001, metavar="N", help="The size of a checkpoint that is made.")
]


def needs_extra() -> None:
    """Raises MissingDependencyError unless the packages of the extra are there."""
    for module in ("numpy", "matplotlib", "torch"):
        if importlib.util.find_spec(module) is None:
            extra = "torch" if module == "torch" else "penstock-loader[bench]"
            raise MissingDependencyError(
                cause=f"penstock bench needs the package {module}", remedy=f"pip install '{extra}'"
            )


def check_resumable(resume: bool, output: Path | None) -> None:
    """Raises BadParameter where there is nothing to go on with."""
    if resume and output is None:
        raise typer.BadParameter("--resume needs --output: the directory of the result to go on with.")


def first_device(given: str | None) -> str:
    """The device that was asked for; otherwise a GPU where torch can use one."""
    if given:
        return given
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        return "cpu"  # without the seconds that importing torch takes
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


@bench_app.command(
    "compare",
    cls=Command,
    epilog=epilog("bench compare --quick", "bench compare models/llama --output report --states cold,warm"),
)
def compare_command(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PATH]",
            show_default=False,
            help="A .safetensors file or a directory of them; left out, one of random weights is made and removed.",
            autocompletion=completed_paths,
        ),
    ] = None,
    quick: Quick = False,
    output: Directory = None,
    device: Device = None,
    loaders: Loaders = None,
    states: States = "cold,half,warm,tmpfs",
    gb: Gigabytes = None,
    budget: Budget = None,
    rounds: Rounds = 60,
    resume: Resume = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Load one checkpoint with every installed loader, in each state of the page cache.

    Other loaders are plug-ins: entry points of the group penstock.bench.loaders.
    """
    check_resumable(resume, output)
    with handled(as_json=json, debug=debug):
        needs_extra()
        from penstock.bench.compare import Wanted
        from penstock.cli.bench import run_compare

        wanted = Wanted(
            path=path,
            device=first_device(device),
            states=_words(states),
            loaders=_words(loaders),
            quick=quick,
            gb=gb,
            budget=budget,
            rounds=rounds,
            output=output,
            resume=resume,
        )
        run_compare(wanted, json=json)


@bench_app.command(
    "concurrency",
    cls=Command,
    epilog=epilog("bench concurrency --quick", "bench concurrency s3://bucket/llama/ --output report"),
)
def concurrency_command(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATH|URL]",
            show_default=False,
            help="A .safetensors file, a directory of them or a URL; left out, random weights are made and removed.",
            autocompletion=completed_paths,
        ),
    ] = None,
    quick: Quick = False,
    output: Directory = None,
    device: Device = None,
    loaders: Loaders = None,
    readers: Annotated[str, typer.Option("--readers", metavar="N,N", help="The numbers to try.")] = "",
    states: States = "cold",
    gb: Gigabytes = None,
    budget: Budget = None,
    rounds: Rounds = 60,
    resume: Resume = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Load one checkpoint with several numbers of readers, beside the number that Penstock finds by itself."""
    check_resumable(resume, output)
    if any(not word.isdigit() or not int(word) for word in _words(readers)):
        raise typer.BadParameter("--readers takes numbers such as 1,4,16.")
    with handled(as_json=json, debug=debug):
        needs_extra()
        from penstock.bench.compare import Wanted
        from penstock.cli.bench import run_concurrency

        wanted = Wanted(
            device=first_device(device),
            states=_words(states),
            loaders=_words(loaders),
            quick=quick,
            gb=gb,
            budget=budget,
            rounds=rounds,
            output=output,
            resume=resume,
        )
        run_concurrency(path, wanted, [int(word) for word in _words(readers)], json=json)


@bench_app.command(
    "switch",
    cls=Command,
    epilog=epilog("bench switch --quick", "bench switch --parts turns,request --model flux --gb 33.6 --output report"),
)
def switch_command(
    quick: Quick = False,
    output: Directory = None,
    device: Device = None,
    parts: Annotated[
        str, typer.Option("--parts", metavar="A,B", help="Only these: read, order, reload, copy, turns, pool, request.")
    ] = "",
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="flux|llama|plain", help="Which shapes; plain needs torch alone."),
    ] = None,
    loaders: Loaders = None,
    gb: Gigabytes = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, metavar="N", help="Turns measured in a process.")] = 3,
    budget: Budget = None,
    rounds: Rounds = 60,
    resume: Resume = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure what switching between models takes: reading, building, copying, taking turns, and one request."""
    check_resumable(resume, output)
    with handled(as_json=json, debug=debug):
        needs_extra()
        from penstock.bench.compare import Wanted
        from penstock.bench.switch.bench import Asked
        from penstock.cli.bench import run_switch

        wanted = Wanted(
            device=first_device(device),
            loaders=_words(loaders),
            quick=quick,
            gb=gb,
            budget=budget,
            rounds=rounds,
            output=output,
            resume=resume,
        )
        run_switch(wanted, Asked(_words(parts), model, repeats), json=json)


@bench_app.command(
    "engine",
    cls=Command,
    epilog=epilog("bench engine --quick", "bench engine models/llama --engines vllm --modes eager,compiled"),
)
def engine_command(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PATH]",
            show_default=False,
            help="The directory of a model; left out, a Llama of random weights is made and removed.",
            autocompletion=completed_paths,
        ),
    ] = None,
    quick: Quick = False,
    output: Directory = None,
    device: Device = None,
    engines: Annotated[
        str, typer.Option("--engines", metavar="A,B", help="Of those that are installed: transformers, vllm, sglang.")
    ] = "",
    modes: Annotated[str, typer.Option("--modes", metavar="A,B", help="eager, compiled.")] = "eager",
    tp: Annotated[int, typer.Option("--tp", min=1, metavar="N", help="GPUs that a server shares a model over.")] = 1,
    loaders: Loaders = None,
    states: Annotated[
        str, typer.Option("--states", metavar="A,B", help="cold, warm, and cold-machine, which needs root.")
    ] = "cold,warm",
    gb: Gigabytes = None,
    budget: Budget = None,
    rounds: Rounds = 60,
    resume: Resume = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the seconds until an engine's first answer, by steps, with each of its loaders."""
    check_resumable(resume, output)
    with handled(as_json=json, debug=debug):
        needs_extra()
        from penstock.bench.compare import Wanted
        from penstock.bench.engine.bench import Asked
        from penstock.cli.bench import run_engine

        wanted = Wanted(
            device=first_device(device),
            states=_words(states),
            loaders=_words(loaders),
            quick=quick,
            gb=gb,
            budget=budget,
            rounds=rounds,
            output=output,
            resume=resume,
            timeout=ENGINE_SECONDS,
        )
        run_engine(path, wanted, Asked(_words(engines), _words(modes), tp), json=json)


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())
