"""The result of a run, as it is written to JSON: the schema ``penstock-bench/1``.

    schema      "penstock-bench/1"
    experiment  its name
    runs        of each run: command, machine, versions; and started, device, options, skipped, unmeasured, notes
    cases       checkpoints by name: bytes, tensors, files
    samples     every measurement, failures included: run, round, axes, cache, and either figures and facts, or error

``axes`` say what was measured: ``case``, ``state`` or ``network``, ``loader``; of a limit of the machine, ``limit`` and
``setting``. ``figures`` are numbers, ``facts`` anything else that is known of the sample. ``cache`` proves the state of
the page cache: the share of the files that was cached right ``before`` the measurement, by ``mincore(2)``, and, where
the kernel counts it, the share that was read from the ``device`` by it; None where nothing was proved. A sample without
proof can be read, but neither plotted nor published as cold, half cached or warm.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMA = "penstock-bench/1"
# The share of the files that may be cached in each state. tmpfs is memory, and needs no proof.
CACHED = {"cold": (0.0, 0.01), "cold-machine": (0.0, 0.01), "half": (0.45, 0.55), "warm": (0.99, 1.0)}
# The share of the files that a device must have given meanwhile. More is the loader's choice: it may pass the cache by.
READ = {"cold": 0.9, "half": 0.4}
Result = dict[str, Any]
Sample = dict[str, Any]


class SchemaError(ValueError):
    """A document that is no result of this version of the schema; says where and why."""


class UnprovedError(ValueError):
    """A measurement that does not show the state of the page cache that it was made in."""


def empty(experiment: str) -> Result:
    return {"schema": SCHEMA, "experiment": experiment, "runs": [], "cases": {}, "samples": []}


def sample(answer: dict[str, Any]) -> Sample:
    """The figures and facts of a task's answer."""
    figures = {key: value for key, value in answer.items() if _is_number(value)}
    return {"figures": figures, "facts": {key: value for key, value in answer.items() if key not in figures}}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def validate(document: Any) -> Result:
    """The document, if it is of the schema.

    Raises:
        SchemaError: it is not.
    """

    def need(holds: bool, where: str, what: str) -> None:
        if not holds:
            raise SchemaError(f"{where}: {what}")

    need(isinstance(document, dict), "result", "no JSON object")
    need(document.get("schema") == SCHEMA, "schema", f"{document.get('schema')!r} instead of {SCHEMA!r}")
    kinds = {"experiment": str, "runs": list, "cases": dict, "samples": list}
    for key, kind in kinds.items():
        need(isinstance(document.get(key), kind), key, f"no {kind.__name__}")
    for number, run in enumerate(document["runs"]):
        for key, kind in {"command": str, "machine": dict, "versions": dict}.items():
            need(isinstance(run, dict) and isinstance(run.get(key), kind), f"runs[{number}].{key}", "missing")
    for number, item in enumerate(document["samples"]):
        where = f"samples[{number}]"
        need(isinstance(item, dict), where, "no JSON object")
        need(item.get("run") in range(len(document["runs"])), f"{where}.run", "no such run")
        need(isinstance(item.get("round"), int), f"{where}.round", "no number")
        axes, cache = item.get("axes"), item.get("cache")
        need(isinstance(axes, dict) and bool(axes), f"{where}.axes", "missing")
        need(all(isinstance(value, str) for value in axes.values()), f"{where}.axes", "a value is no string")
        need("cache" in item, f"{where}.cache", "missing; null says that nothing was proved")
        proof = cache is None or (isinstance(cache, dict) and _is_number(cache.get("before")))
        need(proof and (cache is None or 0 <= cache["before"] <= 1), f"{where}.cache", "no share before")
        need(("figures" in item) != ("error" in item), where, "either figures or error")
        need(all(map(_is_number, item.get("figures", {}).values())), f"{where}.figures", "a value is no number")
    result: Result = document
    return result


def prove(item: Sample) -> None:
    """Raises UnprovedError unless the sample's state of the page cache needs no proof, or has it."""
    state = item["axes"].get("state")
    if state not in CACHED:
        return
    least, most = CACHED[state]
    share = (item["cache"] or {}).get("before")
    if share is None or not least <= share <= most:
        raise UnprovedError(f"round {item['round']} of {item['axes']} is {state}, but {share} of it was cached")
    read = item["cache"].get("device")
    if read is not None and read < READ.get(state, 0.0):
        raise UnprovedError(
            f"round {item['round']} of {item['axes']} is {state}, but {read} of it came from the device"
        )


def is_proved(item: Sample) -> bool:
    """Whether the sample may be plotted."""
    try:
        prove(item)
    except UnprovedError:
        return False
    return True


def read(path: Path) -> Result:
    """A result from a file.

    Raises:
        SchemaError: the file holds something else.
    """
    try:
        return validate(json.loads(path.read_text()))
    except json.JSONDecodeError as error:
        raise SchemaError(f"{path.name}: {error}") from error
    except SchemaError as error:
        raise SchemaError(f"{path.name}: {error}") from error


def write(path: Path, result: Result) -> None:
    """Writes it whole or not at all: a machine may be taken away before the last measurement."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(validate(result), indent=1) + "\n")
    partial.rename(path)


def merge(results: list[Result]) -> Result:
    """One result of several, which must be of the same experiment, machine, device and checkpoints."""
    merged = empty(results[0]["experiment"])
    for result in results:
        check_same(merged, result["runs"], result["cases"])
        first = len(merged["runs"])
        merged["runs"] += result["runs"]
        merged["cases"] |= result["cases"]
        merged["samples"] += [item | {"run": item["run"] + first} for item in result["samples"]]
    return merged


def check_same(result: Result, runs: list[dict[str, Any]], cases: dict[str, Any]) -> None:
    """Raises ValueError where runs or cases are not comparable with those of the result."""
    for run in runs:
        for other in result["runs"][:1]:
            here, there = _hardware(run), _hardware(other)
            if here != there:
                raise ValueError(f"results of different machines are not compared: {here} and {there}")
    for name, case in cases.items():
        if result["cases"].get(name, case) != case:
            raise ValueError(f"the case {name} is not the same: {case} and {result['cases'][name]}")


def _hardware(run: dict[str, Any]) -> dict[str, Any]:
    """What must be equal for figures to be compared. A kernel or a driver may differ: each run says its own."""
    machine = run["machine"]
    same = {key: machine.get(key) for key in ("cpu", "cores", "filesystem")}
    return same | {"device": run.get("device"), "gpu": (machine.get("gpu") or "").split(",")[0]}
