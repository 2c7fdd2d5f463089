"""From an object store on this machine: Penstock beside plain clients and other loaders, through several networks.

    cargo build --release --manifest-path benchmarks/http/Cargo.toml
    python -m benchmarks remote DIRECTORY --program TARGET/release/http-bench --output FILE.json
    python -m benchmarks remote /dev/shm/bench --program http-bench --server auto --gb 15.19 --files 4 --device cuda:0 \
        --networks loopback --rounds 3 --budget 540 --output FILE.json

A checkpoint is made in DIRECTORY (memory, such as /dev/shm, so that no disk is measured) and served from there by
``http-bench``, which sends with ``sendfile`` and can be slow on purpose (or by nginx: see ``object_servers``):

- ``loopback``: as fast as the machine can.
- ``capped``: as object stores are: 30 ms before each answer, 90 MB/s for each connection, a link of 1 GB/s.
- ``outage``: the same, and for 20 s in the middle of it every connection is lost and none can be made.
- ``tls``, ``tls-128``: as fast as the machine can, over TLS 1.3 with AES-256-GCM and AES-128-GCM; from nginx.

Every row runs in a fresh process, rows take turns, and the order changes from round to round. ``NAME@N`` is a row with
N requests in flight, for those that have to be told; ``NAME:cpu`` one that loads there rather than to ``--device``;
``NAME+SITE`` one with the packages of ``--site SITE=DIRECTORY``, such as another build of Penstock.
Plain clients fill one buffer from the first file: ``recv`` blocks in the system call, which is the floor;
``object_store`` is what anyone would write with that library. Their ``-ready`` rows, and ``penstock-into``, fill memory
that exists; the others get fresh memory from the kernel. Every loader's bytes are checked after the clock has stopped.

Where the JSON says ``ratios``, Penstock is compared round by round with the plain client of ``object_store`` that was
the fastest over all rounds, and ``ratios_runai`` with the setting of runai-model-streamer that was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import checkpoints, checksum, common, loaders, object_servers, processes

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
Sample = dict[str, Any]


class Bench:
    """One checkpoint behind one server program."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        options.directory.mkdir(parents=True, exist_ok=True)
        self.files = make(options.directory, options.gb, options.files)
        self.bytes = sum(file.stat().st_size for file in self.files)
        self.reference = work / "reference.json"
        self.reference.write_text(json.dumps(checksum.of_files(self.files)))
        self.began = time.monotonic()

    def sample(self, row: str, address: str, secure: object_servers.Tls | None = None) -> Sample:
        """Measures a row once."""
        row, _, site = row.partition("+")
        name, requests, device = parts(row, self.options.device)
        kind, _, memory = name.partition("-")
        # Those that fill memory which exists need none.
        fresh = device == "cpu" and memory not in {"ready", "into"}
        settle = common.enough_memory(self.bytes) if fresh else 0
        load = os.getloadavg()[0]
        if kind in PLAIN:
            if settle:
                common.settle_memory(settle)
            ready = ["--ready"] if memory == "ready" else []
            url = f"http://{address}/{self.files[0].name}"
            command = [self.options.program, PLAIN[kind], url, "--requests", requests, *ready]
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.options.timeout, check=False)
            if done.returncode:
                raise processes.FailedError(done.stderr.strip())
            return json.loads(done.stdout) | {"bytes_ok": None, "load_before": load}
        task = {
            "do": "load",
            "loader": name,
            "files": self.locations(name, address),
            "device": device,
            "reference": None if kind == "tensorizer" else str(self.reference),
            # Nothing is mapped here, and plain clients do not look at what they got within their time either.
            "touch": False,
            "settle": settle,
        }
        env = environment(address, requests, secure)
        if site:
            env |= {"PYTHONPATH": os.pathsep.join([self.options.site[site], os.environ.get("PYTHONPATH", "")])}
        done = processes.run(task, self.work, seconds=self.options.timeout, env=env)
        return done | {"load_before": load}

    def locations(self, name: str, address: str) -> list[str]:
        if name != "tensorizer":
            return [f"s3://bucket/{file.name}" for file in self.files]
        own = self.options.directory / "model.tensors"
        if not own.exists():
            files = [str(file) for file in self.files]
            processes.run({"do": "serialise", "files": files, "target": str(own)}, self.work, seconds=600)
        return [f"http://{address}/{own.name}"]

    def everything(self) -> list[dict[str, Any]]:
        measured: list[dict[str, Any]] = []
        for network in self.options.networks:
            usual = ROWS[network] if self.options.device == "cpu" else DEVICE_ROWS
            rows = [row for row in (self.options.rows or usual.split(",")) if self.possible(row)]
            taken: dict[str, list[Sample]] = {row: [] for row in rows}
            longest = 0.0
            for number in range(self.options.rounds):
                round_began = time.monotonic()
                left = (self.options.budget or float("inf")) - (round_began - self.began)
                if longest > left:
                    print(f"{network}: no time for round {number + 1} of {self.options.rounds}", file=sys.stderr)
                    break
                turn = number % len(rows)
                for row in rows[turn:] + rows[:turn]:
                    taken[row].append(self.attempt(number, network, row))
                longest = max(longest, time.monotonic() - round_began)
            measured += [summary(network, row, samples) for row, samples in taken.items()]
            of_network = [row for row in measured if row["network"] == network]
            against_object_store(of_network)
            against_runai(of_network)
        return measured

    def attempt(self, number: int, network: str, row: str) -> Sample:
        shape = NETWORKS.get(network, [])
        program = str(self.options.program) if shape else self.options.server
        secure = object_servers.tls(self.work, TLS[network]) if network in TLS else None
        with object_servers.serving(program, self.options.directory, shape, secure) as address:
            try:
                sample = self.sample(row, address, secure)
                said = f"{sample['bytes'] / sample['seconds'] / common.GB:.2f} GB/s"
            except (processes.FailedError, subprocess.TimeoutExpired) as error:
                sample = {"error": str(error)[:300]}
                said = sample["error"]
        print(f"round {number + 1} {network} {row}: {said}", file=sys.stderr)
        return sample

    def possible(self, row: str) -> bool:
        name, _, device = parts(row.partition("+")[0], self.options.device)
        if name.partition("-")[0] in PLAIN:
            return True
        reason = loaders.reason_to_skip(name, loaders.version(name, None), device)
        if reason:
            print(f"{row}: skipped, {reason}", file=sys.stderr)
        return reason is None


