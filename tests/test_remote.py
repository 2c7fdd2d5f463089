"""Checkpoints on object stores and HTTP servers: opened, inspected, loaded and streamed as local ones are."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock
import servers
from conftest import Raw, assert_bits, shard, threads, threads_left
from services import Asked, service

# One S3 and one HTTP server are in `make test`, the others in `make test-stores`.
EACH = [name if name in {"moto", "web"} else pytest.param(name, marks=pytest.mark.stores) for name in servers.ALL]


@pytest.fixture(scope="module", params=EACH)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Remote]:
    with servers.ALL[request.param](tmp_path_factory.mktemp("server")) as remote:
        yield remote


@pytest.fixture
def remote(server: servers.Remote, monkeypatch: pytest.MonkeyPatch) -> servers.Remote:
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)
    # Or credential chains ask addresses that nobody answers at.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def model(remote: servers.Remote, tmp_path: Path) -> tuple[str, dict[str, Raw]]:
    """A sharded model: where it is, and its tensors."""
    tensors: dict[str, Raw] = {}
    weight_map = {}
    for number in range(3):
        body, held = shard(tmp_path, number)
        remote.put(f"model/part-{number}.safetensors", body)
        tensors |= held
        weight_map |= dict.fromkeys(held, f"part-{number}.safetensors")
    remote.put("model/model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())
    return f"{remote.root}/model/", tensors


def test_a_sharded_model_is_opened_by_its_prefix_and_loaded_bit_by_bit(model: tuple[str, dict[str, Raw]]) -> None:
    where, tensors = model
    ckpt = penstock.open(where)
    assert set(ckpt) == set(tensors)
    assert [location for location, _ in ckpt.files] == [f"{where}part-{number}.safetensors" for number in range(3)]
    loaded = ckpt.load(framework="np")
    assert_bits(loaded, tensors)
    # Nothing is read that is not asked for, and nothing twice.
    assert ckpt.stats is not None
    assert ckpt.stats.read_bytes == ckpt.nbytes


def test_a_stream_and_a_slice_bring_what_they_should(model: tuple[str, dict[str, Raw]]) -> None:
    where, tensors = model
    ckpt = penstock.open(where)
    assert_bits(dict(ckpt.stream(framework="np")), tensors)
    name = "s1.t2"
    whole = np.frombuffer(tensors[name].data, np.float32).reshape(tensors[name].shape)
    part = ckpt.load([name], slices={name: (slice(3, 99), slice(7, 8))}, framework="np")[name]
    np.testing.assert_array_equal(part, whole[3:99, 7:8])


@pytest.mark.gpu
def test_a_model_goes_straight_to_the_gpu(model: tuple[str, dict[str, Raw]]) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    url, tensors = model
    loaded = penstock.open(url).load(device="cuda")
    assert all(tensor.is_cuda for tensor in loaded.values())
    assert_bits(loaded, tensors)


def test_tensors_that_exist_are_filled(model: tuple[str, dict[str, Raw]]) -> None:
    where, tensors = model
    held = {name: np.zeros(tensor.shape, np.float32) for name, tensor in tensors.items()}
    ckpt = penstock.open(where)
    ckpt.load_into(held)
    assert_bits(held, tensors)
    # One request for a block, wherever its tensors are.
    assert ckpt.stats is not None
    assert ckpt.stats.calls == ckpt.stats.blocks


def test_a_stream_left_early_leaves_nothing_behind(model: tuple[str, dict[str, Raw]]) -> None:
    where, tensors = model
    assert_bits(penstock.open(where).load(framework="np"), tensors)
    before = threads()
    stream = penstock.open(where).stream(framework="np")
    next(stream)
    stream.close()
    assert not threads_left(but=before)


def _network_files() -> list[str]:
    kinds = []
    for file in Path("/proc/self/fd").iterdir():
        # The directory that is read here is one of its own entries.
        with contextlib.suppress(FileNotFoundError):
            kinds.append(str(file.readlink()))
    return [kind for kind in kinds if kind.startswith(("socket:", "anon_inode:[event"))]


def test_no_connection_outlives_its_load(remote: servers.Remote, model: tuple[str, dict[str, Raw]]) -> None:
    if remote.requests is not None:
        pytest.skip("this server's own connections are this process's too")
    # The first one makes what the process has once.
    penstock.open(model[0]).load(framework="np")
    before = len(_network_files())
    for _ in range(3):
        penstock.open(model[0]).load(framework="np")
    assert len(_network_files()) <= before


def test_what_is_not_there_is_told(remote: servers.Remote) -> None:
    for location in ("nothing/model.safetensors", "nothing/"):
        with pytest.raises(penstock.LocationNotFoundError) as raised:
            penstock.open(f"{remote.root}/{location}")
        assert raised.value.location is not None
        assert raised.value.location.startswith(f"{remote.root}/nothing")


def test_what_is_not_there_is_told_with_what_is_like_it(remote: servers.Remote, tmp_path: Path) -> None:
    body, _ = shard(tmp_path, 0)
    for key in ("like/llama-3-8b/model.safetensors", "like/llama-3-8b/config.json", "like/other/x.safetensors"):
        remote.put(key, body)
    root = f"{remote.root}/like"
    for typed, said in (
        ("lama-3-8b/", f"Did you mean {root}/llama-3-8b/?"),
        ("lama-3-8b", f"Did you mean {root}/llama-3-8b/?"),
        ("llama-3-8b/modle.safetensors", f"Did you mean {root}/llama-3-8b/model.safetensors?"),
        ("llama-3-8b/weights.safetensors", f"{root}/llama-3-8b/ holds config.json, model.safetensors"),
        ("unlike/", f"{root}/ holds llama-3-8b/, other/"),
    ):
        for call in (penstock.open, lambda url: penstock.pull(url, tmp_path / "to")):
            with pytest.raises(penstock.LocationNotFoundError) as raised:
                call(f"{root}/{typed}")
            # A plain server cannot list.
            if remote.requests is None:
                assert said in (raised.value.remedy or "")
                assert str(raised.value).endswith(raised.value.remedy or "none")
            assert raised.value.location == f"{root}/{typed}"
    with pytest.raises(penstock.LocationNotFoundError):
        penstock.open(f"{root}/none*.safetensors")
    if remote.requests is None:  # a bucket has no neighbours
        with pytest.raises(penstock.PenstockError) as raised:
            penstock.open(remote.root.replace(servers.BUCKET, "absent-bucket") + "/model/")
        assert "Did you mean" not in str(raised.value)


def test_neighbours_that_take_long_to_list_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def answer(asked: Asked) -> tuple[int, str]:
        if "list-type" in asked.path:
            ended.wait(30)
        return 404, "<Error><Code>NoSuchKey</Code><Message>No</Message></Error>"

    servers.forget_settings(monkeypatch, "AWS_", "PENSTOCK_")
    with service(answer) as (url, _):
        began = time.monotonic()
        with pytest.raises(penstock.LocationNotFoundError, match="Check the key: it is compared letter by letter"):
            penstock.open("s3://b/m.safetensors", storage_options={"anon": True, "endpoint_url": url})
        assert time.monotonic() - began < 10
        ended.set()


def test_a_key_that_looks_like_a_pattern_is_itself(remote: servers.Remote, tmp_path: Path) -> None:
    for number, key in enumerate(["odd/a[1]/m[fp16].safetensors", "odd/a[1]/mf.safetensors", "odd/a1/mf.safetensors"]):
        remote.put(key, shard(tmp_path, number)[0])

    def names(location: str) -> set[str]:
        return {name.split(".")[0] for name in penstock.open(f"{remote.root}/odd/{location}")}

    assert names("a[1]/m[fp16].safetensors") == {"s0"}
    # Nor is a directory of that name in the way of a pattern, where there can be one.
    if remote.requests is None:
        assert names("a[1]/m[f].safetensors") == {"s1"}
        assert names("a[1]/") == {"s0", "s1"}
        with pytest.raises(penstock.LocationNotFoundError, match="a part before the last holds a pattern"):
            penstock.open(f"{remote.root}/odd/a[2]/*.safetensors")


def test_a_remote_file_cannot_be_mapped(model: tuple[str, dict[str, Raw]]) -> None:
    with pytest.raises(penstock.ConfigError, match="only local files can be mapped"):
        penstock.open(model[0]).load(framework="np", mmap=True)


def test_the_command_inspects_a_url(model: tuple[str, dict[str, Raw]]) -> None:
    command = [sys.executable, "-m", "penstock.cli", "inspect", "--json", model[0]]
    shown = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert "s2.t1" in json.dumps(shown)


def _load_in_child(where: str, queue: multiprocessing.Queue[float]) -> None:
    loaded = penstock.open(where).load(framework="np")
    queue.put(float(sum(np.nan_to_num(tensor.view(np.uint8)).sum() for tensor in loaded.values())))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_loads_with_connections_of_its_own(model: tuple[str, dict[str, Raw]]) -> None:
    where, tensors = model
    # The parent has connections and threads by now; the child has neither.
    assert_bits(penstock.open(where).load(framework="np"), tensors)
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[float] = context.Queue()
    child = context.Process(target=_load_in_child, args=(where, queue))
    child.start()
    total = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    assert total == sum(np.frombuffer(tensor.data, np.uint8).sum() for tensor in tensors.values())
    assert_bits(penstock.open(where).load(framework="np"), tensors)


def test_ctrl_c_ends_the_wait_for_a_server_that_does_not_answer() -> None:
    script = (
        "import socket, sys, threading, time, penstock\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "threading.Thread(target=lambda: (server.accept(), print('asked', flush=True)), daemon=True).start()\n"
        "try:\n"
        "    penstock.open(f'http://127.0.0.1:{server.getsockname()[1]}/m.safetensors')\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', [thread.name for thread in threading.enumerate() if 'penstock' in thread.name])\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "interrupted []\n"
        # Far from the half minute after which silence counts as a failure.
        assert time.monotonic() - began < 10


def test_ctrl_c_ends_a_load_of_one_block_from_a_server_that_fell_silent() -> None:
    script = textwrap.dedent(
        """
        import http.server, json, threading, penstock
        header = json.dumps({"w": {"dtype": "U8", "shape": [700_000], "data_offsets": [0, 700_000]}}).encode()
        body = len(header).to_bytes(8, "little") + header + bytes(700_000)
        opened = threading.Event()

        class Server(http.server.BaseHTTPRequestHandler):
            def log_message(self, *arguments): ...

            def do_GET(self):
                if opened.is_set():
                    print("asked", flush=True)
                    threading.Event().wait(60)
                first, last = self.headers["Range"].removeprefix("bytes=").split("-")
                part = body[int(first) : int(last) + 1]
                self.send_response(206)
                self.send_header("ETag", '"1"')
                self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(body)}")
                self.send_header("Content-Length", str(len(part)))
                self.end_headers()
                self.wfile.write(part)

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ckpt = penstock.open(f"http://127.0.0.1:{server.server_port}/m.safetensors")
        opened.set()
        try:
            ckpt.load(framework="np")
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGINT)
        said = process.stdout.readline()
        process.kill()
    assert said == "interrupted\n"


