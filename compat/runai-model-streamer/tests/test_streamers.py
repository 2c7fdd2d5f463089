"""What the documentation of runai_model_streamer states, of this package."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))

import runai_model_streamer  # noqa: E402
from runai_model_streamer import (  # noqa: E402
    DistributedStreamer,
    FileChunks,
    FileStreamer,
    ObjectStorageModel,
    SafetensorsStreamer,
    list_safetensors,
    pull_files,
)
from runai_model_streamer._penstock import (  # noqa: E402
    RunaiStreamerInvalidInputException,
    RunaiStreamerMemoryLimitException,
    load_options,
    storage_options,
)
from runai_model_streamer.s3_utils.s3_utils import S3Credentials  # noqa: E402
from runai_model_streamer.safetensors_streamer import safetensors_pytorch  # noqa: E402
from runai_model_streamer.safetensors_streamer.safetensors_pytorch import prepare_request  # noqa: E402
from runai_model_streamer.safetensors_streamer.streamer_mock import StreamerPatcher  # noqa: E402

import penstock  # noqa: E402
import servers  # noqa: E402

pytestmark = pytest.mark.libraries

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("RUNAI_STREAMER", "AWS_")):
            monkeypatch.delenv(name)


def tensors(seed: int) -> dict[str, Any]:
    made: dict[str, Any] = {f"f{seed}.scalar": torch.tensor(seed + 0.5), f"f{seed}.empty": torch.empty(0, 3)}
    for index, dtype in enumerate(DTYPES):
        values = torch.randint(0, 2, (37 + index, 129), generator=torch.Generator().manual_seed(seed * 10 + index))
        made[f"f{seed}.{index}"] = values.to(dtype)
    return made


@pytest.fixture
def files(tmp_path: Path) -> tuple[list[str], dict[str, Any]]:
    paths, held = [], {}
    for seed in range(3):
        path = tmp_path / f"{seed}.safetensors"
        penstock.save_file(tensors(seed), path)
        paths.append(str(path))
        held |= tensors(seed)
    return paths, held


def same(one: Any, other: Any) -> bool:
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else t.reshape(-1) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*as_bytes)


@pytest.mark.parametrize("owned", [True, False])
def test_every_tensor_comes_once_and_stays_what_it_was(files: Any, owned: bool) -> None:
    paths, held = files
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths, owned=owned)
        kept = list(streamer.get_tensors())
    assert sorted(name for name, _ in kept) == sorted(held)
    assert all(same(tensor, held[name]) for name, tensor in kept), "after the streamer has gone too"
    for _, tensor in kept:
        if tensor.numel():
            tensor.zero_()
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(paths[0])
        assert all(same(tensor, held[name]) for name, tensor in streamer.get_tensors()), "and writing to one is safe"


def test_metadata_tells_the_tensors_of_each_file_in_order(files: Any) -> None:
    paths, held = files
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths)
        metadata = streamer.files_to_tensors_metadata
        assert list(metadata) == [0, 1, 2]
        for number, described in metadata.items():
            assert {m.name for m in described} == set(tensors(number))
            ends = 0
            for m in described:
                assert m.offsets.start == ends
                ends = m.offsets.end
                wanted = held[m.name]
                assert (m.get_torch_dtype(), m.shape) == (wanted.dtype, list(wanted.shape))
                assert (m.get_item_count(), m.get_element_size()) == (wanted.numel(), wanted.element_size())
        assert streamer.total_size == sum(t.numel() * t.element_size() for t in held.values())
        assert len(list(streamer.get_tensors())) == len(held)
    start, described, sizes = prepare_request(DistributedStreamer(), [paths[1]], None)[0]
    assert start == 8 + int.from_bytes(Path(paths[1]).read_bytes()[:8], "little")
    assert sizes == [m.get_bytesize() for m in described]


def test_named_tensors_only(files: Any) -> None:
    paths, held = files
    names = ["f0.1", "f2.3", "f2.scalar"]
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths, tensor_names=names)
        assert [[m.name for m in described] for described in streamer.files_to_tensors_metadata.values()][1] == []
        assert {name: same(tensor, held[name]) for name, tensor in streamer.get_tensors()} == dict.fromkeys(names, True)
        for wrong, words in (("f0.1", "single str"), ([], "must not be empty"), (["f0.1", "nope"], r"not found.*nope")):
            with pytest.raises(ValueError, match=words):
                streamer.stream_files(paths, tensor_names=wrong)


def test_files_with_the_same_names_are_streamed_both(tmp_path: Path) -> None:
    for number in range(2):
        penstock.save_file(
            {"w": torch.full((3,), float(number)), f"own{number}": torch.zeros(1)}, tmp_path / str(number)
        )
    paths = [str(tmp_path / "0"), str(tmp_path / "1")]
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths)
        assert sorted(t[0].item() for name, t in streamer.get_tensors() if name == "w") == [0.0, 1.0]
        with pytest.raises(ValueError, match=r"more than one file.*'w'"):
            streamer.stream_files(paths, tensor_names=["w"])


def test_a_stream_may_be_left_and_another_begun(files: Any) -> None:
    paths, held = files
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths)
        next(iter(streamer.get_tensors()))
        streamer.stream_files(paths[1:])
        assert len(list(streamer.get_tensors())) == 2 * len(held) // 3


def test_a_stream_that_is_dropped_late_does_not_end_the_next(files: Any, tmp_path: Path) -> None:
    paths, held = files
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths)
        late = streamer.get_tensors()
        next(late)
        streamer.stream_files(paths)
        following = streamer.get_tensors()
        got = dict([next(following)])
        late.close()
        assert set(got | dict(following)) == set(held)
    (tmp_path / "f").write_bytes(bytes(range(100)))
    request = [FileChunks(0, str(tmp_path / "f"), 0, [10] * 10)]
    for kind in (FileStreamer, DistributedStreamer):
        ranges = kind()
        with ranges:
            ranges.stream_files(request)
            late_ranges = ranges.get_chunks()
            next(late_ranges)
        with ranges:
            ranges.stream_files(request)
            late_ranges.close()
            assert sorted(index for _, index, _ in ranges.get_chunks()) == list(range(10)), kind
        with ranges:
            ranges.stream_files(request)
            with pytest.raises(KeyError):
                for _ in ranges.get_chunks():
                    raise KeyError
            ranges.stream_files(request)
            assert len(list(ranges.get_chunks())) == 10, "a consumer that gives up leaves it usable"


def test_a_misaligned_tensor_is_usable(tmp_path: Path) -> None:
    header = {"odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
              "w": {"dtype": "F32", "shape": [4], "data_offsets": [3, 19]}}  # fmt: skip
    text = json.dumps(header).encode()
    data = b"abc" + torch.arange(4.0).numpy().tobytes()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(tmp_path / "x.safetensors"))
        loaded = dict(streamer.get_tensors())
    assert loaded["w"].data_ptr() % 4 == 0
    assert torch.equal(loaded["w"], torch.arange(4.0))


def test_programs_that_choose_ranges_themselves_get_their_tensors(files: Any) -> None:
    """As those do that read the experts of one rank only."""
    paths, held = files
    wanted = {name for name in held if not name.endswith(("1", "4"))}
    with SafetensorsStreamer() as streamer:
        requests: list[FileChunks] = []
        described: dict[int, list[Any]] = {}
        for path, file in zip(
            paths, safetensors_pytorch.SafetensorsMetadata.from_files(streamer.file_streamer, paths, None), strict=True
        ):
            at, kept = file.offset, []
            for tensor, size in zip(file.tensors_metadata, file.read_sizes, strict=True):
                kept += [(at, size, tensor)] if tensor.name in wanted else []
                at += size
            assert at == os.path.getsize(path)
            described[len(requests)] = [tensor for _, _, tensor in kept]
            requests.append(FileChunks(len(requests), path, [at for at, _, _ in kept], [size for _, size, _ in kept]))
        for _ in range(2):
            streamer.files_to_tensors_metadata = described
            streamer.file_streamer.stream_files(requests, credentials=None, device="cpu", is_distributed=False)
            got = dict(streamer.get_tensors())
            assert set(got) == wanted
            assert all(same(tensor, held[name]) for name, tensor in got.items())
        assert list(streamer.get_tensors()) == [], "nothing is asked for any more"
    with pytest.raises(ValueError, match="not initialized"):
        next(SafetensorsStreamer().get_tensors())


def test_tensors_are_made_of_ranges_at_any_address() -> None:
    values = torch.arange(4.0)
    memory = torch.cat([torch.zeros(3, dtype=torch.uint8), values.view(torch.uint8)])
    w = safetensors_pytorch.SafetensorMetadata("w", {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]})
    odd = safetensors_pytorch.create_torch_tensor(memory[3:].view(1, -1), w)
    assert odd.tolist() == [[0, 1], [2, 3]]
    assert odd.data_ptr() % 4 == 0
    whole = values.view(torch.uint8).view(1, -1)
    assert safetensors_pytorch.create_torch_tensor(whole, w).data_ptr() == values.data_ptr(), (
        "no copy but where it needs"
    )
    none = safetensors_pytorch.SafetensorMetadata("n", {"dtype": "BF16", "shape": [0, 3], "data_offsets": [0, 0]})
    assert same(safetensors_pytorch.create_torch_tensor(memoryview(b""), none), torch.empty(0, 3, dtype=torch.bfloat16))


def test_programs_say_which_dtype_tensors_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = b'{"scale":{"dtype":"F8_E8M0","shape":[3],"data_offsets":[0,3]}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes([1, 127, 254]))
    monkeypatch.setitem(safetensors_pytorch.safetenors_to_torch_dtype, "F8_E8M0", torch.uint8)
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        assert streamer.files_to_tensors_metadata[0][0].get_torch_dtype() == torch.uint8
        assert same(dict(streamer.get_tensors())["scale"], torch.tensor([1, 127, 254], dtype=torch.uint8))


def test_every_spelling_of_the_host_is_the_host(files: Any) -> None:
    for device in (None, "cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)):
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(files[0][0], device=device)
            assert (streamer.device_str, streamer.file_streamer.file_streamer.device_str) == ("cpu", "cpu")
            assert {str(tensor.device) for _, tensor in streamer.get_tensors()} == {"cpu"}


def test_errors_are_value_errors_that_say_what_is_wrong(tmp_path: Path, files: Any) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\x10\0\0\0\0\0\0\0{")
    for path, words in ((str(tmp_path / "absent.safetensors"), "absent.safetensors"), (str(broken), "broken")):
        with SafetensorsStreamer() as streamer, pytest.raises(ValueError, match=words):
            streamer.stream_file(path)
    with SafetensorsStreamer() as streamer, pytest.raises(RunaiStreamerInvalidInputException, match="nowhere"):
        streamer.stream_files(files[0], device="nowhere")


# Files


def test_ranges_of_files_in_any_order(tmp_path: Path) -> None:
    contents = [random.Random(seed).randbytes(300_000) for seed in range(2)]
    requests, wanted = [], {}
    for number, content in enumerate(contents):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(content)
        ranges = [(200_000, 50_000), (5, 100_000), (299_999, 1), (10, 0), (90_000, 30_000)]
        requests.append(FileChunks(70 + number, str(path), [o for o, _ in ranges], [s for _, s in ranges]))
        wanted |= {(70 + number, index): content[o : o + s] for index, (o, s) in enumerate(ranges)}
    with FileStreamer() as streamer:
        streamer.stream_files(requests)
        got = {(file, index): tensor for file, index, tensor in streamer.get_chunks()}
    assert all(tensor.shape[0] == 1 and tensor.dtype == torch.uint8 for tensor in got.values())
    assert {key: bytes(tensor.view(-1).tolist()) for key, tensor in got.items()} == wanted


def test_both_shapes_of_file_chunks() -> None:
    new, old = FileChunks(1, "f", [10, 15], [5, 7]), FileChunks(1, "f", 10, [5, 7])
    for chunks in (new, old, FileChunks.contiguous(1, "f", 10, [5, 7]), FileChunks(1, "f", offset=10, chunks=[5, 7])):
        assert (chunks.offsets, chunks.sizes, chunks.offset, chunks.chunks) == ([10, 15], [5, 7], 10, [5, 7])
        assert (chunks.total_size(), chunks.max_chunk_size()) == (12, 7)
    with pytest.raises(ValueError, match="parallel"):
        FileChunks(1, "f", [1], [2, 3])


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ('{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}', 4, "truncated"),
        ('{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}', 9, "extra trailing bytes"),
        ('{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}', 8, 'tensor "a" does not start'),
        (
            '{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[8],"data_offsets":[4,12]}}',
            12,
            'tensor "a" overlaps with next tensor',
        ),
        ('{"a":{"dtype":"F32","shape":[10],"data_offsets":[0,4]}}', 4, "Shape claims 40 bytes.*but offsets reserve 4"),
        ('{"a":{"dtype":"ALIEN","shape":[4],"data_offsets":[0,4]}}', 4, "Unsupported dtype 'ALIEN'"),
        ('{"a":', 0, "not valid JSON"),
        (" " * 100_000_001, 0, "exceeds limit"),
    ],
)
def test_malformed_files_are_told_of_in_the_words_that_programs_look_for(
    tmp_path: Path, header: str, data: int, words: str
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(data))
    with SafetensorsStreamer() as streamer, pytest.raises(ValueError, match=words) as told:
        streamer.stream_file(str(path))
    assert str(path) in str(told.value)


def test_a_file_streamer_refuses_what_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(10))
    request = FileChunks(0, str(tmp_path / "f"), [0], [10])
    with pytest.raises(ValueError, match="not initialized"):
        FileStreamer().stream_files([request])
    with FileStreamer() as streamer:
        with pytest.raises(RunaiStreamerInvalidInputException, match="multiple source types"):
            streamer.stream_files([request, FileChunks(1, "s3://b/k", [0], [1])])
        # What is wrong with a file is told where its ranges are taken, as callers expect.
        streamer.stream_files([FileChunks(0, str(tmp_path / "f"), [5], [6])])
        with pytest.raises(ValueError, match="ends at byte 10"):
            list(streamer.get_chunks())
        streamer.stream_files([FileChunks(0, str(tmp_path / "absent"), [5], [6])])
        with pytest.raises(ValueError, match="absent"):
            list(streamer.get_chunks())
        with pytest.raises(RunaiStreamerMemoryLimitException, match="9 cannot be smaller than: 10"):
            streamer.stream_files([request], memory_limit=9)
        streamer.stream_files([request])
        with pytest.raises(ValueError, match="outstanding"):
            streamer.stream_files([request])
        assert len(list(streamer.get_chunks())) == 1


def test_distributed_streaming_reads_in_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(bytes(range(10)))
    with DistributedStreamer() as streamer:
        streamer.stream_files([FileChunks(0, str(tmp_path / "f"), [2], [3])], None, "cpu", is_distributed=True)
        assert [tensor.tolist() for _, _, tensor in streamer.get_chunks()] == [[[2, 3, 4]]]
        monkeypatch.setenv("RUNAI_STREAMER_DIST", "perhaps")
        with pytest.raises(ValueError, match="RUNAI_STREAMER_DIST: perhaps"):
            streamer.stream_files([], None, "cpu", is_distributed=True)


def test_files_are_listed_with_patterns(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.json", "sub/c.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"12345")
    listed = FileStreamer().list_files(str(tmp_path))
    assert listed == [(str(tmp_path / name), 5) for name in ("a.safetensors", "b.json", "sub/c.safetensors")]
    assert len(FileStreamer().list_files(str(tmp_path), is_recursive=False)) == 2
    assert (
        len(FileStreamer().list_files(str(tmp_path), allow_patterns=["*.safetensors"], ignore_patterns=["*sub*"])) == 1
    )
    assert list_safetensors(str(tmp_path)) == [str(tmp_path / "a.safetensors")], "not below"
    with pytest.raises(ValueError, match="absent"):
        FileStreamer().list_files(str(tmp_path / "absent"))


# Settings


def test_the_environment_sets_what_it_says(monkeypatch: pytest.MonkeyPatch, files: Any) -> None:
    assert (load_options().readers, load_options().block_bytes, load_options().window_bytes) == (None, None, None)
    monkeypatch.setenv("RUNAI_STREAMER_CONCURRENCY", "3")
    monkeypatch.setenv("RUNAI_STREAMER_CHUNK_BYTESIZE", "1000001")
    monkeypatch.setenv("RUNAI_STREAMER_MEMORY_LIMIT", "0")
    assert (load_options().readers, load_options().block_bytes, load_options().window_bytes) == (3, 999_424, 1)
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files[0])
        assert len(list(streamer.get_tensors())) == len(files[1])
    monkeypatch.setenv("RUNAI_STREAMER_MEMORY_LIMIT", "1000")
    with SafetensorsStreamer() as streamer, pytest.raises(RunaiStreamerMemoryLimitException, match="1000 cannot"):
        streamer.stream_files(files[0])
    for value in ("many", "0"):
        monkeypatch.setenv("RUNAI_STREAMER_CONCURRENCY", value)
        with pytest.raises(ValueError, match="RUNAI_STREAMER_CONCURRENCY"):
            load_options()


def test_credentials_of_a_call_come_before_variables_and_leave_the_environment_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RUNAI_STREAMER_S3_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("RUNAI_STREAMER_S3_UNSIGNED", "1")
    before = dict(os.environ)
    given = S3Credentials(access_key_id="id", secret_access_key="secret", region_name="given")
    assert storage_options(["s3://b/k"], given) == {
        "key": "id",
        "secret": "secret",
        "region": "given",
        "endpoint_url": "http://127.0.0.1:9",
        "anon": "true",
    }
    assert storage_options(["/a/path"], given) == {}
    assert dict(os.environ) == before
    assert "secret" not in repr(given)


def test_credentials_of_a_call_serve_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening and loading, whatever the environment says: nothing of it leads to this store."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    weights = {"w": torch.arange(300_000, dtype=torch.float32)}
    penstock.safetensors.save_file(weights, tmp_path / "m.safetensors")
    directory = tmp_path / "s3"
    directory.mkdir()
    with servers.s3(directory) as remote:
        remote.put("model/m.safetensors", (tmp_path / "m.safetensors").read_bytes())
        setting = remote.environment
        given = S3Credentials(
            access_key_id=setting["AWS_ACCESS_KEY_ID"],
            secret_access_key=setting["AWS_SECRET_ACCESS_KEY"],
            region_name="us-east-1",
            endpoint=setting["AWS_ENDPOINT_URL"],
        )
        before = dict(os.environ)
        url = f"{remote.root}/model/m.safetensors"
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([url], s3_credentials=given)
            assert same(dict(streamer.get_tensors())["w"], weights["w"])
        with FileStreamer() as files:
            files.stream_files([FileChunks(3, url, [0], [8])], given)
            assert [(path, index) for path, index, _ in files.get_chunks()] == [(3, 0)]
        assert list_safetensors(f"{remote.root}/model", given) == [url]
        pull_files(f"{remote.root}/model", str(tmp_path / "pulled"), s3_credentials=given)
        assert (tmp_path / "pulled" / "m.safetensors").stat().st_size == (tmp_path / "m.safetensors").stat().st_size
        assert dict(os.environ) == before
        # Without them, there is no way to it.
        with SafetensorsStreamer() as streamer, pytest.raises(ValueError, match="credentials"):
            streamer.stream_files([url])


def test_files_of_several_stores_are_reached_with_options_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever comes first: credentials of the one mean nothing to the other."""
    servers.forget_settings(monkeypatch, "AWS_", "GOOGLE_", "STORAGE_EMULATOR")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / "s3").mkdir()
    files = []
    for name in ("local", "remote"):
        files.append(tmp_path / f"{name}.safetensors")
        penstock.save_file({name: torch.arange(300_000, dtype=torch.float32)}, files[-1])
    with servers.s3(tmp_path / "s3") as remote:
        remote.put("model/m.safetensors", files[1].read_bytes())
        setting = remote.environment
        given = S3Credentials(
            access_key_id=setting["AWS_ACCESS_KEY_ID"],
            secret_access_key=setting["AWS_SECRET_ACCESS_KEY"],
            endpoint=setting["AWS_ENDPOINT_URL"],
        )
        paths = [str(files[0]), f"{remote.root}/model/m.safetensors"]
        for order in (paths, paths[::-1]):
            with SafetensorsStreamer() as streamer:
                streamer.stream_files(order, given)
                found = {name: tensor.clone() for name, tensor in streamer.get_tensors()}
            assert sorted(found) == ["local", "remote"]
            assert all(torch.equal(tensor, torch.arange(300_000.0)) for tensor in found.values())