def make(directory: Path, gb: float, files: int) -> list[Path]:
    """The checkpoint's files under ``directory``, written if they are not there as asked for."""
    if files == 4:
        case = checkpoints.make("llama", directory / "shards", gb=gb, small=0, one_gb=0)
        # The server knows no directories.
        links = [directory / file.name for file in case.files]
        for link, file in zip(links, case.files, strict=True):
            link.unlink(missing_ok=True)
            link.hardlink_to(file)
        return links
    file, note = directory / "model.safetensors", directory / "made.json"
    if not note.exists() or json.loads(note.read_text()) != gb:
        common.write_checkpoint(file, checkpoints.llama(gb))
        (directory / "model.tensors").unlink(missing_ok=True)
        note.write_text(json.dumps(gb))
    return [file]


def parts(row: str, device: str) -> tuple[str, str, str]:
    """A row's loader, how many requests it is told to make, and where it loads to."""
    row, _, there = row.partition(":")
    name, _, requests = row.partition("@")
    return name, requests, there or device


def environment(address: str, requests: str, secure: object_servers.Tls | None = None) -> dict[str, str]:
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


def summary(network: str, what: str, samples: list[Sample]) -> dict[str, Any]:
    good = [sample for sample in samples if "seconds" in sample]
    row: dict[str, Any] = {"network": network, "what": what}
    if good:
        seconds = statistics.median(sample["seconds"] for sample in good)
        size = good[0]["bytes"]
        row |= {
            "bytes": size,
            "seconds": round(seconds, 4),
            "gb_per_s": round(size / seconds / common.GB, 3),
            "cpu_s_per_gb": round(statistics.median(sample["cpu_seconds"] for sample in good) / size * common.GB, 4),
            "all_seconds": [round(sample["seconds"], 4) for sample in samples if "seconds" in sample],
            "all_cpu_seconds": [round(sample["cpu_seconds"], 3) for sample in samples if "seconds" in sample],
            "load_before": [round(sample["load_before"], 2) for sample in good if "load_before" in sample],
            "bytes_ok": all(sample["bytes_ok"] for sample in good) if good[0].get("bytes_ok") is not None else None,
        }
        if "stats" in good[-1]:
            row["stats"] = good[-1]["stats"]
    errors = [sample["error"] for sample in samples if "error" in sample]
    return row | ({"error": errors[-1], "failed": len(errors)} if errors else {})


def against_object_store(rows: list[dict[str, Any]]) -> None:
    """Adds to Penstock's rows what they are beside object_store's, round by round: median, least and most."""
    for row in rows:
        ready = "-ready" if row["what"] == "penstock-into" else ""
        plain = [other for other in rows if other["what"].startswith(f"object_store{ready}@") and "error" not in other]
        if row["what"].startswith("penstock") and "error" not in row and plain:
            row["ratios"] = beside(row, min(plain, key=lambda other: other["seconds"]))


