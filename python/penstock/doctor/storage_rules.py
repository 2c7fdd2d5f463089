"""Findings about the mount that a checkpoint lies on, and about reading it."""

from __future__ import annotations

from penstock.doctor.facts import Facts, Mount
from penstock.doctor.finding import Finding, Rule
from penstock.units import size

_KIB = 1 << 10
_SMALL_READS = 256 * _KIB
_NFS_READS = 1 << 20
_SMALL_READ_AHEAD = {"disk": 128 * _KIB, "network": 1 << 20}
_FUSE_MOUNTS = 3
_LOCAL_FUSE = ("fuseblk", "fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.lxcfs")
_EFS = ".efs."
_SLOW_BUFFERED = 0.5


def _mount(facts: Facts) -> Mount | None:
    return facts.checkpoint.mount if facts.checkpoint else None


def _is_nfs(mount: Mount) -> bool:
    return mount.kind in {"nfs", "nfs4"}


def _is_fuse(mount: Mount) -> bool:
    return mount.kind.startswith("fuse") and mount.kind not in _LOCAL_FUSE


def nfs_one_connection(facts: Facts) -> Finding | None:
    """NFS without ``nconnect``. Amazon EFS takes one connection for each client."""
    mount = _mount(facts)
    if not mount or not _is_nfs(mount) or mount.options.get("proto", "tcp").startswith("rdma") or _EFS in mount.source:
        return None
    if mount.options.get("nconnect", "1") != "1":
        return None
    return Finding(
        "nfs_one_connection",
        "warning",
        f"the {mount.kind} mount {{mount}} has one TCP connection, which carries some 0.5 to 1 GB/s however many read",
        "Mount with nconnect=16 (in Kubernetes: mountOptions of the volume or storage class), after all mounts of this "
        "server were unmounted",
        {"mount": mount.target},
    )


def nfs_small_reads(facts: Facts) -> Finding | None:
    """NFS or SMB with a small ``rsize``."""
    mount = _mount(facts)
    reads = int(mount.options.get("rsize") or 0) if mount and mount.options.get("rsize", "").isdigit() else 0
    if not mount or not (_is_nfs(mount) or mount.kind in {"cifs", "smb3"}) or not 0 < reads < _NFS_READS:
        return None
    return Finding(
        "small_network_reads",
        "warning",
        f"the {mount.kind} mount {{mount}} reads {size(reads, binary=True)} at once (rsize={reads})",
        "Mount with rsize=1048576; the server may lower it, so look at its own limit too",
        {"mount": mount.target},
    )


def fuse_small_reads(facts: Facts) -> Finding | None:
    """FUSE with ``max_read`` below 256 KiB."""
    mount = _mount(facts)
    reads = mount.options.get("max_read", "") if mount else ""
    if not mount or not _is_fuse(mount) or not reads.isdigit() or not 0 < int(reads) < _SMALL_READS:
        return None
    return Finding(
        "fuse_small_reads",
        "warning",
        f"the {mount.kind} mount {{mount}} cuts every read into pieces of {size(int(reads), binary=True)} "
        f"(max_read={reads})",
        "Leave the option max_read out, or set it to 1048576",
        {"mount": mount.target},
    )


def fuse_mount_for_each_model(facts: Facts) -> Finding | None:
    """Several FUSE mounts of one kind, where one would do."""
    mount = _mount(facts)
    if not mount or not _is_fuse(mount) or mount.like_it < _FUSE_MOUNTS:
        return None
    return Finding(
        "fuse_mount_for_each_model",
        "warning",
        f"{mount.like_it} mounts are {mount.kind}: each has a daemon, a cache and connections of its own",
        "Mount the bucket once and put models into directories of it: then they share one cache",
    )


def small_read_ahead(facts: Facts) -> Finding | None:
    """A read-ahead window that keeps buffered reads short."""
    mount = _mount(facts)
    if not mount or mount.read_ahead is None or mount.kind in {"tmpfs", "ramfs", "overlay"}:
        return None
    is_network = _is_nfs(mount) or _is_fuse(mount) or mount.kind in {"cifs", "smb3", "ceph", "lustre", "9p"}
    wanted = _SMALL_READ_AHEAD["network" if is_network else "disk"]
    if mount.read_ahead >= wanted:
        return None
    kib = 16384 if is_network else 128
    return Finding(
        "small_read_ahead",
        "warning",
        f"the kernel reads {size(mount.read_ahead, binary=True)} ahead on {{mount}}: buffered reads and mmap wait for "
        "each piece",
        f"echo {kib} | sudo tee {{read_ahead}} (until the next mount; a udev rule makes it last)",
        {"mount": mount.target, "read_ahead": f"/sys/class/bdi/{mount.device}/read_ahead_kb"},
    )


def no_direct_reads(facts: Facts) -> Finding | None:
    """Direct I/O is refused where files are not in memory."""
    refused = next((note for note in facts.rates.notes if note.startswith("direct I/O is refused")), None)
    if refused is None or not facts.checkpoint or facts.checkpoint.storage in {"tmpfs", "ramfs"}:
        return None
    return Finding(
        "no_direct_reads",
        "note",
        f"{refused}: loads go through the page cache",
        "Keep weights on a file system with O_DIRECT (ext4, XFS, NFS), where loading is not to fill the page cache",
    )


def slow_buffered_reads(facts: Facts) -> Finding | None:
    """Reading through the page cache is much slower than past it: what uses mmap will see that."""
    direct, buffered = facts.rates.direct, facts.rates.buffered
    if direct is None or buffered is None or buffered >= _SLOW_BUFFERED * direct:
        return None
    return Finding(
        "slow_buffered_reads",
        "note",
        f"buffered reads bring {buffered:.2f} GB/s where direct ones bring {direct:.2f}",
        "Nothing for Penstock, which reads past the page cache; avoid --cache populate and loaders that map files here",
    )


RULES: list[Rule] = [
    nfs_one_connection,
    nfs_small_reads,
    fuse_small_reads,
    fuse_mount_for_each_model,
    small_read_ahead,
    no_direct_reads,
    slow_buffered_reads,
]
