"""The disk cache: what the first load costs, and what the second gains.

Four loads to the CPU in each round, each in a fresh process: over HTTP without a cache; the same with an empty cache;
from the filled cache; and the same file from the same disk, which is the limit. Local files are cold (proved).

    cargo build --release --manifest-path benchmarks/http/Cargo.toml
    python -m benchmarks disk_cache --server benchmarks/http/target/release/http-bench --directory /mnt/nvme/bench \
        --gb 2 --link-mb 1000 --connection-mb 90 --latency-ms 30 --rounds 5 --output cache.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import common

_LOAD = """
import json, resource, sys, time
import penstock

url, cache = sys.argv[1:3]
began = time.perf_counter()
ckpt = penstock.open(url, cache_dir=cache)
tensors = ckpt.load(framework="np")
seconds = time.perf_counter() - began
used = resource.getrusage(resource.RUSAGE_SELF)
flushed = time.perf_counter()
assert penstock.flush_disk_cache(300)
stats = ckpt.stats
done = {"seconds": seconds, "gb_per_s": ckpt.nbytes / seconds / 1e9}
done["cpu_s_per_gb"] = (used.ru_utime + used.ru_stime) / ckpt.nbytes * 1e9
done["flush_seconds"] = time.perf_counter() - flushed
done |= {"network_bytes": stats.network_bytes, "storage": stats.storage, "notes": stats.notes, "sum": None}
if sys.argv[3] == "sum":
    done["sum"] = int(sum(int(t.view("u1").sum(dtype="u8")) for t in tensors.values()))
print(json.dumps(done))
"""


def load(where: str, cache: str, check: bool) -> dict[str, Any]:
    """One load in a process of its own."""
    command = [sys.executable, "-c", _LOAD, where, cache, "sum" if check else "no"]
    done: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return done


COMPARED = (
    ("the first load's cost", "remote, filling the cache", "remote"),
    ("the second load beside the local file", "from the cache", "local file"),
)


def ratios(rounds: list[dict[str, Any]]) -> dict[str, list[float]]:
    """How long one way took in terms of another in the same round: median, least and most."""
    found = {}
    for what, above, below in COMPARED:
        each = [done[above]["seconds"] / done[below]["seconds"] for done in rounds]
        found[what] = [round(number, 3) for number in (statistics.median(each), min(each), max(each))]
    return found


def report(rounds: list[dict[str, Any]]) -> None:
    """Prints medians, and ratios within a round."""
    for way in rounds[0]:
        rates = [done[way]["gb_per_s"] for done in rounds]
        cpu = statistics.median(done[way]["cpu_s_per_gb"] for done in rounds)
        print(f"{way:28} {statistics.median(rates):7.3f} GB/s ({min(rates):.3f}-{max(rates):.3f}) {cpu:6.3f} CPU-s/GB")
    gaps = [done["from the cache"]["network_bytes"] / 1e9 for done in rounds]
    print(f"the first load left out {statistics.median(gaps):.3f} GB ({max(gaps):.3f} at most): no buffer was free")
    for what, (median, least, most) in ratios(rounds).items():
        print(f"{what}: {median:.3f} of its time ({least:.3f}-{most:.3f})")


def main() -> None:
    """Runs the rounds and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="the http-bench program")
    parser.add_argument("--directory", type=Path, required=True, help="on the disk that holds the cache")
    parser.add_argument("--source", type=Path, help="where the server reads from; memory, so that it is not the disk")
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    for option in ("--link-mb", "--connection-mb", "--latency-ms"):
        parser.add_argument(option)
    args = parser.parse_args()
    source = args.source or Path("/dev/shm/penstock-disk-cache")
    cache, local = args.directory / "cache", args.directory / "model.safetensors"
    source.mkdir(parents=True, exist_ok=True)
    args.directory.mkdir(parents=True, exist_ok=True)
    served, file_system = source / "model.safetensors", common.filesystem(args.directory)
    shapes = {f"w{i}": (4096, 4096) for i in range(max(1, round(args.gb * 1e9 / (4096 * 4096 * 2))))}
    common.write_checkpoint(served, shapes)
    shutil.copyfile(served, local)
    shape = [
        word
        for option in ("link_mb", "connection_mb", "latency_ms")
        if (value := getattr(args, option)) is not None
        for word in (f"--{option.replace('_', '-')}", value)
    ]
    server = subprocess.Popen([args.server, "serve", str(source), *shape], stdout=subprocess.PIPE, text=True)
    rounds: list[dict[str, Any]] = []
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}/model.safetensors"
        load(url, "", check=False)
        for number in range(args.rounds):
            check = number == 0
            shutil.rmtree(cache, ignore_errors=True)
            ways = {"remote": load(url, "", check), "remote, filling the cache": load(url, str(cache), check)}
            data = next(cache.glob("*/*/data"))
            # By turns, as a disk may be slower after what came before.
            second = [("from the cache", url, str(cache), data), ("local file", str(local), "", local)]
            for way, where, cached, file in second if number % 2 == 0 else reversed(second):
                common.set_cache([file], "cold")
                ways[way] = load(where, cached, check)
            assert len({way["sum"] for way in ways.values()}) == 1, "the bytes differ"
            rounds.append(ways)
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(source)
        shutil.rmtree(cache, ignore_errors=True)
        local.unlink(missing_ok=True)
    report(rounds)
    if args.output:
        command = f"python -m benchmarks disk_cache --server http-bench --directory DIRECTORY --gb {args.gb}"
        result = {
            "command": " ".join([command, *shape, f"--rounds {args.rounds}"]),
            "machine": common.machine(),
            "file_system": file_system,
            "shape": shape,
            "ratios": ratios(rounds),
            "load_average": os.getloadavg(),
            "rounds": rounds,
        }
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
