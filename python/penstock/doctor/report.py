"""A diagnosis for programs (``as_dict``) and for a ticket (``anonymous``), which names no path, host or user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from penstock.doctor.diagnosis import findings
from penstock.doctor.facts import Facts
from penstock.units import size

SCHEMA = 1


def as_dict(facts: Facts) -> dict[str, Any]:
    """Facts and findings, for JSON. Sizes in bytes, times in seconds, rates in GB/s; what is not known is None."""
    found = asdict(facts)
    judged = [
        {"code": finding.code, "severity": finding.severity, "cause": cause, "remedy": remedy}
        for finding in findings(facts)
        for cause, remedy in [finding.said()]
    ]
    plain: dict[str, Any] = _plain({"schema": SCHEMA, **found, "findings": judged})
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(of) for key, of in value.items()}
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if isinstance(value, (list, tuple)):
        return [_plain(of) for of in value]
    return round(value, 6) if isinstance(value, float) else value


def rates(facts: Facts) -> dict[str, float]:
    """What was measured, by what people call it."""
    of = facts.rates
    named = {
        "disk, direct": of.direct,
        "disk, buffered": of.buffered,
        "page cache": of.page_cache,
        "fresh memory": facts.prediction.fresh_memory if facts.prediction else None,
        "pinned to GPU": of.h2d,
        "pageable to GPU": of.pageable,
    }
    return {name: rate for name, rate in named.items() if rate is not None}


def predicted(facts: Facts) -> dict[str, str]:
    """The prediction, by what people call it."""
    of = facts.prediction
    if of is None:
        return {}
    interval = f"{seconds(of.low)} to {seconds(of.high)}"
    return {
        "predicted load": f"{seconds(of.seconds)} ({interval}) to {facts.device}",
        "limited by": f"{of.limited_by}, at {of.gb_per_s:.2f} GB/s",
    }


def seconds(of: float) -> str:
    """A time with two or three digits."""
    return f"{of * 1e3:.0f} ms" if of < 0.1 else f"{of:.2f} s" if of < 10 else f"{of:,.0f} s"  # noqa: PLR2004


def links(facts: Facts) -> list[str]:
    """Each GPU in a line, without its address."""
    shown = []
    for gpu in facts.machine.gpus:
        parts = [gpu.name or "NVIDIA GPU"]
        if gpu.width:
            parts.append(f"PCIe x{gpu.width} of {gpu.most_width or gpu.width}")
        if gpu.speed:
            parts.append(f"{gpu.speed:g} of {gpu.most_speed or gpu.speed:g} GT/s")
        if gpu.node is not None:
            parts.append(f"NUMA node {gpu.node}")
        by_node = facts.rates.by_node.get(gpu.slot, {})
        parts += [f"from node {node} {rate:.1f} GB/s" for node, rate in by_node.items()]
        shown.append(", ".join(parts))
    return shown


def machine(facts: Facts) -> dict[str, str]:
    """The machine, by what people call it."""
    of = facts.machine
    cores = f"{len(of.cores)}" + (f", cgroup allows {of.quota:.1f}" if of.quota is not None else "")
    memory = "" if of.memory is None else f"{size(of.memory)}, {size(of.available or 0)} free"
    if of.cgroup_limit is not None:
        memory += f", cgroup allows {size(of.cgroup_limit)}"
    locked = "unlimited" if of.memlock is None or of.locks_freely else size(of.memlock, binary=True)
    named = {"cores": cores, "memory": memory, "lockable memory": locked, "huge pages": of.huge_pages or ""}
    return {name: value for name, value in named.items() if value}


def cached(share: float | None) -> str:
    """How much of a checkpoint the page cache holds."""
    return "unknown in the page cache" if share is None else f"{share:.0%} in the page cache"


def anonymous(facts: Facts) -> str:
    """A text for a ticket: versions, figures and findings. Only what is listed here is in it."""
    return "\n".join(_anonymous(facts)) + "\n"


def _anonymous(facts: Facts) -> Iterator[str]:
    yield ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    # What follows the numbers is the distribution's, or somebody's own.
    kernel = re.match(r"[\d.]+", facts.machine.kernel or "")
    yield ", ".join([f"Linux {kernel[0] if kernel else 'unknown'}", *map(" ".join, machine(facts).items())])
    yield from (f"GPU: {line}" for line in links(facts))
    yield from (
        f"{engine.name} {engine.version}: {'would not use Penstock' if engine.why_not else 'can use Penstock'}"
        for engine in facts.engines
    )
    if ckpt := facts.checkpoint:
        kind = ckpt.mount.kind if ckpt.mount else facts.remote.scheme if facts.remote else "unknown"
        share = "" if ckpt.is_remote else f", {cached(ckpt.cached_share)}"
        yield f"checkpoint: {size(ckpt.nbytes)}, {ckpt.files} {'file' if ckpt.files == 1 else 'files'} on {kind}{share}"
    if remote := facts.remote:
        # Where credentials come from may name a profile or a file.
        parts = [f"region {remote.region}" if remote.region else "", "a proxy" if remote.proxy else ""]
        if remote.round_trip is not None:
            parts.append(f"{remote.round_trip * 1e3:.0f} ms to the server")
        yield ", ".join(["store: " + remote.scheme, *filter(None, parts)])
    yield from (f"{name}: {rate:.2f} GB/s" for name, rate in rates(facts).items())
    yield from (f"{name}: {value}" for name, value in predicted(facts).items())
    yield from (f"not found out: {what}" for what in facts.missing)
    for finding in findings(facts):
        cause, remedy = finding.said(anonymous=True)
        yield f"{finding.severity}: {finding.code}: {cause}"
        yield f"  try: {remedy}"
    yield f"{facts.seconds:.1f} s"
