"""What a diagnosis knows: plain values, gathered by other modules and judged by ``findings``.

Sizes are bytes, times seconds, rates GB/s (1e9 bytes a second). None means that it is not known. Nothing here is a
secret; ``private`` values (paths, hosts, names) are what a ticket must not show.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mount:
    """The mount that holds a checkpoint, as ``/proc/self/mountinfo`` has it."""

    kind: str
    """The type of the file system: ``ext4``, ``nfs4``, ``fuse.gcsfuse``."""
    target: str
    source: str
    device: str
    """``major:minor``."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the mount and of the file system; those without a value have an empty one."""
    read_ahead: int | None = None
    like_it: int = 1
    """How many mounts of this machine are of this type."""


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU of the PCI bus."""

    slot: str
    """The PCI address: ``0000:1b:00.0``."""
    name: str | None = None
    width: int | None = None
    most_width: int | None = None
    speed: float | None = None
    """GT/s of a lane. An idle GPU lowers it: it is meaningful only if it was read after a copy."""
    most_speed: float | None = None
    node: int | None = None
    """The NUMA node that it is attached to."""
    node_cores: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Machine:
    """Kernel, cores, memory and GPUs of this machine, and what this process may use of them."""

    kernel: str | None = None
    cores: frozenset[int] = frozenset()
    """Those that this process may run on."""
    quota: float | None = None
    """The cores' worth of time that the cgroup allows."""
    memory: int | None = None
    available: int | None = None
    cgroup_limit: int | None = None
    cgroup_used: int | None = None
    memlock: int | None = None
    """None where it is unlimited or not known."""
    locks_freely: bool = False
    """CAP_IPC_LOCK: the limit does not count."""
    huge_pages: str | None = None
    """``always``, ``madvise`` or ``never``."""
    pressure: float | None = None
    """The share of the last ten seconds in which somebody waited for a core."""
    vendor: str | None = None
    """Who made the machine, by its firmware: ``Amazon EC2``."""
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Engine:
    """A library that Penstock is used by."""

    name: str
    version: str
    how: str
    """What to write so that it uses Penstock."""
    why_not: str | None = None
    """Why it would not use it though it is asked to."""
    remedy: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint that was named."""

    nbytes: int
    files: int
    storage: str
    """As ``ckpt.storage``."""
    is_remote: bool
    cached_share: float | None
    """The share that the page cache holds."""
    mount: Mount | None = None


@dataclass(frozen=True)
class Failure:
    """What opening or reading the checkpoint raised."""

    kind: str
    code: str
    cause: str
    remedy: str | None
    server_code: str | None = None
    status: str | None = None


@dataclass(frozen=True)
class Remote:
    """How a remote checkpoint is reached."""

    provider: str
    scheme: str
    host: str
    region: str | None = None
    credentials: str | None = None
    """Where they come from."""
    round_trip: float | None = None
    clock_ahead: float | None = None
    """How far this machine's clock is ahead of the server's."""
    resolves: bool = True
    """Whether the host has an address."""
    by_host: bool = False
    """Whether a server of one's own is asked for ``bucket.host`` rather than ``host/bucket``."""
    proxy: str | None = None
    """The variable that names a proxy for it."""


@dataclass(frozen=True)
class Cloud:
    """What the cloud's metadata service says of this machine."""

    provider: str
    region: str | None = None
    reachable: bool = False
    gives_tokens: bool | None = None
    """AWS: whether it answered with a session token. None where nobody was asked."""


@dataclass(frozen=True)
class Rates:
    """What was measured, in GB/s."""

    direct: float | None = None
    buffered: float | None = None
    page_cache: float | None = None
    h2d: float | None = None
    pageable: float | None = None
    by_node: dict[str, dict[int, float]] = field(default_factory=dict)
    """Pinned memory of each NUMA node to each GPU, by its PCI address."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """How long ``penstock load`` of the checkpoint takes: opening and loading."""

    seconds: float
    low: float
    high: float
    gb_per_s: float
    limited_by: str
    """As ``LoadStats.limited_by``."""
    readers: int
    probed_bytes: int
    """The bytes that were loaded to find out."""
    fresh_memory: float | None = None
    """GB/s of touching host memory for the first time."""
    pinned: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """Everything that a diagnosis found."""

    versions: dict[str, str]
    machine: Machine
    device: str = "cpu"
    engines: tuple[Engine, ...] = ()
    checkpoint: Checkpoint | None = None
    failure: Failure | None = None
    remote: Remote | None = None
    cloud: Cloud | None = None
    rates: Rates = Rates()
    prediction: Prediction | None = None
    cache_dir: str | None = None
    """The disk cache's directory, where this process may not write to it."""
    missing: tuple[str, ...] = ()
    """What could not be found out in time."""
    seconds: float = 0.0
