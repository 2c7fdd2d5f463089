"""Findings about this machine: memory, limits, cores, GPUs and engines."""

from __future__ import annotations

from penstock.doctor.facts import Facts, Gpu
from penstock.doctor.finding import Finding, Rule
from penstock.doctor.prediction import SLOW_MEMORY
from penstock.units import size

_STAGING = 512 << 20
"""What a load to a device takes of host memory at most."""
_HOST_EXTRA = 256 << 20
"""What a process has besides its weights: the interpreter, a framework."""
_MEMLOCK = 128 << 20
_FEW_CORES = 2.0
_BUSY = 0.3
_NODE_PENALTY = 0.85


def _to_gpu(facts: Facts) -> bool:
    return facts.device != "cpu"


def locked_memory(facts: Facts) -> Finding | None:
    """RLIMIT_MEMLOCK is less than staging memory, and the process may not pass it."""
    machine = facts.machine
    if not machine.gpus or machine.locks_freely or machine.memlock is None or machine.memlock >= _MEMLOCK:
        return None
    was_refused = facts.prediction is not None and _to_gpu(facts) and not facts.prediction.pinned
    return Finding(
        "locked_memory",
        "warning" if was_refused else "note",
        f"this process may lock {size(machine.memlock, binary=True)} of memory; staging memory that cannot be pinned "
        "is copied to the GPU several times slower",
        "ulimit -l unlimited; in Docker --ulimit memlock=-1; in a systemd unit LimitMEMLOCK=infinity",
    )


def no_huge_pages(facts: Facts) -> Finding | None:
    """Transparent huge pages are off."""
    if facts.machine.huge_pages != "never":
        return None
    return Finding(
        "no_huge_pages",
        "warning",
        "transparent huge pages are off: making and pinning memory takes several times longer",
        "On the host: echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled (containers have the setting "
        "of their host)",
    )


def cgroup_memory(facts: Facts) -> Finding | None:
    """The cgroup has no room for the weights, or for staging memory."""
    machine, ckpt = facts.machine, facts.checkpoint
    if machine.cgroup_limit is None or not ckpt:
        return None
    weights = 0 if _to_gpu(facts) else ckpt.nbytes
    needed = weights + _HOST_EXTRA + (_STAGING if _to_gpu(facts) else 0)
    if machine.cgroup_limit >= needed:
        return None
    what = "staging memory" if _to_gpu(facts) else f"{size(ckpt.nbytes)} of weights"
    return Finding(
        "cgroup_memory",
        "error" if weights else "warning",
        f"the cgroup's memory limit is {size(machine.cgroup_limit, binary=True)}: too little for {what}",
        f"Raise the container's memory limit to {size(needed * 1.25, binary=True)} or more"
        + ("" if _to_gpu(facts) else ", or load to a GPU"),
    )


def little_memory(facts: Facts) -> Finding | None:
    """The machine has not enough free memory for the weights."""
    ckpt, available = facts.checkpoint, facts.machine.available
    if not ckpt or _to_gpu(facts) or available is None or available >= ckpt.nbytes + _HOST_EXTRA:
        return None
    return Finding(
        "little_memory",
        "error",
        f"{size(available)} of memory are free, the weights are {size(ckpt.nbytes)}",
        "Free memory, load with mmap=True, or load to a GPU",
    )


def slow_memory(facts: Facts) -> Finding | None:
    """Memory that is slow to touch for the first time: a virtual machine's host hands it out only then."""
    rate = facts.prediction.fresh_memory if facts.prediction else None
    if rate is None or rate >= SLOW_MEMORY:
        return None
    return Finding(
        "slow_memory",
        "warning",
        f"memory that is touched for the first time comes at {rate:.2f} GB/s: the host of a virtual machine hands it "
        "out then, and takes back what is free",
        "On the host: huge pages, and neither ballooning nor free page reporting; here: load to a GPU, or mmap=True",
    )


def busy_machine(facts: Facts) -> Finding | None:
    """Other processes want the cores too."""
    pressure = facts.machine.pressure
    if pressure is None or pressure < _BUSY:
        return None
    return Finding(
        "busy_machine",
        "note",
        f"for {pressure:.0%} of the time some process waited for a core: loads are slower than they can be, and vary",
        "Measure again when nothing else runs, or give the process cores of its own",
    )


