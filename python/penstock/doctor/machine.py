"""Facts of the machine, from ``/proc`` and ``/sys`` of a tree: cores, memory, limits, GPUs, mounts."""

from __future__ import annotations

import os
import re
from pathlib import PurePath

from penstock.doctor.facts import Gpu, Machine, Mount
from penstock.doctor.tree import Tree, of_list, whole

_NVIDIA = "0x10de"
_DISPLAYS = ("0x0300", "0x0302")
"""PCI classes: VGA and 3D controllers."""
_CAP_IPC_LOCK = 1 << 14
_UNBOUNDED = 1 << 60
"""A limit of a cgroup from which on it is none."""


def machine(tree: Tree) -> Machine:
    """What the machine is, and what this process may use of it."""
    status = tree.fields("proc/self/status")
    limit, used, quota = _cgroup(tree)
    return Machine(
        kernel=tree.text("proc/sys/kernel/osrelease"),
        cores=of_list(status.get("Cpus_allowed_list", "")),
        quota=quota,
        memory=tree.kib("proc/meminfo", "MemTotal"),
        available=tree.kib("proc/meminfo", "MemAvailable"),
        cgroup_limit=limit,
        cgroup_used=used,
        memlock=_memlock(tree),
        locks_freely=bool(int(status.get("CapEff") or "0", 16) & _CAP_IPC_LOCK),
        huge_pages=_chosen(tree.text("sys/kernel/mm/transparent_hugepage/enabled")),
        pressure=_pressure(tree),
        vendor=tree.text("sys/class/dmi/id/sys_vendor"),
        gpus=tuple(gpus(tree)),
    )


def _chosen(text: str | None) -> str | None:
    """The word in brackets of ``always [madvise] never``."""
    found = re.search(r"\[(\w+)\]", text or "")
    return found[1] if found else None


def _pressure(tree: Tree) -> float | None:
    found = re.search(r"some avg10=([\d.]+)", tree.text("proc/pressure/cpu") or "")
    return float(found[1]) / 100 if found else None


def _memlock(tree: Tree) -> int | None:
    line = next((line for line in tree.lines("proc/self/limits") if line.startswith("Max locked memory")), "")
    found = re.match(r"Max locked memory\s+(\S+)", line)
    return whole(found[1]) if found else None


def _cgroup(tree: Tree) -> tuple[int | None, int | None, float | None]:
    """The memory limit, the memory in use, and the cores' worth of time: of the cgroup and those above, the least."""
    groups = dict(line.split(":", 2)[1:] for line in tree.lines("proc/self/cgroup") if line.count(":") > 1)
    if "" in groups and "memory" not in groups:
        return _cgroup_2(tree, groups[""])
    own = groups.get("memory", "/").strip("/")
    for path in (f"sys/fs/cgroup/memory/{own}", "sys/fs/cgroup/memory"):
        limit = tree.number(f"{path}/memory.limit_in_bytes")
        if limit is not None:
            limit = limit if limit < _UNBOUNDED else None
            return limit, tree.number(f"{path}/memory.usage_in_bytes"), _quota_1(tree)
    return None, None, _quota_1(tree)


def _cgroup_2(tree: Tree, own: str) -> tuple[int | None, int | None, float | None]:
    limit, used, quota = None, None, None
    path = PurePath(own.strip("/"))
    # Within a container the path may be the host's, and what counts lies at the top.
    for above in (path, *path.parents):
        directory = f"sys/fs/cgroup/{above}"
        here = tree.number(f"{directory}/memory.max")
        if here is not None and (limit is None or here < limit):
            limit, used = here, tree.number(f"{directory}/memory.current")
        share, _, period = (tree.text(f"{directory}/cpu.max") or "").partition(" ")
        if whole(share) is not None and whole(period):
            cores = int(share) / int(period)
            quota = cores if quota is None else min(quota, cores)
    return limit, used, quota


def _quota_1(tree: Tree) -> float | None:
    share = tree.number("sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period = tree.number("sys/fs/cgroup/cpu/cpu.cfs_period_us")
    return share / period if share and period and share > 0 else None


def gpus(tree: Tree) -> list[Gpu]:
    """The NVIDIA GPUs of the PCI bus, in the order of their addresses. A container sees those of its host."""
    found = []
    for slot in tree.names("sys/bus/pci/devices"):
        device = f"sys/bus/pci/devices/{slot}"
        shown = (tree.text(f"{device}/class") or "")[:6]
        if tree.text(f"{device}/vendor") != _NVIDIA or shown not in _DISPLAYS:
            continue
        node = tree.number(f"{device}/numa_node")
        node = node if node is not None and node >= 0 else None
        cores = "" if node is None else tree.text(f"sys/devices/system/node/node{node}/cpulist") or ""
        found.append(
            Gpu(
                slot=slot,
                name=tree.fields(f"proc/driver/nvidia/gpus/{slot}/information").get("Model"),
                width=tree.number(f"{device}/current_link_width"),
                most_width=tree.number(f"{device}/max_link_width"),
                speed=_transfers(tree.text(f"{device}/current_link_speed")),
                most_speed=_transfers(tree.text(f"{device}/max_link_speed")),
                node=node,
                node_cores=of_list(cores),
            )
        )
    return found


def _transfers(text: str | None) -> float | None:
    """The number of ``32.0 GT/s PCIe``."""
    found = re.match(r"([\d.]+) GT/s", text or "")
    return float(found[1]) if found else None


def nodes(tree: Tree) -> dict[int, frozenset[int]]:
    """The cores of each NUMA node that has some."""
    names = (name for name in tree.names("sys/devices/system/node") if re.fullmatch(r"node\d+", name))
    cores = {int(name[4:]): of_list(tree.text(f"sys/devices/system/node/{name}/cpulist") or "") for name in names}
    return {node: of for node, of in cores.items() if of}


def mount_of(path: str, tree: Tree) -> Mount | None:
    """The mount that holds a path without links: the longest that it lies under; of equals, the last."""
    best: list[str] | None = None
    kinds: list[str] = []
    for line in tree.lines("proc/self/mountinfo"):
        fields = line.split()
        if "-" not in fields[6:]:
            continue
        kinds.append(fields[fields.index("-", 6) + 1])
        target = _unescaped(fields[4])
        lies_under = path == target or path.startswith(target.rstrip("/") + "/")
        if lies_under and (best is None or len(target) >= len(_unescaped(best[4]))):
            best = fields
    if best is None:
        return None
    dash = best.index("-", 6)
    kind, source, of_system = (*best[dash + 1 : dash + 3], best[dash + 3] if len(best) > dash + 3 else "")
    options = dict(_option(text) for text in f"{best[5]},{of_system}".split(","))
    return Mount(
        kind=kind,
        target=_unescaped(best[4]),
        source=_unescaped(source),
        device=best[2],
        options=options,
        read_ahead=_read_ahead(best[2], tree),
        like_it=kinds.count(kind),
    )


def _option(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _unescaped(text: str) -> str:
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), text)


def _read_ahead(device: str, tree: Tree) -> int | None:
    """What the kernel reads ahead of a file's sequential reader. A partition has its disk's."""
    block = f"sys/dev/block/{device}"
    if tree.text(f"{block}/partition") is not None:
        disk = os.path.relpath((tree.root / block).resolve().parent, tree.root.resolve())
        block = disk
    paths = (f"sys/class/bdi/{device}/read_ahead_kb", f"{block}/queue/read_ahead_kb")
    kib = next((number for number in map(tree.number, paths) if number is not None), None)
    return None if kib is None else kib * 1024
