"""From an object store on this machine: Penstock beside plain clients and other loaders, through several networks.

    cargo build --release --manifest-path benchmarks/http/Cargo.toml
    python benchmarks/remote.py DIRECTORY --program TARGET/release/http-bench --output FILE.json
    python benchmarks/remote.py DIRECTORY --program http-bench --gb 15.19 --device cuda:0 --networks loopback

A checkpoint is made in DIRECTORY (memory, such as /dev/shm, so that no disk is measured) and served from there by
``http-bench``, which sends with ``sendfile`` and can be slow on purpose:

- ``loopback``: as fast as the machine can.
- ``capped``: as object stores are: 30 ms before each answer, 90 MB/s for each connection, a link of 1 GB/s.
- ``outage``: the same, and for 20 s in the middle of it every connection is lost and none can be made.

Every row runs in a fresh process, rows take turns, and the order changes from round to round. ``NAME@N`` is a row with
N requests in flight, for those that have to be told. Plain clients fill one buffer: ``recv`` blocks in the system call,
which is the floor; ``object_store`` is what anyone would write with that library. Their ``-ready`` rows, and
``penstock-into``, fill memory that exists; the others get fresh memory from the kernel. Where the JSON says ``ratios``,
Penstock is compared round by round with the row of ``object_store`` that was the fastest over all rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import checkpoints
import checksum
import common
import loaders
import processes

CAPPED = ["--latency-ms", "30", "--connection-mb", "90", "--link-mb", "1000"]
NETWORKS = {"loopback": [], "capped": CAPPED, "outage": [*CAPPED, "--outage-after", "0.5", "--outage", "20"]}
PLAIN = {"recv": "recv", "object_store": "stream"}
ROWS = {
    "loopback": "recv-ready@4,object_store@4,object_store@16,object_store-ready@4,object_store-ready@16,"
    "object_store-ready@32,penstock,penstock-into,runai@8,runai@16,tensorizer@8",
    "capped": "object_store@4,object_store@16,object_store@32,penstock,runai@4,runai@8,runai@16,runai@32,"
    "tensorizer@8,tensorizer@16,tensorizer@32",
    "outage": "penstock",
}
Sample = dict[str, Any]


class Bench:
    """One checkpoint behind one server program."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        options.directory.mkdir(parents=True, exist_ok=True)
        self.file = options.directory / "model.safetensors"
        note = options.directory / "made.json"
        if not note.exists() or json.loads(note.read_text()) != options.gb:
            common.write_checkpoint(self.file, checkpoints.llama(options.gb))
            note.write_text(json.dumps(options.gb))
        self.bytes = self.file.stat().st_size
        self.reference = work / "reference.json"
        self.reference.write_text(json.dumps(checksum.of_files([self.file])))

    @contextlib.contextmanager
    def serving(self, network: str) -> Iterator[str]:
        """The server's address, while it runs."""
        command = [str(self.options.program), "serve", str(self.options.directory), *NETWORKS[network]]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                yield f"127.0.0.1:{server.stdout.readline().strip()}"
            finally:
                server.kill()

    def sample(self, row: str, address: str) -> Sample:
        """Measures a row once."""
        name, _, requests = row.partition("@")
        kind, _, memory = name.partition("-")
        common.settle_memory(self.bytes + self.bytes // 4)
        if kind in PLAIN:
            ready = ["--ready"] if memory == "ready" else []
            url = f"http://{address}/{self.file.name}"
            command = [self.options.program, PLAIN[kind], url, "--requests", requests, *ready]
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.options.timeout, check=False)
            if done.returncode:
                raise processes.FailedError(done.stderr.strip())
            return json.loads(done.stdout) | {"bytes_ok": None}
        task = {
            "do": "load",
            "loader": name,
            "files": [self.location(name, address)],
            "device": self.options.device,
            "reference": None if kind == "tensorizer" else str(self.reference),
        }
        return processes.run(task, self.work, seconds=self.options.timeout, env=environment(address, requests))

    def location(self, name: str, address: str) -> str:
        if name != "tensorizer":
            return f"s3://bucket/{self.file.name}"
        own = self.file.with_suffix(".tensors")
        if not own.exists():
            files = [str(self.file)]
            processes.run({"do": "write", "files": files, "target": str(own)}, self.work, seconds=600)
        return f"http://{address}/{own.name}"

    def everything(self) -> list[dict[str, Any]]:
        measured: list[dict[str, Any]] = []
        for network in self.options.networks:
            rows = [row for row in (self.options.rows or ROWS[network].split(",")) if self.possible(row)]
            taken: dict[str, list[Sample]] = {row: [] for row in rows}
            for number in range(self.options.rounds):
                turn = number % len(rows)
                for row in rows[turn:] + rows[:turn]:
                    with self.serving(network) as address:
                        try:
                            sample = self.sample(row, address)
                            said = f"{sample['bytes'] / sample['seconds'] / common.GB:.2f} GB/s"
                        except (processes.FailedError, subprocess.TimeoutExpired) as error:
                            sample = {"error": str(error)[:300]}
                            said = sample["error"]
                    taken[row].append(sample)
                    print(f"round {number + 1} {network} {row}: {said}", file=sys.stderr)
            measured += [summary(network, row, samples) for row, samples in taken.items()]
            against_object_store([row for row in measured if row["network"] == network])
        return measured

    def possible(self, row: str) -> bool:
        name, _, _ = row.partition("@")
        if name.partition("-")[0] in PLAIN:
            return True
        reason = loaders.reason_to_skip(name, loaders.version(name, None), self.options.device)
        if reason:
            print(f"{row}: skipped, {reason}", file=sys.stderr)
        return reason is None


