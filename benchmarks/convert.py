"""Converts results of before ``penstock-bench/1`` to it, once: ``python -m benchmarks.convert FILE...``.

No proof is invented: where a file does not say how much was cached before a measurement, ``cache`` is null.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .bench import result

LOADERS = {
    "stock": "transformers",
    "patched": "transformers-patched",
    "penstock": "transformers-penstock",
    "mapped": "transformers-mapped",
}


def sample(axes: dict[str, str], number: int, item: dict[str, Any], cached: float | None, run: int = 0) -> dict:
    cache = None if cached is None else {"before": cached}
    made = {"run": run, "round": number, "axes": axes, "cache": cache}
    if "error" in item:
        return made | {"error": item["error"]}
    return made | result.sample(item)


def less(item: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in keys}


def spread(item: dict[str, Any], number: int) -> dict[str, Any]:
    """What a row of medians had of one round."""
    fields = {"all_seconds": "seconds", "all_cpu_seconds": "cpu_seconds", "load_before": "load_before"}
    kept = less(item, *fields, *fields.values(), "network", "what", "state", "ratios", "ratios_runai", "gb_per_s")
    kept = less(kept, "cpu_s_per_gb", "error", "failed", "peak_rss_over_checkpoint_mib")
    found = {new: item[old][number] for old, new in fields.items() if number < len(item.get(old, []))}
    if "cpu_seconds" in item:
        kept["cpu_seconds_median"] = item["cpu_seconds"]
    if "peak_rss_over_checkpoint_mib" in item:
        kept["peak_rss_over_checkpoint_mib"] = item["peak_rss_over_checkpoint_mib"]
    return kept | found


def convert(name: str, old: dict[str, Any]) -> dict[str, Any]:  # noqa: PLR0912, PLR0915 - used once
    made = result.empty(name)
    samples = made["samples"]
    if "runs" in old:
        for run in old["runs"]:
            machine = dict(run["machine"])
            versions = machine.pop("versions", {})
            made["runs"].append(run | {"machine": machine, "versions": versions})
        made["cases"] = old["cases"]
        for item in old["measurements"]:
            axes = {key: item[key] for key in ("case", "state", "loader")}
            kept = less(item, *axes, "run", "round", "cached")
            samples.append(sample(axes, item["round"], kept, item.get("cached"), item["run"]))
        for item in old["limits"]:
            axes = {key: item[key] for key in ("case", "state", "limit", "setting") if item[key] is not None}
            kept = less(item, "case", "state", "limit", "setting", "run", "round")
            samples.append(sample(axes, item["round"], kept, None, item["run"]))
        return made
    machine = dict(old["machine"])
    versions = {**machine.pop("versions", {}), **old.get("versions", {})}
    lists = ("measurements", "rows", "rounds", "samples", "results", "loads", "case", "summary")
    run = less(old, *lists, "machine", "versions") | {"machine": machine, "versions": versions}
    run.setdefault("command", f"not kept: {name}")
    made["runs"].append(run)
    if "bytes" in old:
        made["cases"]["checkpoint"] = {"bytes": old["bytes"]} | ({"files": old["files"]} if "files" in old else {})
    at = {"case": "checkpoint"}
    if name in {"engines", "engines_vllm"}:
        for item in old["measurements"]:
            loader = LOADERS[item["loader"]] if name == "engines" else f"vllm-{item['format']}"
            kept = less(item, "loader", "format", "state", "round", "cached", "tokens", "parameters")
            if "tokens" in item:
                kept["outcome"] = [item["tokens"], item["parameters"]]
            if name == "engines_vllm" and "ready_seconds" in item:
                kept["seconds"] = round(item["ready_seconds"] - item["import_seconds"], 2)
            axes = at | {"state": item["state"], "loader": loader}
            samples.append(sample(axes, item["round"], kept, item.get("cached")))
    elif name in {"readers", "blocks", "disk"}:
        for item in old["measurements"]:
            loader, state = item.get("name"), item.get("state", item.get("files", "cold"))
            if name == "readers":
                loader = "penstock" if item["readers"] == "found" else f"penstock:readers={item['readers']}"
            elif name == "blocks":
                kind = item.get("loader", "penstock")
                loader = f"{kind}:readers={item['readers']}+block_bytes={item['block_mib'] << 20}"
            axes = at | {"state": state, "loader": loader}
            kept = less(item, "name", "state", "files", "round", "readers", "loader")
            samples.append(sample(axes, item["round"], kept, None))
    elif name == "disk_cache":
        names = {"remote, filling the cache": "filling", "from the cache": "cached", "local file": "local"}
        for number, ways in enumerate(old["rounds"]):
            for way, item in ways.items():
                axes = at | {"network": "http", "loader": names.get(way, way)}
                samples.append(sample(axes, number, item, None))
    elif name == "pairs":
        made["cases"] = {"checkpoint": old["case"]}
        for item in old["samples"]:
            axes = at | {"state": item["state"], "loader": f"penstock@{item['build']}"}
            samples.append(sample(axes, item["pair"], less(item, "state", "build", "pair"), None))
    elif name == "sharing":
        for number, ranks in enumerate(zip(*old["loads"], strict=True)):
            state = "cold" if ranks[0]["cold"] else "warm"
            axes = at | {"state": state, "loader": "together" if ranks[0]["together"] else "apart"}
            item = {
                "seconds": max(rank["seconds"] for rank in ranks),
                "read_bytes": sum(rank["read_bytes"] for rank in ranks),
                "bytes": old["bytes"],
                "ranks": list(ranks),
            }
            samples.append(sample(axes, number // 4, item, None))
    elif name == "io_engines":
        run["summary"] = old["summary"]
        for item in old["rows"]:
            axes = {"pattern": str(item["pattern"]), "loader": str(item["engine"])}
            samples.append(sample(axes, 0, item, None))
    else:  # local_cpu, remote
        for row in old["rows"]:
            place = {key: row[key] for key in ("state", "network") if key in row}
            axes = at | place | {"loader": row["what"]}
            for number in range(len(row.get("all_seconds", []))):
                samples.append(sample(axes, number, spread(row, number), None))
            for _ in range(row.get("failed", 0)):
                samples.append(sample(axes, 0, {"error": row["error"]}, None))
    return made


KINDS = {
    "io-engines": "io_engines", "disk-cache": "disk_cache", "fuse-readers": "readers", "local-cpu": "local_cpu",
    "remote": "remote", "sharing": "sharing", "rivals": "rivals", "transformers": "engines", "vllm": "engines_vllm",
    "readers": "readers", "blocks": "blocks", "disk": "disk", "pairs": "pairs",
}  # fmt: skip

if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        old = json.loads(path.read_text())
        if "schema" not in old:
            kind = next(KINDS[key] for key in KINDS if key in path.name)
            result.write(path, convert(kind, old))
