"""Tensors when they are asked for: in any order, by any number of threads, each byte read once."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from conftest import Raw, assert_bits, raw_bytes, write_raw

torch = pytest.importorskip("torch")
from penstock.frameworks.streams import as_here
from penstock.integrations.diffusers.together import Together
from penstock.integrations.safetensors.read_ahead import ReadAhead
from penstock.integrations.transformers.lazy import LazyTensor
from penstock.integrations.transformers.supply import Supply, one_group, small_groups
from penstock.patterns import natural_sort_key

pytestmark = pytest.mark.libraries

TENSORS = {
    f"layer.{i}.{part}": Raw("F16", (64, 50 + i), raw_bytes("F16", (64, 50 + i), 7 * i + j))
    for i in range(12)
    for j, part in enumerate("ab")
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> penstock.Checkpoint:
    root = tmp_path_factory.mktemp("supply")
    names = sorted(TENSORS)
    for number in range(3):
        part = {name: TENSORS[name] for name in names[number::3]}
        write_raw(root / f"part-{number}.safetensors", part)
    return penstock.open(root)


@pytest.fixture(params=["one group", "small groups", "one group, read ahead"])
def supply(request: pytest.FixtureRequest, checkpoint: penstock.Checkpoint) -> Iterator[Supply]:
    small = request.param == "small groups"
    made = Supply(checkpoint, small_groups(checkpoint, 20_000) if small else one_group(checkpoint), "cpu")
    if "ahead" in request.param:
        made.begin()
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("threads", [1, 5])
def test_any_order_and_any_number_of_threads(supply: Supply, seed: int, threads: int) -> None:
    names = list(TENSORS)
    random.Random(seed).shuffle(names)
    taken: dict[str, torch.Tensor] = {}

    def take(mine: list[str]) -> None:
        for name in mine:
            taken[name] = supply.take(name)

    workers = [threading.Thread(target=take, args=(names[i::threads],)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert_bits(taken, TENSORS)
    total = sum(len(raw.data) for raw in TENSORS.values())
    assert supply.bytes == total == sum(stats.bytes for stats in supply.stats)


def test_a_tensor_that_is_asked_for_again_is_another(supply: Supply) -> None:
    first = supply.take("layer.3.a")
    first.zero_()
    assert_bits({"x": supply.take("layer.3.a")}, {"x": TENSORS["layer.3.a"]})


def test_parts_are_read_by_themselves(supply: Supply, checkpoint: penstock.Checkpoint) -> None:
    lazy = LazyTensor(supply, checkpoint["layer.5.b"])
    whole = checkpoint.load(["layer.5.b"])["layer.5.b"].view(torch.int16)
    assert torch.equal(lazy[3:9].view(torch.int16), whole[3:9])
    assert torch.equal(lazy[:, 7].contiguous().view(torch.int16), whole[:, 7])


def test_what_nobody_asks_for_is_hardly_read(checkpoint: penstock.Checkpoint) -> None:
    groups = small_groups(checkpoint, 20_000)
    made = Supply(checkpoint, groups, "cpu")
    made.take("layer.0.a")
    made.close()
    assert len(made.stats) <= 1
    assert max(sum(checkpoint[name].nbytes for name in group) for group in groups) <= 20_000


def test_after_the_end_nothing_is_handed_out_and_nothing_remains(
    checkpoint: penstock.Checkpoint, nothing_remains: None
) -> None:
    made = Supply(checkpoint, one_group(checkpoint), "cpu")
    made.begin()
    made.close()
    with pytest.raises(penstock.LoadCancelledError):
        made.take("layer.0.a")


@pytest.mark.parametrize("ahead", [True, False])
def test_a_failure_reaches_everyone_who_waits(tmp_path: Path, ahead: bool, nothing_remains: None) -> None:
    path = write_raw(tmp_path / "x.safetensors", TENSORS)
    checkpoint = penstock.open(path)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    made = Supply(checkpoint, one_group(checkpoint), "cpu")
    if ahead:
        made.begin()
    seen: list[BaseException] = []

    def take(name: str) -> None:
        try:
            made.take(name)
        except penstock.PenstockError as error:
            seen.append(error)

    threads = [threading.Thread(target=take, args=(name,)) for name in list(TENSORS)[:6]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made.close()
    assert len(seen) == 6
    assert all(isinstance(error, penstock.LocationChangedError) for error in seen)
    assert isinstance(made.failure, penstock.LocationChangedError)


def test_closing_does_not_wait_for_storage_that_stalls(tmp_path: Path) -> None:
    shape = (3 << 20,)
    tensors = {f"t{i}": Raw("U8", shape, raw_bytes("U8", shape, i)) for i in range(3)}
    data = write_raw(tmp_path / "x.safetensors", tensors).read_bytes()
    asked, answer = threading.Event(), threading.Event()

    class Stalling(BaseHTTPRequestHandler):
        """Gives the head of the file, and the rest when it is told to."""

        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            start, end = int(first), min(int(last), len(data) - 1)
            if start >= 512 << 10:
                asked.set()
                answer.wait(60)
            self.send_response(206)
            self.send_header("ETag", '"1"')
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
            self.send_header("Content-Length", str(end - start + 1))
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(data[start : end + 1])

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Stalling)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        checkpoint = penstock.open(f"http://127.0.0.1:{server.server_port}/x.safetensors")
        made = Supply(checkpoint, one_group(checkpoint), "cpu")
        made.begin()
        assert asked.wait(60)
        made.close()
        assert not answer.is_set()
    finally:
        answer.set()
        server.shutdown()
        server.server_close()
        serving.join()


def test_a_lazy_tensor_tells_what_it_will_be_without_reading(supply: Supply, checkpoint: penstock.Checkpoint) -> None:
    lazy = LazyTensor(supply, checkpoint["layer.2.a"])
    assert (lazy.get_shape(), lazy.get_dtype(), lazy.ndim, lazy.dim()) == ([64, 52], "F16", 2, 2)
    assert (lazy.shape, lazy.dtype, lazy.numel()) == (torch.Size([64, 52]), torch.float16, 64 * 52)
    assert lazy.is_floating_point()
    assert "layer.2.a" in repr(lazy)
    with pytest.raises(AttributeError):
        lazy.unknown  # noqa: B018
    assert supply.bytes == 0
    assert lazy.to(torch.float32).dtype == torch.float32


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["a", "b.c"])), unique=True))
def test_layers_come_in_the_order_of_their_numbers(layers: list[tuple[int, str]]) -> None:
    names = [f"model.layers.{number}.{part}" for number, part in layers]
    assert sorted(names, key=natural_sort_key) == [f"model.layers.{number}.{part}" for number, part in sorted(layers)]


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.usefixtures("no_threads")
def test_where_no_thread_can_be_started_tensors_come_when_they_are_asked_for(checkpoint: penstock.Checkpoint) -> None:
    supply = Supply(checkpoint, one_group(checkpoint), "cpu")
    supply.begin()
    assert_bits({name: supply.take(name) for name in TENSORS}, TENSORS)
    supply.close()


@pytest.mark.usefixtures("no_threads")
def test_where_no_thread_can_be_started_nothing_is_faulted_in_ahead(checkpoint: penstock.Checkpoint) -> None:
    ahead = ReadAhead(checkpoint, penstock.LoadOptions(), 1000)
    for name in checkpoint.offset_keys():
        ahead.want(name)
    ahead.close()


def test_a_helper_thread_works_under_the_modes_of_who_asked() -> None:
    modes: list[tuple[bool, bool]] = []

    def work() -> None:
        modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    with torch.inference_mode():
        first = as_here(work)
    with torch.no_grad():
        second = as_here(work)
    for there in (first, second, as_here(work)):
        thread = threading.Thread(target=there)
        thread.start()
        thread.join()
    assert modes == [(True, False), (False, False), (False, True)]


def test_components_whose_thread_cannot_work_as_its_caller_fail_instead_of_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("penstock.integrations.diffusers.together.as_here", lambda work: fail)
    together = Together(None)
    done = together.also(lambda: None)
    with together:
        together.run()
        with pytest.raises(RuntimeError, match="out of memory"):
            done.result(timeout=30)
