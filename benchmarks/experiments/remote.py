"""From an object store on this machine: Penstock beside plain clients and other loaders, through several networks."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import servers
from penstock.bench import checkpoints, checksum, processes, states
from penstock.bench.rows import Rows, run
from penstock.bench.schedule import Axes, Schedule

from . import Experiment

CAPPED = ["--latency-ms", "30", "--connection-mb", "90", "--link-mb", "1000"]
NETWORKS = {"loopback": [], "capped": CAPPED, "outage": [*CAPPED, "--outage-after", "0.5", "--outage", "20"]}
TLS = {"tls": "TLS_AES_256_GCM_SHA384", "tls-128": "TLS_AES_128_GCM_SHA256"}
PLAIN = {"recv": "recv", "object_store": "stream"}
ROWS = {
    "loopback": "recv-ready@4,object_store-ready@4,object_store-ready@8,object_store-ready@16,object_store-ready@32,"
    "penstock-into,object_store@4,object_store@16,penstock,runai@8,runai@16,tensorizer@8",
    "capped": "object_store-ready@4,object_store-ready@16,object_store-ready@32,penstock-into,penstock,"
    "runai@4,runai@8,runai@16,runai@32,tensorizer@8,tensorizer@16,tensorizer@32",
    "outage": "penstock",
    "tls": "penstock-into,penstock",
    "tls-128": "penstock-into,penstock",
}
# To a device: how many requests suits it is runai's to be told, so it is tried at several.
DEVICE_ROWS = (
    "recv-ready@16,penstock,penstock-second,penstock-stream,penstock-into:cpu,"
    "runai@4,runai@8,runai@16,runai@32,runai@16:cpu,penstock:cpu"
)


class Remote:
    """One checkpoint behind one server program."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.case: checkpoints.Case | None = None
        self.reference = work / "reference.json"
        options.program = options.program.resolve()
        found = servers.nginx()
        if options.server == "nginx" and not found:
            raise SystemExit("nginx is not installed")
        if any(network in TLS for network in self.stages()) and options.server == "http-bench":
            raise SystemExit("http-bench speaks no TLS: --server nginx")
        self.server = found if found and options.server != "http-bench" else str(options.program)
        asked = {row for network in self.stages() for row in self._asked(network)}
        self.kinds = {row: parts(row.partition("+")[0], options.device) for row in asked}
        known = {row for row in asked if self.kinds[row][0].partition("-")[0] not in PLAIN}
        options.loaders = sorted({self.kinds[row][0] for row in known})
        self.rows = Rows(options, work)
        self.rows.versions["server"] = servers.version(self.server)

    def _asked(self, network: str) -> list[str]:
        usual = ROWS[network] if self.options.device == "cpu" else DEVICE_ROWS
        return self.options.rows or usual.split(",")

    def stages(self) -> list[str]:
        return list(self.options.networks)

    @contextlib.contextmanager
    def stage(self, name: str, schedule: Schedule) -> Iterator[None]:
        del name
        if self.case is None:
            options = self.options
            self.case = checkpoints.make("llama", options.directory, gb=options.gb, files=options.files)
            self.reference.write_text(json.dumps(checksum.of_files(self.case.files)))
        schedule.add_case(self.case.name, self.case.as_dict())
        yield

    def groups(self, stage: str, number: int) -> list[list[Axes]]:
        del number
        rows = [row for row in self._asked(stage) if self.kinds[row][0] not in self.rows.skipped]
        return [[{"case": "llama", "network": stage, "loader": row} for row in rows]]

    def measure(self, axes: Axes, number: int, seconds: float) -> dict[str, Any]:
        del number
        network, row = axes["network"], axes["loader"]
        shape = NETWORKS.get(network, [])
        program = str(self.options.program) if shape else self.server
        secure = servers.tls(self.work, TLS[network]) if network in TLS else None
        assert self.case
        load = {"load_before": round(os.getloadavg()[0], 2)}
        with servers.serving(program, self.case.files[0].parent, shape, secure) as address:
            return self._load(row, address, secure, seconds) | load

    def _load(self, row: str, address: str, secure: servers.Tls | None, seconds: float) -> dict[str, Any]:
        assert self.case
        name, requests, device = self.kinds[row]
        kind, _, memory = name.partition("-")
        nbytes = sum(file.stat().st_size for file in self.case.files)
        # Those that fill memory which exists need none.
        settle = states.enough_memory(nbytes) if device == "cpu" and memory not in {"ready", "into"} else 0
        if kind in PLAIN:
            if settle:
                states.settle_memory(settle)
            url = f"http://{address}/{self.case.files[0].name}"
            ready = ["--ready"] if memory == "ready" else []
            command = [self.options.program, PLAIN[kind], url, "--requests", requests, *ready]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
            except subprocess.TimeoutExpired:
                raise processes.HungError(f"no end after {seconds:.0f} s") from None
            if done.returncode:
                raise processes.FailedError(done.stderr.strip()[:300])
            answer: dict[str, Any] = json.loads(done.stdout)
            return answer
        task = {
            "do": "load",
            "loader": name,
            "files": self._locations(name, address, seconds),
            "device": device,
            "reference": None if kind == "tensorizer" else str(self.reference),
            # Nothing is mapped here, and plain clients do not look at what they got within their time either.
            "touch": False,
            "settle": settle,
        }
        env = environment(address, requests, secure)
        if label := row.partition("+")[2]:
            env |= {"PYTHONPATH": os.pathsep.join([self.options.site[label], os.environ.get("PYTHONPATH", "")])}
        return run(task, self.options, self.work, seconds=seconds, env=env) | {"version": self.rows.versions[name]}

    def _locations(self, name: str, address: str, seconds: float) -> list[str]:
        assert self.case
        if name != "tensorizer":
            return [f"s3://bucket/{file.name}" for file in self.case.files]
        own = checkpoints.own_format(self.case)
        if not own.exists():
            task = {"do": "serialise", "files": [str(file) for file in self.case.files], "target": str(own)}
            run(task, self.options, self.work, seconds=2 * seconds, env={})
        return [f"http://{address}/{own.name}"]


