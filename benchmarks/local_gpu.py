"""Local files to one GPU: Penstock and safetensors beside the limits of the machine.

    python benchmarks/local_gpu.py DIRECTORY [--gb 15.19] [--rounds 3] [--output FILE.json]

Makes a checkpoint of Llama-3-8B's shapes in four files (or uses the one that is there), and loads it in fresh processes
whose CUDA context exists, from a cold, half cold and warm page cache and from tmpfs. Every tensor's bytes are checked
once for every state: sums of the bytes as integers on the GPU, against the same sums of the files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import common

LOADERS = ["penstock", "penstock-second", "safetensors"]


def checksum(tensors: dict[str, Any]) -> dict[str, int]:
    """Order-sensitive sums of the tensors' bytes, computed where the tensors are."""
    import torch

    sums = {}
    for name, tensor in tensors.items():
        words = tensor.reshape(-1).view(torch.int16).to(torch.int64)
        weights = torch.arange(words.numel(), device=words.device, dtype=torch.int64) % 65_521 + 1
        sums[name] = int((words * weights).sum())
    return sums


def child(directory: str, what: str, check: bool) -> dict[str, Any]:
    import resource

    import torch

    torch.empty(1 << 20, device="cuda").fill_(1)
    torch.cuda.synchronize()
    files = sorted(str(path) for path in Path(directory).glob("*.safetensors"))
    if what == "pcie":
        host = torch.empty(2 << 30, dtype=torch.uint8, pin_memory=True)
        device = torch.empty_like(host, device="cuda")
        best = 1e9
        for _ in range(4):
            began = time.perf_counter()
            device.copy_(host, non_blocking=True)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        return {"gb_per_s": host.nbytes / best / common.GB}
    stats: dict[str, Any] = {}
    if what.startswith("penstock"):
        import penstock

        if what == "penstock-second":
            penstock.open(directory).load(device="cuda")
            torch.cuda.empty_cache()
        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        ckpt = penstock.open(directory)
        tensors = ckpt.load(device="cuda")
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        stats = ckpt.stats.as_dict() if ckpt.stats else {}
    else:
        import safetensors.torch

        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        tensors = {}
        for file in files:
            tensors |= safetensors.torch.load_file(file, device="cuda")
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": seconds,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_rss_growth_mib": (after.ru_maxrss - before.ru_maxrss) / 1024,
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "checksum": checksum(tensors) if check else None,
        "stats": stats,
    }


def direct_read(files: list[Path], threads: int, block: int) -> float:
    """GB/s of plain O_DIRECT reads of the files to buffers that are ready: the disk's limit."""
    import mmap
    import os
    import threading

    jobs = iter([(file, at) for file in files for at in range(0, file.stat().st_size, block)])
    lock = threading.Lock()

    def work() -> None:
        buffer = mmap.mmap(-1, block)
        handles: dict[Path, int] = {}
        while True:
            with lock:
                job = next(jobs, None)
            if job is None:
                break
            file, at = job
            if file not in handles:
                handles[file] = os.open(file, os.O_RDONLY | os.O_DIRECT)
            os.preadv(handles[file], [buffer], at)
        for handle in handles.values():
            os.close(handle)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(file.stat().st_size for file in files) / (time.perf_counter() - began) / common.GB


def make(directory: Path, gb: float) -> list[Path]:
    """Llama-3-8B's shapes in four files; fewer layers where less is wanted."""
    directory.mkdir(parents=True, exist_ok=True)
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files
    layers = max(1, round((gb - 1.05) / 0.4418))
    shapes = list(common.llama_shapes(layers, 4096, 14336, 128256, 1024).items())
    total = sum(2 * rows * (rest[0] if rest else 1) for _, (rows, *rest) in shapes)
    shards: list[dict[str, tuple[int, ...]]] = [{} for _ in range(4)]
    done = 0
    for name, shape in shapes:
        shards[min(3, done * 4 // total)][name] = shape
        done += 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
    for number, shard in enumerate(shards):
        path = directory / f"model-{number + 1:05}-of-00004.safetensors"
        common.write_checkpoint(path, shard, seed=number)
        files.append(path)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gb", type=float, default=15.19)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "CHECK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, check = options.child
        print(json.dumps(child(str(options.directory), what, check == "check")))
        return
    files = make(options.directory, options.gb)
    memory = Path("/dev/shm/penstock-benchmark")
    results: dict[str, Any] = {
        "command": f"python benchmarks/local_gpu.py DIRECTORY --gb {options.gb} --rounds {options.rounds}",
        "machine": common.machine() | {"gpu": gpu_name()},
        "rows": [],
    }
    script = Path(__file__)
    results["pcie_gb_per_s"] = common.measure(script, str(options.directory), "--child", "pcie", "no")["gb_per_s"]
    common.set_cache(files, "cold")
    results["disk_gb_per_s"] = max(direct_read(files, threads, 4 << 20) for threads in (4, 8))
    print(f"PCIe {results['pcie_gb_per_s']:.1f} GB/s, disk {results['disk_gb_per_s']:.2f} GB/s")
    reference: dict[str, int] | None = None
    for state in ("cold", "half", "warm", "tmpfs"):
        directory = options.directory
        if state == "tmpfs":
            shutil.copytree(options.directory, memory, dirs_exist_ok=True)
            directory = memory
        samples: dict[str, list[dict[str, Any]]] = {}
        for number in range(options.rounds):
            for what in LOADERS:
                if what == "penstock-second" and state in {"cold", "half"}:
                    continue
                if state != "tmpfs":
                    common.set_cache(files, state)
                check = "check" if number == 0 else "no"
                sample = common.measure(script, str(directory), "--child", what, check)
                sums = sample.pop("checksum")
                reference = reference or sums
                if sums is not None and sums != reference:
                    raise SystemExit(f"{what} ({state}) loaded other bytes than the first loader")
                samples.setdefault(what, []).append(sample)
                print(f"{state} {what}: {sample['seconds']:.3f} s {json.dumps(sample['stats'])}", flush=True)
        for what, taken in samples.items():
            seconds = statistics.median(sample["seconds"] for sample in taken)
            results["rows"].append(
                {
                    "state": state,
                    "loader": what,
                    "seconds": round(seconds, 3),
                    "gb_per_s": round(taken[0]["bytes"] / seconds / common.GB, 2),
                    "all_seconds": [round(sample["seconds"], 3) for sample in taken],
                    "cpu_seconds": round(statistics.median(sample["cpu_seconds"] for sample in taken), 2),
                    "peak_rss_growth_mib": round(max(sample["peak_rss_growth_mib"] for sample in taken)),
                    "stats": taken[-1]["stats"],
                }
            )
    shutil.rmtree(memory, ignore_errors=True)
    print(f"\n{'state':6} {'loader':16} {'seconds':>8} {'GB/s':>7} {'CPU s':>6} {'peak RSS +':>11}")
    for row in results["rows"]:
        print(
            f"{row['state']:6} {row['loader']:16} {row['seconds']:8.3f} {row['gb_per_s']:7.2f} "
            f"{row['cpu_seconds']:6.2f} {row['peak_rss_growth_mib']:>7} MiB"
        )
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


def gpu_name() -> str | None:
    import subprocess

    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    main()