def few_cores(facts: Facts) -> Finding | None:
    """The cgroup allows less than two cores' worth of time."""
    quota = facts.machine.quota
    if quota is None or quota >= _FEW_CORES or quota >= len(facts.machine.cores):
        return None
    return Finding(
        "few_cores",
        "warning",
        f"the cgroup allows {quota:.1f} cores' worth of time: copies from the page cache and TLS need more",
        "Raise the container's CPU limit to 4 or more, or leave it out",
    )


def _narrow(gpu: Gpu) -> bool:
    return gpu.width is not None and gpu.most_width is not None and 0 < gpu.width < gpu.most_width


def narrow_link(facts: Facts) -> Finding | None:
    """A GPU's link has fewer lanes than the GPU."""
    gpu = next(filter(_narrow, facts.machine.gpus), None)
    if gpu is None:
        return None
    return Finding(
        "narrow_link",
        "warning",
        f"the GPU {{gpu}} is attached by {gpu.width} PCIe lanes, and has {gpu.most_width}: copies take "
        f"{gpu.most_width / gpu.width:.0f} times as long",  # type: ignore[operator]
        "Reseat the card, or move it to a slot with all lanes; look for bifurcation in the firmware's settings",
        {"gpu": gpu.slot},
    )


def slow_link(facts: Facts) -> Finding | None:
    """A GPU's link stays at an older generation while it copies."""
    if facts.rates.h2d is None:  # idle, it is meant to
        return None
    slow = (gpu for gpu in facts.machine.gpus if gpu.speed and gpu.most_speed and gpu.speed < gpu.most_speed)
    gpu = next(slow, None)
    if gpu is None:
        return None
    return Finding(
        "slow_link",
        "warning",
        f"the GPU {{gpu}} is attached at {gpu.speed:g} GT/s a lane while it copies, and has {gpu.most_speed:g}",
        "Set the slot's generation to auto in the firmware, and look for a riser or slot of an older generation",
        {"gpu": gpu.slot},
    )


def other_numa_node(facts: Facts) -> Finding | None:
    """A GPU near which this process may use no core."""
    cores = facts.machine.cores
    far = (gpu for gpu in facts.machine.gpus if gpu.node_cores and cores and not gpu.node_cores & cores)
    gpu = next(far, None)
    if gpu is None:
        return None
    return Finding(
        "other_numa_node",
        "warning",
        f"this process runs on cores of another NUMA node than node {gpu.node}, which the GPU {{gpu}} is attached to",
        f"numactl --cpunodebind={gpu.node} --membind={gpu.node}, or the kubelet's topology manager (single-numa-node)",
        {"gpu": gpu.slot},
    )


def far_memory(facts: Facts) -> Finding | None:
    """Copies from one NUMA node are measurably slower than from another."""
    for slot, rates in facts.rates.by_node.items():
        if len(rates) > 1 and min(rates.values()) < _NODE_PENALTY * max(rates.values()):
            best = max(rates, key=rates.__getitem__)
            return Finding(
                "far_memory",
                "note",
                f"memory of NUMA node {best} reaches the GPU {{gpu}} at {max(rates.values()):.0f} GB/s, of another "
                f"node at {min(rates.values()):.0f}",
                f"numactl --cpunodebind={best} --membind={best} for the process of this GPU",
                {"gpu": slot},
            )
    return None


def engine_would_not_use_it(facts: Facts) -> Finding | None:
    """An engine that cannot be asked to load with Penstock."""
    engine = next((engine for engine in facts.engines if engine.why_not), None)
    if engine is None:
        return None
    return Finding(
        "engine_would_not_use_it",
        "warning",
        f"{engine.name} would not use Penstock: {engine.why_not}",
        engine.remedy or f"Update {engine.name}",
    )


RULES: list[Rule] = [
    cgroup_memory,
    little_memory,
    locked_memory,
    no_huge_pages,
    few_cores,
    busy_machine,
    slow_memory,
    narrow_link,
    slow_link,
    other_numa_node,
    far_memory,
    engine_would_not_use_it,
]