def test_nothing_of_a_path_or_of_credentials_is_shown() -> None:
    given = S3Credentials("SENTINEL-id", "SENTINEL", "SENTINEL", "region", "http://me:SENT/SENTINEL@host:9000")
    assert "SENTINEL" not in repr(given)
    assert "SENTINEL" not in repr(S3Credentials(endpoint="me:SENTINEL@host:9000"))
    assert "SENTINEL" not in repr(FileChunks(1, "s3://me:SENT/SENTINEL@bucket/x", 0, [1]))
    with pytest.raises(ValueError, match="expected s3://") as raised:
        ObjectStorageModel("https://me:SENT/SENTINEL@host/x", "/nowhere")
    assert "SENTINEL" not in f"{raised.value} {raised.value!r}"


def test_variables_for_other_stores_are_there_under_the_names_that_penstock_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RUNAI_STREAMER_GCS_CREDENTIAL_FILE", "/keys/of-robot.json")
    assert storage_options(["gs://b/k"]) == {"application_credentials": "/keys/of-robot.json"}
    monkeypatch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", "127.0.0.1:9")
    assert storage_options(["gs://b/k"])["endpoint_url"] == "http://127.0.0.1:9"
    monkeypatch.setenv("RUNAI_STREAMER_S3_ENDPOINT", "http://127.0.0.1:7")
    assert storage_options(["s3://b/k"])["endpoint_url"] == "http://127.0.0.1:7"
    monkeypatch.setenv("RUNAI_STREAMER_OVERRIDE_ENDPOINT_URL", "http://127.0.0.1:8")
    assert storage_options(["s3://b/k"])["endpoint_url"] == "http://127.0.0.1:8"
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT_SUFFIX", "blob.core.usgovcloudapi.net")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    # The account is not named: no endpoint can be made of the suffix.
    assert storage_options(["az://c/k"]) == {}
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "models")
    assert storage_options(["az://c/k"]) == {"endpoint": "https://models.blob.core.usgovcloudapi.net"}