@pytest.mark.stores
@pytest.mark.parametrize("kind", ["s3", "web"])
def test_a_load_outlasts_twenty_seconds_without_any_connection(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    directory = tmp_path / "served"
    directory.mkdir()
    with servers.ALL[kind](directory) as remote:
        for name, value in remote.environment.items():
            monkeypatch.setenv(name, value)
        # Enough for the cut to come in the middle.
        tensors: dict[str, Raw] = {}
        for seed in range(8):
            body, held = shard(tmp_path, seed, count=12)
            remote.put(f"m/{seed}.safetensors", body)
            tensors |= held
        server = remote.environment["AWS_ENDPOINT_URL"] if kind == "s3" else remote.root
        line = servers.Line(int(server.rpartition(":")[2]))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{line.port}")
        root = remote.root if kind == "s3" else f"http://127.0.0.1:{line.port}"
        ckpt = penstock.open([f"{root}/m/{seed}.safetensors" for seed in range(8)])
        opened, whole = line.passed, sum(held.nbytes for held in ckpt.values())

        def cut() -> None:
            while line.passed < opened + whole // 4:
                time.sleep(0.001)
            line.cut()
            time.sleep(20)
            line.mend()

        cutting = threading.Thread(target=cut)
        cutting.start()
        began = time.monotonic()
        loaded = ckpt.load(framework="np")
        took = time.monotonic() - began
        cutting.join()
        assert_bits(loaded, tensors)
        assert took > 20, "the load was over before the line was cut"
        assert ckpt.stats is not None
        assert ckpt.stats.calls > ckpt.stats.blocks


def test_secrets_are_in_no_error_and_no_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with servers.web(tmp_path) as remote:
        body, _ = shard(tmp_path, 0)
        remote.put("m.safetensors", body)
        ckpt = penstock.open(f"{remote.root}/m.safetensors?X-Amz-Signature=SENTINEL")
        shown = f"{ckpt!r} {ckpt.files} {ckpt['s0.t0'].location}"
        assert "SENTINEL" not in shown
        ckpt.load(framework="np")
        with pytest.raises(penstock.PenstockError) as raised:
            penstock.open(f"{remote.root}/none.safetensors?X-Amz-Signature=SENTINEL")
        assert "SENTINEL" not in f"{raised.value!r} {raised.value} {vars(raised.value)}"


def test_importing_starts_no_thread_and_opening_local_files_neither(tmp_path: Path) -> None:
    body, _ = shard(tmp_path, 0)
    (tmp_path / "m.safetensors").write_bytes(body)
    script = (
        "import os, sys, penstock\n"
        "penstock.open(sys.argv[1]).keys()\n"
        "print([open(f'/proc/self/task/{t}/comm').read().strip() for t in os.listdir('/proc/self/task')])\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "m.safetensors")]
    assert "net-penstock" not in subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
