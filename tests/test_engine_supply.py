"""Tensors when they are asked for: in any order, by any number of threads, each byte read once."""

from __future__ import annotations

import os
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
from penstock.patterns import natural_sort_key
from penstock.safetensors import safe_open
from penstock.supply import InOrder
from penstock.supply.read_ahead import ReadAhead
from penstock.supply.streamed import Supply, one_group, small_groups

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
def supply(
    request: pytest.FixtureRequest, checkpoint: penstock.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Supply]:
    monkeypatch.setattr("penstock.supply.streamed.GROUP_BYTES", 20_000)
    small = request.param == "small groups"
    made = Supply(checkpoint, small_groups(checkpoint) if small else one_group(checkpoint), "cpu")
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
    lazy = safe_open.of_source(checkpoint, supply).get_slice("layer.5.b")
    whole = checkpoint.load(["layer.5.b"])["layer.5.b"].view(torch.int16)
    assert torch.equal(lazy[3:9].view(torch.int16), whole[3:9])
    assert torch.equal(lazy[:, 7].contiguous().view(torch.int16), whole[:, 7])


def test_what_nobody_asks_for_is_hardly_read(checkpoint: penstock.Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.supply.streamed.GROUP_BYTES", 20_000)
    groups = small_groups(checkpoint)
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


def test_a_slice_tells_what_it_will_be_without_reading(supply: Supply, checkpoint: penstock.Checkpoint) -> None:
    with safe_open.of_source(checkpoint, supply) as file:
        lazy = file.get_slice("layer.2.a")
    assert (lazy.get_shape(), lazy.get_dtype()) == ([64, 52], "F16")
    assert supply.bytes == 0
    # The source is not the file's to close.
    assert_bits({"x": lazy[...]}, {"x": TENSORS["layer.2.a"]})


# ---- safe_open with memory of its own


class Counted(InOrder):
    """Notes what is read by itself."""

    def __init__(self, checkpoint: penstock.Checkpoint) -> None:
        self.alone: list[str] = []
        super().__init__(checkpoint)

    def part(self, name: str, selection: object) -> torch.Tensor:
        self.alone.append(name)
        return super().part(name, selection)  # type: ignore[no-any-return,arg-type]


@pytest.fixture
def in_order(checkpoint: penstock.Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    monkeypatch.setattr("penstock.supply.in_order.GROUP_BYTES", 20_000)
    made = Counted(checkpoint)
    yield made
    made.close()


@pytest.mark.parametrize("offsets", [True, False])
def test_who_takes_tensors_in_order_has_them_read_ahead_again_and_again(
    in_order: Counted, checkpoint: penstock.Checkpoint, offsets: bool
) -> None:
    names = checkpoint.offset_keys() if offsets else list(checkpoint)
    for _ in range(2):
        assert_bits({name: in_order.take(name) for name in names}, TENSORS)
    # Of each round the first: until then nobody knows that others follow.
    assert in_order.alone == [names[0]] * 2


@pytest.mark.parametrize("seed", range(3))
def test_tensors_in_no_order_are_read_one_by_one(in_order: Counted, seed: int) -> None:
    names = list(TENSORS)
    random.Random(seed).shuffle(names)
    taken = {name: in_order.take(name) for name in names}
    assert_bits(taken, TENSORS)
    assert len(in_order.alone) > len(names) // 2


def test_what_is_read_ahead_is_the_users_own(in_order: Counted, checkpoint: penstock.Checkpoint) -> None:
    for name in list(checkpoint):
        in_order.take(name).zero_()
    assert_bits({name: in_order.take(name) for name in list(checkpoint)}, TENSORS)


def test_several_threads_take_from_one_file(in_order: Counted, checkpoint: penstock.Checkpoint) -> None:
    taken: dict[str, torch.Tensor] = {}
    names = list(checkpoint)

    def take(mine: list[str]) -> None:
        for name in mine:
            taken[name] = in_order.take(name)

    threads = [threading.Thread(target=take, args=(names[i::3],)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_bits(taken, TENSORS)


def test_a_child_that_was_forked_while_reading_ahead_reads_by_itself(
    in_order: Counted, checkpoint: penstock.Checkpoint
) -> None:
    names = list(checkpoint)
    for name in names[:2]:
        in_order.take(name)
    child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):
            assert_bits({name: in_order.take(name) for name in names}, TENSORS)
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_bits({name: in_order.take(name) for name in names[2:]}, {name: TENSORS[name] for name in names[2:]})


def test_what_failed_while_reading_ahead_is_tried_again(
    in_order: Counted, checkpoint: penstock.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise penstock.StorageError("the network is away")

    names = list(checkpoint)
    in_order.take(names[0])
    with monkeypatch.context() as away:
        away.setattr(penstock.Checkpoint, "begin", fail)
        with pytest.raises(penstock.StorageError, match="away"):
            in_order.take(names[1])
    assert_bits({name: in_order.take(name) for name in names}, TENSORS)


def test_a_file_that_is_left_while_it_is_read_ahead_leaves_nothing(tmp_path: Path, nothing_remains: None) -> None:
    path = write_raw(tmp_path / "x.safetensors", TENSORS)
    with penstock.safe_open(path) as file:
        names = file.keys()
        for name in names[:3]:
            file.get_tensor(name)
        part = file.get_slice(names[5])
    assert_bits({"x": part[...]}, {"x": TENSORS[names[5]]})


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
def test_where_no_thread_can_be_started_nothing_is_faulted_in_ahead(
    checkpoint: penstock.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.supply.read_ahead.STRETCH_BYTES", 1000)
    ahead = ReadAhead(checkpoint)
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