def against_runai(rows: list[dict[str, Any]]) -> None:
    """Adds to Penstock's rows what they are beside the setting of runai-model-streamer that was the fastest."""
    for row in rows:
        where = row["what"].partition(":")[2]
        rival = [
            other
            for other in rows
            if other["what"].startswith("runai") and other["what"].partition(":")[2] == where and "error" not in other
        ]
        if row["what"].startswith("penstock") and "error" not in row and rival:
            row["ratios_runai"] = beside(row, min(rival, key=lambda other: other["seconds"]))


def beside(row: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Speed and CPU time of one row in terms of another's, round by round: median, least and most."""
    ratios: dict[str, Any] = {"beside": other["what"]}
    # Plain clients may have read less.
    less = other["bytes"] / row["bytes"]
    for name, figures in (("speed", "all_seconds"), ("cpu", "all_cpu_seconds")):
        each = [less * ours / theirs for ours, theirs in zip(row[figures], other[figures], strict=False)]
        each = [1 / ratio for ratio in each] if name == "speed" else each
        ratios[name] = [round(number, 3) for number in (statistics.median(each), min(each), max(each))]
    return ratios


def table(result: dict[str, Any]) -> None:
    for network in dict.fromkeys(row["network"] for row in result["rows"]):
        print(f"\n{network}: {result['bytes'] / common.GB:.2f} GB to {result['device']}\n")
        print("| | seconds | GB/s | CPU s/GB | beside object_store: speed, CPU | beside runai: speed, CPU |")
        print("|---|---|---|---|---|---|")
        for row in result["rows"]:
            if row["network"] != network:
                continue
            if "seconds" not in row:
                print(f"| {row['what']} | failed: {row['error']} | | | | |")
                continue
            compared = [
                f"{ratios['speed'][0]:.2f}, {ratios['cpu'][0]:.2f} ({ratios['beside']})" if ratios else ""
                for ratios in (row.get("ratios"), row.get("ratios_runai"))
            ]
            wrong = " **wrong bytes**" if row["bytes_ok"] is False else ""
            print(
                f"| {row['what']}{wrong} | {row['seconds']:.3f} | {row['gb_per_s']:.2f} | {row['cpu_s_per_gb']:.3f} | "
                f"{compared[0]} | {compared[1]} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("directory", type=Path, metavar="DIRECTORY", help="where the checkpoint is made, in memory: /dev/shm/...")
    add("--program", type=Path, required=True, help="the http-bench that was built")
    add("--output", type=Path, help="where the result goes as JSON")
    add("--gb", type=float, default=2.15)
    add("--files", type=int, choices=(1, 4), default=1, help="files of the checkpoint; plain clients read the first")
    add("--server", default="http-bench", choices=("http-bench", "nginx", "auto"), help="auto: nginx if it is found")
    add("--device", default="cpu")
    add("--rounds", type=int, default=5)
    add("--networks", type=lambda text: text.split(","), default=list(NETWORKS), help=",".join([*NETWORKS, *TLS]))
    add("--site", action="append", default=[], metavar="NAME=DIRECTORY", help="packages of rows NAME+SITE")
    add("--rows", type=lambda text: text.split(","), help="rows to measure instead of the usual ones, by comma")
    add("--note", help="what else there is to know of the run, kept in the JSON")
    add("--budget", type=float, help="seconds after which no round is begun that would not end in time")
    add("--timeout", type=float, default=300.0, help="seconds after which a row is taken to hang")
    options = parser.parse_args()
    options.program = options.program.resolve()
    found = object_servers.nginx()
    if options.server == "nginx" and not found:
        parser.error("nginx is not installed")
    if options.server == "http-bench" and any(network in TLS for network in options.networks):
        parser.error("http-bench speaks no TLS: --server nginx")
    options.site = dict(site.split("=", 1) for site in options.site)
    options.server = found if found and options.server != "http-bench" else str(options.program)
    with tempfile.TemporaryDirectory(prefix="penstock-remote-") as work:
        bench = Bench(options, Path(work))
        rows = bench.everything()
    told = [f"--{name} {','.join(value)}" for name in ("networks", "rows") if (value := getattr(options, name))]
    command = f"python -m benchmarks remote DIRECTORY --program http-bench --gb {options.gb} --files {options.files}"
    result = {
        "command": " ".join([command, f"--rounds {options.rounds} --device {options.device}", *told]),
        "note": options.note,
        "machine": common.machine() | {"gpu": common.gpu_name() if options.device != "cpu" else None},
        "server": object_servers.version(options.server),
        "versions": {name: loaders.version(name, None) for name in ("penstock", "runai", "tensorizer")}
        | {"runai-model-streamer-s3": common.version_of("runai-model-streamer-s3")},
        "device": options.device,
        "bytes": bench.bytes,
        "files": len(bench.files),
        "rounds": options.rounds,
        "load_average": os.getloadavg(),
        "rows": rows,
    }
    table(result)
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