# Of the original's page of variables (docs/src/env-vars.md), and what its wheels of 0.17 read besides.
ORIGINAL = re.findall(
    r"\w+",
    """
CONCURRENCY CHUNK_BYTESIZE MEMORY_LIMIT S3_USE_VIRTUAL_ADDRESSING GCS_CREDENTIAL_FILE DIST DIST_GLOBAL
OVERRIDE_OBJ_PLUGIN OVERRIDE_ENDPOINT_URL CUDA_ALIGNMENT DIRECT_BLOCK DIST_BUFFER_MIN_BYTESIZE DIST_TIMEOUT
FS_CHUNK_BYTESIZE FS_MAX_ENGINES FS_NO_REGISTER_BUFFERS FS_QUEUE_DEPTH FS_REGISTER_BUFFERS FS_STRATEGY
LOG_FILE LOG_LEVEL LOG_TO_STDERR MAX_PADS_PER_BUFFER NO_BOTO3_SESSION OBJ_CONCURRENCY PARTITION_POLICY
PINNED_MEMORY_MODE PROCESS_GROUP_SIZE RING_BUFFERS S3_TIMEOUT S3_UNSIGNED S3_MAX_INFLIGHT_MIB
INFLIGHT_WINDOW_MARGIN GCS_USE_ANONYMOUS_CREDENTIALS EXPERIMENTAL_AZURE_CACHE_ENABLED
EXPERIMENTAL_AZURE_CACHE_LIB
""",
)


