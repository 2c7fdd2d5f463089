"""The disk cache of remote stores: what the first load costs, and what the second gains."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import servers
from penstock.bench import checkpoints, checksum, states
from penstock.bench.rows import Rows, run
from penstock.bench.schedule import Axes, Schedule

from . import Experiment

WAYS = ["remote", "filling", "cached", "local"]
SHAPE = {"link_mb": "MB/s of the network", "connection_mb": "MB/s of a connection", "latency_ms": "before an answer"}


class DiskCache:
    """One served file, and its copy on the disk that holds the cache."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.cache = options.directory / "cache"
        self.reference = work / "reference.json"
        options.loaders, options.device = ["penstock-cached"], "cpu"
        self.rows = Rows(options, work)
        self.address = ""
        self.served: checkpoints.Case
        self.local: Path

    def stages(self) -> list[str]:
        return ["http"]

    @contextlib.contextmanager
    def stage(self, name: str, schedule: Schedule) -> Iterator[None]:
        del name
        options = self.options
        self.served = checkpoints.make("llama", options.source, gb=options.gb, files=1)
        schedule.add_case(self.served.name, self.served.as_dict())
        self.reference.write_text(json.dumps(checksum.of_files(self.served.files)))
        self.local = Path(shutil.copy(self.served.files[0], options.directory / "local.safetensors"))
        given = {key: getattr(options, key) for key in SHAPE}
        shape = [word for key, value in given.items() if value for word in (f"--{key.replace('_', '-')}", value)]
        try:
            with servers.serving(str(options.program.resolve()), self.served.files[0].parent, shape) as address:
                self.address = address
                yield
        finally:
            shutil.rmtree(options.source, ignore_errors=True)
            shutil.rmtree(self.cache, ignore_errors=True)
            self.local.unlink(missing_ok=True)

    def groups(self, stage: str, number: int) -> list[list[Axes]]:
        del number
        return [[{"case": "llama", "network": stage, "loader": way} for way in WAYS]]

    def measure(self, axes: Axes, number: int, seconds: float) -> dict[str, Any]:
        way = axes["loader"]
        proof: dict[str, Any] = {}
        if way == "filling":
            shutil.rmtree(self.cache, ignore_errors=True)
        elif way == "cached" and not list(self.cache.glob("*/*/data")):
            self._load("filling", number, seconds)
        if way in {"cached", "local"}:
            # Local files are cold: the cache's own and the copy lie on the same disk.
            files = [self.local] if way == "local" else list(self.cache.glob("*/*/data"))
            proof = {"cache": {"before": states.set_cache(files, "cold")}}
        return self._load(way, number, seconds) | proof

    def _load(self, way: str, number: int, seconds: float) -> dict[str, Any]:
        url = f"http://{self.address}/{self.served.files[0].name}"
        task = {
            "do": "load",
            "loader": "penstock" if way == "local" else "penstock-cached",
            "files": [str(self.local) if way == "local" else url],
            "device": "cpu",
            "reference": str(self.reference) if number == 0 else None,
            "touch": False,
        }
        env = {"PENSTOCK_CACHE_DIR": str(self.cache) if way in {"filling", "cached"} else ""}
        return run(task, self.options, self.work, seconds=seconds, env=env)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--program", type=Path, required=True, metavar="FILE", help="the http-bench that was built")
    add("--source", type=Path, default=Path("/dev/shm/penstock-disk-cache"), metavar="DIR", help="what is served")
    add("--gb", type=float, default=2.0, metavar="N", help="size of the checkpoint")
    for option, what in SHAPE.items():
        add(f"--{option.replace('_', '-')}", metavar="N", help=what)


EXPERIMENT = Experiment(
    "disk_cache",
    "the disk cache of remote stores",
    """\
Loads to the CPU over HTTP without a cache (remote), with an empty one
(filling), from the filled one (cached), and of the same file from the same
disk (local), which is the limit. DIRECTORY is on that disk.""",
    DiskCache,
    add_options,
    {"rounds": 3, "timeout": 600.0, "loaders": "", "device": "cpu"},
    ("remote", "local"),
)