def environment(address: str, requests: str) -> dict[str, str]:
    """What leads loaders to the server, and tells those that must be told how many requests to have in flight."""
    told = ("RUNAI_STREAMER_CONCURRENCY", "TENSORIZER_READERS", "PENSTOCK_READERS") if requests else ()
    return dict.fromkeys(told, requests) | {
        "AWS_ENDPOINT_URL": f"http://{address}",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        # Its usual second is not enough for a connection that is slow on purpose.
        "RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS": "60000",
    }


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
            "bytes_ok": all(sample["bytes_ok"] for sample in good) if good[0]["bytes_ok"] is not None else None,
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
        if not row["what"].startswith("penstock") or "error" in row or not plain:
            continue
        best = min(plain, key=lambda other: other["seconds"])
        ratios = {"beside": best["what"]}
        for name, figures in (("speed", "all_seconds"), ("cpu", "all_cpu_seconds")):
            each = [ours / theirs for ours, theirs in zip(row[figures], best[figures], strict=False)]
            each = [1 / ratio for ratio in each] if name == "speed" else each
            ratios[name] = [round(number, 3) for number in (statistics.median(each), min(each), max(each))]
        row["ratios"] = ratios


def table(result: dict[str, Any]) -> None:
    for network in dict.fromkeys(row["network"] for row in result["rows"]):
        print(f"\n{network}: {result['bytes'] / common.GB:.2f} GB to {result['device']}\n")
        print("| | seconds | GB/s | CPU s/GB | beside object_store: speed, CPU |")
        print("|---|---|---|---|---|")
        for row in result["rows"]:
            if row["network"] != network:
                continue
            if "seconds" not in row:
                print(f"| {row['what']} | failed: {row['error']} | | | |")
                continue
            ratios = row.get("ratios")
            beside = f"{ratios['speed'][0]:.2f}, {ratios['cpu'][0]:.2f} ({ratios['beside']})" if ratios else ""
            wrong = " **wrong bytes**" if row["bytes_ok"] is False else ""
            print(
                f"| {row['what']}{wrong} | {row['seconds']:.3f} | {row['gb_per_s']:.2f} | {row['cpu_s_per_gb']:.3f} | "
                f"{beside} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("directory", type=Path, metavar="DIRECTORY", help="where the checkpoint is made, in memory: /dev/shm/...")
    add("--program", type=Path, required=True, help="the http-bench that was built")
    add("--output", type=Path, help="where the result goes as JSON")
    add("--gb", type=float, default=2.15)
    add("--device", default="cpu")
    add("--rounds", type=int, default=5)
    add("--networks", type=lambda text: text.split(","), default=list(NETWORKS), help=",".join(NETWORKS))
    add("--rows", type=lambda text: text.split(","), help="rows to measure instead of the usual ones, by comma")
    add("--timeout", type=float, default=300.0, help="seconds after which a row is taken to hang")
    options = parser.parse_args()
    options.program = options.program.resolve()
    with tempfile.TemporaryDirectory(prefix="penstock-remote-") as work:
        bench = Bench(options, Path(work))
        rows = bench.everything()
    told = [f"--{name} {','.join(value)}" for name in ("networks", "rows") if (value := getattr(options, name))]
    command = f"python benchmarks/remote.py DIRECTORY --program http-bench --gb {options.gb} --rounds {options.rounds}"
    result = {
        "command": " ".join([command, f"--device {options.device}", *told]),
        "machine": common.machine() | {"gpu": common.gpu_name() if options.device != "cpu" else None},
        "versions": {name: loaders.version(name, None) for name in ("penstock", "runai", "tensorizer")},
        "device": options.device,
        "bytes": bench.bytes,
        "rounds": options.rounds,
        "load_average": os.getloadavg(),
        "rows": rows,
    }
    table(result)
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