def test_every_variable_of_the_original_is_honoured_or_named_as_ignored() -> None:
    page = (Path(__file__).parents[3] / "docs" / "engines" / "runai.md").read_text()
    honoured, _ignored = page.split("are read by the original 0.17 and ignored here:")
    names = re.compile(r"`RUNAI_STREAMER_(\w+)`")
    code = "".join(file.read_text() for file in Path(runai_model_streamer.__file__).parent.rglob("*.py"))
    read = set(re.findall(r"""["']RUNAI_STREAMER_(\w+)["']""", code))
    assert {*ORIGINAL, *read} <= set(names.findall(page))
    assert set(names.findall(honoured)) <= read


def test_the_log_goes_where_it_is_asked_to(files: Any) -> None:
    code = (
        "import sys; from runai_model_streamer import SafetensorsStreamer as S\n"
        "with S() as s: s.stream_files(sys.argv[1:]); list(s.get_tensors())"
    )
    for level, shown in (("INFO", True), ("ERROR", False)):
        paths = os.pathsep.join(sys.path)
        log = {"RUNAI_STREAMER_LOG_TO_STDERR": "1", "RUNAI_STREAMER_LOG_LEVEL": level}
        environment = os.environ | log | {"PYTHONPATH": paths}
        done = subprocess.run([sys.executable, "-c", code, *files[0]], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert ("Overall time to stream" in done.stderr) == shown


# Models of object stores, over a directory in the place of the bucket


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StreamerPatcher:
    model = tmp_path / "bucket" / "model"
    model.mkdir(parents=True)
    penstock.save_file({"w": torch.arange(4.0)}, model / "w.safetensors")
    (model / "config.json").write_text("{}")
    patcher = StreamerPatcher(str(tmp_path / "bucket"))
    monkeypatch.setattr(
        "runai_model_streamer.safetensors_streamer.safetensors_streamer.pull_files", patcher.shim_pull_files
    )
    return patcher


def test_a_patched_streamer_reads_a_directory_as_a_bucket(bucket: StreamerPatcher) -> None:
    assert bucket.shim_list_safetensors("s3://any/model") == ["s3://any/model/w.safetensors"]
    with bucket.create_mock_streamer() as streamer:
        streamer.stream_files(["gs://any/model/w.safetensors"])
        assert {name: tensor.tolist() for name, tensor in streamer.get_tensors()} == {"w": [0, 1, 2, 3]}


def test_a_model_is_brought_once_and_again_after_a_failure(bucket: StreamerPatcher, tmp_path: Path) -> None:
    target = str(tmp_path / "cache")
    with pytest.raises(KeyError), ObjectStorageModel("s3://any/model", target) as model:
        model.pull_files(allow_pattern=["*.json"])
        raise KeyError
    assert not (tmp_path / "cache" / ObjectStorageModel.SENTINEL_NAME).exists()
    with ObjectStorageModel("s3://any/model", target) as model:
        model.pull_files()
    assert sorted(os.listdir(target)) == [".runai_complete", "config.json", "w.safetensors"]
    os.remove(tmp_path / "bucket" / "model" / "config.json")
    with ObjectStorageModel("s3://any/model", target) as model:
        model.pull_files()
    assert "config.json" in os.listdir(target), "it is complete, so nothing is done"
    with pytest.raises(RuntimeError, match="No files"), ObjectStorageModel("s3://any/model", str(tmp_path / "other")):
        pass
    with pytest.raises(ValueError, match="expected s3://"):
        ObjectStorageModel("/local", target)


def test_others_wait_for_the_one_who_brings_the_model(bucket: StreamerPatcher, tmp_path: Path) -> None:
    brought = []

    def bring() -> None:
        with ObjectStorageModel("s3://any/model", str(tmp_path / "cache")) as model:
            brought.append(not model._skip)
            model.pull_files()

    threads = [threading.Thread(target=bring) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(brought) == [False] * 7 + [True]


def test_local_models_are_not_pulled(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="file system paths"):
        pull_files(str(tmp_path), str(tmp_path / "to"))