def parts(row: str, device: str) -> tuple[str, str, str]:
    """A row's loader, how many requests it is told to make, and where it loads to."""
    row, _, there = row.partition(":")
    name, _, requests = row.partition("@")
    return name, requests, there or device


def environment(address: str, requests: str, secure: servers.Tls | None = None) -> dict[str, str]:
    """What leads loaders to the server, and tells those that must be told how many requests to have in flight."""
    told = ("RUNAI_STREAMER_CONCURRENCY", "TENSORIZER_READERS", "PENSTOCK_READERS") if requests else ()
    bundle = {"AWS_CA_BUNDLE": str(secure.certificate)} if secure else {}
    known = {
        "AWS_ENDPOINT_URL": f"{'https' if secure else 'http'}://{address}",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        # Its usual second is not enough for a connection that is slow on purpose.
        "RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS": "60000",
    }
    return dict.fromkeys(told, requests) | bundle | known


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--program", type=Path, required=True, metavar="FILE", help="the http-bench that was built")
    add("--server", default="http-bench", choices=("http-bench", "nginx", "auto"), help="auto: nginx if found")
    add("--networks", metavar="A,B", help=f"by comma: {', '.join([*NETWORKS, *TLS])}")
    add("--rows", metavar="A,B", help="rows to measure instead of the usual ones")
    add("--gb", type=float, default=2.15, metavar="N", help="size of the checkpoint")
    add("--files", type=int, default=1, metavar="N", help="its files; plain clients read the first")


EXPERIMENT = Experiment(
    "remote",
    "an object store, beside plain clients and other loaders",
    """\
A checkpoint in DIRECTORY (memory, such as /dev/shm, so that no disk is
measured) is served by http-bench, which can be slow on purpose, or nginx:
  loopback      as fast as the machine can
  capped        30 ms before each answer, 90 MB/s a connection, 1 GB/s
  outage        the same, and no connection for 20 s in the middle of it
  tls, tls-128  over TLS 1.3 with AES-256-GCM and AES-128-GCM, from nginx
Rows: NAME@N has N requests in flight, NAME:cpu loads there, NAME+SITE has
the packages of --site SITE=DIR. Plain clients fill one buffer from the
first file: recv is the floor, object_store what anyone would write. Their
-ready rows and penstock-into fill memory that exists.""",
    Remote,
    add_options,
    {"device": "cpu", "rounds": 5, "networks": ",".join(NETWORKS), "rows": "", "loaders": "", "timeout": 300.0},
    ("object_store", "runai"),
)
