"""``penstock doctor``: each finding is provoked by a recorded tree, and nothing private is in the text for a ticket."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import penstock
import servers
from conftest import Raw, raw_bytes, write_raw
from penstock.doctor import engines, network, report
from penstock.doctor.diagnosis import RULES, diagnose, findings
from penstock.doctor.facts import Checkpoint, Cloud, Facts, Failure, Prediction, Rates, Remote
from penstock.doctor.machine import machine, mount_of
from penstock.doctor.prediction import Part, extrapolated, joined, spread
from penstock.doctor.tree import Tree
from services import serving

MIB = 1 << 20
GIB = 1 << 30
DOCS = Path(__file__).parent.parent / "docs"

HEALTHY = {
    "proc/sys/kernel/osrelease": "6.8.0-secretcorp",
    "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 50331648 kB",
    "proc/self/status": "Cpus_allowed_list:\t0-15\nCapEff:\t0000000000000000",
    "proc/self/limits": "Limit Soft Limit Hard Limit Units\nMax locked memory         unlimited  unlimited  bytes",
    "proc/self/cgroup": "0::/",
    "proc/self/mountinfo": "25 1 259:1 / / rw,relatime - ext4 /dev/nvme0n1p1 rw",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/dev/block/259:1/queue/read_ahead_kb": "128",
}
GPU = {
    f"sys/bus/pci/devices/0000:1b:00.0/{name}": value
    for name, value in {
        "vendor": "0x10de",
        "class": "0x030200",
        "current_link_width": "16",
        "max_link_width": "16",
        "current_link_speed": "32.0 GT/s PCIe",
        "max_link_speed": "32.0 GT/s PCIe",
        "numa_node": "1",
    }.items()
} | {
    "proc/driver/nvidia/gpus/0000:1b:00.0/information": "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 5",
    "sys/devices/system/node/node0/cpulist": "0-7",
    "sys/devices/system/node/node1/cpulist": "8-15",
}
_SLOT = "sys/bus/pci/devices/0000:1b:00.0"


def tree(root: Path, *changes: Mapping[str, str]) -> Tree:
    """A recorded machine: a healthy one, changed."""
    files: dict[str, str] = dict(HEALTHY)
    for change in changes:
        files |= change
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return Tree(root)


def mountinfo(kind: str, options: str, *, source: str = "server:/export", more: int = 0) -> dict[str, str]:
    """Mounts of a machine, one of them at /models."""
    lines = [HEALTHY["proc/self/mountinfo"], f"40 25 0:55 / /models rw,noatime - {kind} {source} rw,{options}"]
    lines += [f"{41 + n} 25 0:{56 + n} / /more{n} rw - {kind} {source} rw,{options}" for n in range(more)]
    return {"proc/self/mountinfo": "\n".join(lines), "sys/class/bdi/0:55/read_ahead_kb": "16384"}


def facts(of: Tree, *, path: str = "/models/m.safetensors", nbytes: int = 4 * GIB, device: str = "cpu") -> Facts:
    """What is known of a recorded machine and of a checkpoint that lies on it."""
    checkpoint = Checkpoint(nbytes, 1, "nfs4", is_remote=False, cached_share=0.0, mount=mount_of(path, of))
    return Facts({"python": "3.12"}, machine(of), device, checkpoint=checkpoint)


def codes(of: Facts) -> list[str]:
    return [finding.code for finding in findings(of)]


def test_a_healthy_machine_has_no_findings(tmp_path: Path) -> None:
    assert codes(facts(tree(tmp_path, GPU))) == []


# ---- the storage

FSTAB = "rsize=1048576,wsize=1048576,proto=tcp"


@pytest.mark.parametrize(
    ("code", "change", "cured"),
    [
        ("nfs_one_connection", mountinfo("nfs4", FSTAB), mountinfo("nfs4", f"{FSTAB},nconnect=16")),
        (
            "small_network_reads",
            mountinfo("nfs", "rsize=65536,nconnect=16"),
            mountinfo("nfs", "rsize=1048576,nconnect=16"),
        ),
        (
            "fuse_small_reads",
            mountinfo("fuse.gcsfuse", "max_read=131072"),
            mountinfo("fuse.gcsfuse", "max_read=1048576"),
        ),
        (
            "fuse_mount_for_each_model",
            mountinfo("fuse.mountpoint-s3", "user_id=0", more=3),
            mountinfo("fuse.mountpoint-s3", "user_id=0"),
        ),
        (
            "small_read_ahead",
            mountinfo("nfs4", f"{FSTAB},nconnect=8") | {"sys/class/bdi/0:55/read_ahead_kb": "128"},
            mountinfo("nfs4", f"{FSTAB},nconnect=8"),
        ),
        (
            "small_read_ahead",
            {"sys/dev/block/259:1/queue/read_ahead_kb": "0"},
            {"sys/dev/block/259:1/queue/read_ahead_kb": "4096"},
        ),
    ],
)
def test_a_mount_that_is_slower_than_it_need_be(
    tmp_path: Path, code: str, change: dict[str, str], cured: dict[str, str]
) -> None:
    (found,) = findings(facts(tree(tmp_path / "ill", change)))
    assert (found.code, found.severity) == (code, "warning")
    assert codes(facts(tree(tmp_path / "cured", cured))) == []


def test_efs_and_rdma_are_not_told_of_connections(tmp_path: Path) -> None:
    for at, change in enumerate(
        [
            mountinfo("nfs4", FSTAB, source="fs-1.efs.eu-west-1.amazonaws.com:/"),
            mountinfo("nfs4", "rsize=1048576,proto=rdma"),
        ]
    ):
        assert codes(facts(tree(tmp_path / str(at), change))) == []


def test_the_longest_mount_holds_a_path_and_a_partition_has_its_disks_read_ahead(tmp_path: Path) -> None:
    recorded = tree(tmp_path, mountinfo("nfs4", FSTAB))
    disk = tmp_path / "sys/devices/pci/nvme0n1"
    (disk / "queue").mkdir(parents=True)
    (disk / "nvme0n1p1").mkdir()
    (disk / "nvme0n1p1/partition").write_text("1\n")
    (disk / "queue/read_ahead_kb").write_text("256\n")
    link = tmp_path / "sys/dev/block/259:7"
    link.symlink_to(disk / "nvme0n1p1")
    lines = f"{HEALTHY['proc/self/mountinfo']}\n40 25 259:7 / /my\\040models rw - xfs /dev/nvme0n1p7 rw"
    (tmp_path / "proc/self/mountinfo").write_text(lines + "\n")
    found = mount_of("/my models/a/b", recorded)
    assert found is not None
    assert (found.kind, found.target, found.read_ahead) == ("xfs", "/my models", 256 << 10)
    beside = mount_of("/my models2/a", recorded)
    assert beside is not None
    assert beside.target == "/"


def test_what_reading_showed_of_the_storage(tmp_path: Path) -> None:
    of = facts(tree(tmp_path))
    refused = replace(of, rates=Rates(notes=("direct I/O is refused: Invalid argument",)))
    assert codes(refused) == ["no_direct_reads"]
    assert codes(replace(of, rates=Rates(direct=3.0, buffered=1.0))) == ["slow_buffered_reads"]
    assert codes(replace(of, rates=Rates(direct=3.0, buffered=2.0))) == []


# ---- the machine


@pytest.mark.parametrize(
    ("code", "severity", "changes"),
    [
        (
            "cgroup_memory",
            "error",
            [{"proc/self/cgroup": "0::/pod/x", "sys/fs/cgroup/pod/memory.max": str(2 * GIB)}],
        ),
        (
            "cgroup_memory",
            "error",
            [
                {
                    "proc/self/cgroup": "5:memory:/docker/x\n0::/",
                    "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
                }
            ],
        ),
        ("little_memory", "error", [{"proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 2097152 kB"}]),
        ("no_huge_pages", "warning", [{"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}]),
        ("busy_machine", "note", [{"proc/pressure/cpu": "some avg10=61.20 avg60=50.00 avg300=1.00 total=5"}]),
        ("few_cores", "warning", [{"sys/fs/cgroup/cpu.max": "100000 100000"}]),
        (
            "locked_memory",
            "note",
            [GPU, {"proc/self/limits": "Max locked memory         8388608              8388608              bytes"}],
        ),
        ("narrow_link", "warning", [GPU, {f"{_SLOT}/current_link_width": "4"}]),
        ("other_numa_node", "warning", [GPU, {"proc/self/status": "Cpus_allowed_list:\t0-7\nCapEff:\t0"}]),
    ],
)
def test_a_machine_that_gives_less_than_it_has(
    tmp_path: Path, code: str, severity: str, changes: list[dict[str, str]]
) -> None:
    (found,) = findings(facts(tree(tmp_path, *changes), path="/m"))
    assert (found.code, found.severity) == (code, severity)


def test_memory_that_a_host_hands_out_late(tmp_path: Path) -> None:
    of = facts(tree(tmp_path, GPU))
    prediction = Prediction(2.0, 1.5, 2.5, 0.5, "memory", 2, 1 << 28, fresh_memory=0.3)
    assert codes(replace(of, prediction=prediction)) == ["slow_memory"]
    assert codes(replace(of, prediction=replace(prediction, fresh_memory=4.0))) == []


def test_a_cgroup_leaves_room_for_what_is_loaded_to_a_gpu(tmp_path: Path) -> None:
    limited = tree(tmp_path, GPU, {"sys/fs/cgroup/memory.max": str(2 * GIB)})
    assert codes(facts(limited, device="cuda:0")) == []
    tight = tree(tmp_path, GPU, {"sys/fs/cgroup/memory.max": str(GIB // 2)})
    (found,) = findings(facts(tight, device="cuda:0"))
    assert (found.code, found.severity) == ("cgroup_memory", "warning")


def test_locked_memory_does_not_matter_to_who_may_pass_the_limit(tmp_path: Path) -> None:
    limits = {"proc/self/limits": "Max locked memory         65536                65536                bytes"}
    able = {"proc/self/status": "Cpus_allowed_list:\t0-15\nCapEff:\t000001ffffffffff"}
    assert codes(facts(tree(tmp_path, GPU, limits, able))) == []
    assert codes(facts(tree(tmp_path / "no gpu", limits))) == []


def test_a_link_is_slow_only_if_it_is_while_it_copies(tmp_path: Path) -> None:
    idle = facts(tree(tmp_path, GPU, {f"{_SLOT}/current_link_speed": "2.5 GT/s PCIe"}))
    assert codes(idle) == []
    assert codes(replace(idle, rates=Rates(h2d=3.0))) == ["slow_link"]


def test_memory_that_is_far_from_a_gpu(tmp_path: Path) -> None:
    of = facts(tree(tmp_path, GPU))
    far = replace(of, rates=Rates(h2d=55.0, by_node={"0000:1b:00.0": {0: 30.0, 1: 55.0}}))
    (found,) = findings(far)
    assert found.code == "far_memory"
    assert "node 1 reaches" in found.cause
    assert codes(replace(of, rates=Rates(by_node={"0000:1b:00.0": {0: 54.0, 1: 55.0}}))) == []


# ---- engines


def distribution(site: Path, name: str, version: str, entries: str = "") -> None:
    """What pip leaves of a distribution."""
    directory = site / f"{name.replace('-', '_')}-{version}.dist-info"
    directory.mkdir(parents=True)
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (directory / "entry_points.txt").write_text(entries)


PLUGIN = "[vllm.general_plugins]\npenstock = penstock.integrations.vllm:register\n"


@pytest.mark.parametrize(
    ("why", "version", "entries", "environment"),
    [
        (None, "0.32.0", PLUGIN, {}),
        (None, "0.32.0", PLUGIN, {"VLLM_PLUGINS": "other,penstock"}),
        ("no entry point", "0.32.0", "", {}),
        ("PENSTOCK_DISABLE", "0.32.0", PLUGIN, {"PENSTOCK_DISABLE": "1"}),
        ("VLLM_PLUGINS", "0.32.0", PLUGIN, {"VLLM_PLUGINS": "other"}),
        ("older than 0.24", "0.9.1", PLUGIN, {}),
    ],
)
def test_whether_an_engine_would_use_it(
    tmp_path: Path, why: str | None, version: str, entries: str, environment: dict[str, str]
) -> None:
    distribution(tmp_path, "vllm", version)
    distribution(tmp_path, "penstock-loader", "0.1.0", entries)
    (found,) = engines.engines(environment, [str(tmp_path)])
    assert (found.name, found.version) == ("vLLM", version)
    of = Facts({}, machine(tree(tmp_path / "machine")), engines=(found,))
    if why is None:
        assert found.why_not is None
        assert codes(of) == []
    else:
        assert why in (found.why_not or "")
        assert codes(of) == ["engine_would_not_use_it"]


def test_two_packages_of_one_import_name(tmp_path: Path) -> None:
    distribution(tmp_path, "penstock-runai-model-streamer", "0.1.0")
    assert [engine.why_not for engine in engines.engines({}, [str(tmp_path)])] == [None]
    distribution(tmp_path, "runai-model-streamer", "0.17.0")
    (found,) = engines.engines({}, [str(tmp_path)])
    assert "0.17.0 is installed too" in (found.why_not or "")


# ---- the network


class _Recorded(BaseHTTPRequestHandler):
    """Answers from ``answers`` (paths to text), with the date ``date``. What is not there is refused."""

    answers: Mapping[str, str] = {}
    date: str | None = None
    puts = True

    def do_GET(self) -> None:
        self._answer(self.answers.get(self.path))

    def do_HEAD(self) -> None:
        self._answer("")

    def do_PUT(self) -> None:
        if self.puts:
            self._answer("token")
        else:
            # As if the answer had died on its way.
            self.connection.settimeout(5)
            self.connection.recv(1)

    def _answer(self, text: str | None) -> None:
        body = (text or "").encode()
        self.send_response(401 if text is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return self.date or super().date_time_string(timestamp)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def recorded() -> Iterator[tuple[type[_Recorded], str]]:
    class Handler(_Recorded):
        pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield Handler, f"http://127.0.0.1:{port}"


def of_network(root: Path, **known: object) -> Facts:
    return replace(Facts({}, machine(tree(root))), **known)  # type: ignore[arg-type]


S3 = Remote("S3", "s3", "bucket.s3.eu-west-1.amazonaws.com", region="eu-west-1", credentials="the instance's role")


def test_a_clock_that_is_wrong(tmp_path: Path, recorded: tuple[type[_Recorded], str]) -> None:
    handler, url = recorded
    right = network.remote(f"{url}/m.safetensors", None, {}, {})
    assert right.round_trip is not None
    assert abs(right.clock_ahead or 99) < 5
    assert codes(of_network(tmp_path, remote=right)) == []
    handler.date = "Thu, 01 Jan 2015 00:00:00 GMT"
    wrong = network.remote(f"{url}/m.safetensors", None, {}, {})
    (found,) = findings(of_network(tmp_path, remote=wrong))
    assert (found.code, found.severity) == ("clock_skew", "error")
    assert "ahead of the server's" in found.cause


def test_a_store_that_refuses_the_clock(tmp_path: Path) -> None:
    refused = Failure("LocationAccessError", "access_denied", "S3 answered …", "Set it", "RequestTimeTooSkewed", "403")
    assert codes(of_network(tmp_path, failure=refused, remote=S3)) == ["clock_skew"]


def test_tokens_that_do_not_arrive(tmp_path: Path, recorded: tuple[type[_Recorded], str]) -> None:
    handler, url = recorded
    handler.answers = {"/latest/meta-data/placement/region": "eu-west-1"}
    setting = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": url}
    cloud = network.cloud("Amazon EC2", setting)
    assert cloud == Cloud("aws", "eu-west-1", reachable=True, gives_tokens=True)
    assert codes(of_network(tmp_path, cloud=cloud, remote=S3)) == []
    handler.answers, handler.puts = {}, False
    cloud = network.cloud("Amazon EC2", setting)
    assert cloud == Cloud("aws", None, reachable=True, gives_tokens=False)
    (found,) = findings(of_network(tmp_path, cloud=cloud, remote=S3))
    assert (found.code, found.severity) == ("metadata_hops", "warning")
    none = Failure("LocationAccessError", "credentials", "no AWS credentials were found", "Set …")
    (found,) = findings(of_network(tmp_path, cloud=cloud, remote=S3, failure=none))
    assert (found.code, found.severity) == ("metadata_hops", "error")


def test_nobody_is_asked_on_machines_of_no_cloud() -> None:
    assert network.cloud("LENOVO", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1"}) is None


def test_a_bucket_of_another_region(tmp_path: Path) -> None:
    here, there = (Cloud("aws", region, reachable=True, gives_tokens=True) for region in ("eu-west-1", "us-east-1"))
    assert codes(of_network(tmp_path, remote=S3, cloud=here)) == []
    assert codes(of_network(tmp_path, remote=S3, cloud=there)) == ["other_region"]
    minio = replace(S3, host="minio.example")
    assert codes(of_network(tmp_path, remote=minio, cloud=there)) == []


def test_an_endpoint_that_needs_path_style(tmp_path: Path) -> None:
    set_so = {"AWS_ENDPOINT_URL": "http://nowhere.invalid:9000", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"}
    found = network.remote("s3://bucket/m/", None, set_so, {})
    assert (found.host, found.by_host, found.resolves) == ("bucket.nowhere.invalid", True, False)
    failed = Failure("StorageError", "connection", "no connection to bucket.nowhere.invalid", "Check the endpoint")
    assert codes(of_network(tmp_path, remote=found, failure=failed)) == ["needs_path_style"]
    found = network.remote("s3://bucket/m/", None, {"AWS_ENDPOINT_URL": "http://nowhere.invalid:9000"}, {})
    assert codes(of_network(tmp_path, remote=found, failure=failed)) == ["unknown_host"]


def test_weights_through_a_proxy(tmp_path: Path) -> None:
    proxied = {"AWS_ENDPOINT_URL": "https://nowhere.invalid", "HTTPS_PROXY": "http://user:SECRET@proxy.invalid:3128"}
    found = network.remote("s3://bucket/m/", None, proxied, {})
    assert found.proxy == "HTTPS_PROXY"
    assert "SECRET" not in repr(found)
    assert "through_proxy" in codes(of_network(tmp_path, remote=found))
    around = network.remote("s3://bucket/m/", None, proxied | {"NO_PROXY": ".invalid"}, {})
    assert around.proxy is None


def test_a_failure_that_nothing_else_explains(tmp_path: Path) -> None:
    failed = Failure("LocationAccessError", "access_denied", "/data/m: permission denied", "chmod", status="403")
    (found,) = findings(of_network(tmp_path, failure=failed))
    assert found.code == "cannot_be_read"
    assert found.said() == (
        "the checkpoint cannot be read (access_denied, HTTP 403): /data/m: permission denied",
        "chmod",
    )
    assert "/data" not in "".join(found.said(anonymous=True))


def test_a_cache_that_is_closed(tmp_path: Path) -> None:
    assert codes(of_network(tmp_path, cache_dir="/cache")) == ["cache_not_writable"]


# ---- the whole


def model(directory: Path, nbytes: int = 3 * MIB) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"w{n}": Raw("U8", (nbytes // 3,), raw_bytes("U8", (nbytes // 3,), n)) for n in range(3)}
    return write_raw(directory / "m.safetensors", tensors)


def test_a_diagnosis_of_a_checkpoint(tmp_path: Path) -> None:
    path = model(tmp_path / "private-directory")
    target = f"40 25 0:55 / {tmp_path} rw - nfs4 filer.secret.example:/vol rw,{FSTAB}"
    recorded = tree(tmp_path / "root", {"proc/self/mountinfo": f"{HEALTHY['proc/self/mountinfo']}\n{target}"})
    of = diagnose([str(path)], root=recorded.root, environment={})
    assert of.missing == ()
    assert of.failure is None
    assert of.checkpoint is not None
    assert (of.checkpoint.nbytes, of.checkpoint.files, of.checkpoint.is_remote) == (3 * MIB, 1, False)
    assert of.prediction is not None
    assert 0 < of.prediction.low < of.prediction.seconds < of.prediction.high
    assert "nfs_one_connection" in codes(of)
    assert str(tmp_path) in findings(of)[0].said()[0]
    json.dumps(report.as_dict(of))
    text = report.anonymous(of)
    assert "nfs_one_connection" in text
    assert "<mount>" in text
    assert "predicted load: " in text
    for private in (str(tmp_path), "private-directory", "m.safetensors", "filer", "secret", "secretcorp", "w0"):
        assert private not in text


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_a_diagnosis_of_a_store_says_where_credentials_come_from_and_shows_none(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = model(tmp_path).read_bytes()
    cache = tmp_path / "cache"
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(cache))
    with servers.web(tmp_path) as remote:
        remote.put("bucket/m.safetensors", body)
        location, options, origin = f"{remote.root}/bucket/m.safetensors?sig=SECRET", {}, "the URL's query"
        if scheme == "s3":
            location, origin = "s3://bucket/m.safetensors", "storage_options"
            options = {"key": "KEYID", "secret": "SECRET", "endpoint_url": remote.root, "region": "eu-west-1"}
        where = {"root": tree(tmp_path / "root").root, "environment": {"PENSTOCK_CACHE_DIR": str(cache)}}
        of = diagnose([location], "cpu", storage_options=options, **where)  # type: ignore[arg-type]
        assert not cache.exists(), "a diagnosis keeps nothing"
        penstock.open(location, cache_dir=cache, storage_options=options).load(framework="np")
        assert penstock.flush_disk_cache()
        kept = diagnose([location], "cpu", storage_options=options, **where)  # type: ignore[arg-type]
    assert (of.failure, of.missing) == (None, ())
    assert of.checkpoint is not None
    assert (of.checkpoint.is_remote, of.checkpoint.nbytes) == (True, 3 * MIB)
    assert of.remote is not None
    assert (of.remote.host, of.remote.credentials) == ("127.0.0.1", origin)
    assert of.remote.region == ("eu-west-1" if scheme == "s3" else None)
    assert of.prediction is not None
    assert of.prediction.limited_by in {"network", "cores", "memory", "consumer"}
    assert kept.prediction is not None
    assert kept.prediction.limited_by != "network", "the disk cache has it whole"
    # How fast the host hands out memory is the machine's at that moment, not the store's.
    assert set(codes(of)) <= {"slow_memory"}
    shown = json.dumps(report.as_dict(of)) + report.anonymous(of)
    assert "SECRET" not in shown
    assert "KEYID" not in shown
    assert "127.0.0.1" not in report.anonymous(of)


def test_a_diagnosis_leaves_the_page_cache_as_it_was(tmp_path: Path) -> None:
    path = model(tmp_path / "m", 24 * MIB)
    of = diagnose([str(path)], "cpu", environment={})
    assert of.checkpoint is not None
    if of.checkpoint.storage in {"tmpfs", "overlay"} or of.checkpoint.cached_share != 1.0:
        pytest.skip(f"the files of this test lie on {of.checkpoint.storage}")
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    cold = diagnose([str(path)], "cpu", environment={})
    assert cold.checkpoint is not None
    assert cold.checkpoint.cached_share is not None
    assert cold.checkpoint.cached_share < 0.2
    assert cold.rates.direct is not None
    after = penstock.open(path).core.cached_share(8)
    assert after is not None
    assert after <= cold.checkpoint.cached_share + 0.2


def test_a_prediction_is_made_of_parts_from_all_places(tmp_path: Path) -> None:
    tensors = {f"w{n:02}": Raw("U8", (64, 1024), raw_bytes("U8", (64, 1024), n)) for n in range(64)}
    ckpt = penstock.open(write_raw(tmp_path / "m.safetensors", tensors))
    for turn in (0, 1):
        names, slices, nbytes = spread(ckpt, MIB, turn)
        places = [int(name[1:]) // 8 for name in names]
        assert set(places) == set(range(8))
        assert nbytes == sum(ckpt[name].nbytes for name in names) == MIB
        assert not slices
    assert set(spread(ckpt, MIB, 0)[0]).isdisjoint(spread(ckpt, MIB, 1)[0])
    names, slices, nbytes = spread(ckpt, MIB // 8, 0)
    assert nbytes == MIB // 8, "large tensors are cut"
    assert all(slices[name] == (slice(0, 16),) for name in names)
    assert spread(ckpt, 1 << 40, 0) == (ckpt.offset_keys(), {}, ckpt.nbytes)


def test_what_a_part_lacks_comes_at_its_later_rate() -> None:
    samples = [(0.1 * n, 10 * n if n <= 10 else 100 + 100 * (n - 10)) for n in range(21)]
    seconds, scatter = extrapolated(Part(1100, 2.0, samples), 11_100)
    assert 11.5 <= seconds <= 13.5, "10,000 at 1,000 a second after the 2 seconds"
    assert scatter > 0.1
    assert extrapolated(Part(1100, 2.0, samples), 1100)[0] == 2.0


def test_parts_together_are_what_a_load_to_slow_memory_goes_through() -> None:
    first, second = Part(100, 1.0, [(0.0, 0), (1.0, 100)]), Part(300, 6.0, [(0.0, 0), (2.0, 100), (6.0, 300)])
    both = joined([first, second])
    assert (both.nbytes, both.seconds, both.samples[-1]) == (400, 7.0, (7.0, 400))
    assert extrapolated(both, 200)[0] == 3.0
    assert extrapolated(both, 500)[0] > 8.0


@pytest.mark.parametrize("path", ["/nowhere/m.safetensors", "no-such.safetensors"])
def test_a_checkpoint_that_is_not_there_is_a_finding(path: str, tmp_path: Path) -> None:
    of = diagnose([path], "cpu", root=tree(tmp_path).root, environment={})
    assert codes(of) == ["cannot_be_read"]
    assert path not in report.anonymous(of)


def test_an_anonymous_text_of_a_store_names_neither_bucket_nor_host_nor_profile(tmp_path: Path) -> None:
    remote = replace(S3, host="minio.secret.example", credentials="the profile 'secret'", proxy="HTTPS_PROXY")
    failed = Failure("StorageError", "connection", "s3://secret/key: no connection to minio.secret.example", "Look")
    checkpoint = Checkpoint(GIB, 2, "s3", is_remote=True, cached_share=None)
    prediction = Prediction(2.0, 1.5, 2.5, 0.5, "network", 24, 1 << 28)
    known = {"remote": remote, "failure": failed, "checkpoint": checkpoint, "prediction": prediction}
    text = report.anonymous(of_network(tmp_path, **known))
    assert "secret" not in text
    assert "region eu-west-1" in text
    assert "limited by: network" in text


def test_every_finding_is_in_the_manual_with_its_severity() -> None:
    source = "".join(
        (Path(report.__file__).parent / f"{of}_rules.py").read_text() for of in ("storage", "machine", "network")
    )
    written = set(re.findall(r'return Finding\(\s+"(\w+)"', source))
    assert len(written) == len(RULES)
    page = (DOCS / "doctor.md").read_text()
    assert written == set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
