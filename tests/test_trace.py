"""``trace=``: a time line of a load that Perfetto opens, and that accounts for the load."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import penstock
from conftest import Raw, raw_bytes, write_raw

PHASES = {"X": {"name", "cat", "ts", "dur", "args"}, "M": {"name", "args"}}
"""What the Trace Event Format asks of an event of each kind that we write, besides ``pid`` and ``tid``."""
METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {f"layer.{n}.weight": Raw("F32", (300, 1000), raw_bytes("F32", (300, 1000), n)) for n in range(24)}
    return write_raw(tmp_path / "model.safetensors", tensors)


def events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, each as the format wants it."""
    trace = json.loads(path.read_text())
    assert isinstance(trace["traceEvents"], list)
    for event in trace["traceEvents"]:
        assert PHASES[event["ph"]] <= event.keys()
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert METADATA[event["name"]] in event["args"]
        else:
            assert event["ts"] > 0
            assert event["dur"] >= 0
    return trace["traceEvents"]


def slices(found: list[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    return [event for event in found if event.get("cat") == category]


def test_a_trace_accounts_for_every_byte_that_was_read(file: Path, tmp_path: Path) -> None:
    checkpoint = penstock.open(file, options=penstock.LoadOptions(readers=3, block_bytes=1 << 20))
    checkpoint.load(framework="np", options=penstock.LoadOptions(readers=3, block_bytes="1MiB", trace=tmp_path / "t"))
    found, stats = events(tmp_path / "t"), checkpoint.stats
    assert stats is not None
    reads = slices(found, "read")
    assert sum(event["args"]["bytes"] for event in reads) == stats.read_bytes
    assert len({event["args"]["block"] for event in reads}) == stats.blocks > 20
    assert {event["args"]["file"] for event in reads} == {"model.safetensors"}
    # What readers were at is what the statistics say of it.
    seconds = sum(event["dur"] for event in reads) / 1e6
    assert seconds == pytest.approx(stats.reading_seconds, rel=1e-3, abs=1e-4)
    (load,) = slices(found, "load")
    assert load["args"]["outcome"] == "complete"
    assert load["args"]["bytes"] == stats.bytes
    assert load["dur"] / 1e6 == pytest.approx(stats.seconds, abs=1e-5)


def test_rows_are_threads_by_name_and_their_slices_do_not_overlap(file: Path, tmp_path: Path) -> None:
    penstock.open(file).load(framework="np", options=penstock.LoadOptions(readers=3, trace=tmp_path / "t"))
    found = events(tmp_path / "t")
    names = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    rows = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert rows.keys() <= names.keys()
    assert {name for row, name in names.items() if row in rows} <= {"load", "penstock-0", "penstock-1", "penstock-2"}
    for row in rows.values():
        row.sort()
        assert all(end <= begin + 0.002 for (_, end), (begin, _) in itertools.pairwise(row))


def test_the_variable_traces_every_load_of_every_process_in_one_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TRACE", str(tmp_path / "t.json"))
    code = (
        f"import penstock\nfor _ in range(3): penstock.open({str(file)!r}, options=penstock.LoadOptions())"
        ".load(framework='np')"
    )
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    loads = slices(events(tmp_path / "t.json"), "load")
    assert sorted(load["pid"] for load in loads) == sorted([process.pid for process in running] * 3)


def test_without_being_asked_nothing_is_written(file: Path, tmp_path: Path) -> None:
    assert penstock.LoadOptions().trace is None
    assert penstock.LoadOptions(trace="").trace is None
    penstock.open(file).load(framework="np", options=penstock.LoadOptions(trace=""))
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_stream_that_is_closed_early_says_that_it_was_cancelled(file: Path, tmp_path: Path) -> None:
    options = penstock.LoadOptions(trace=tmp_path / "t", window_bytes=1 << 20)
    tensors = penstock.open(file).stream(framework="np", options=options)
    next(tensors)
    tensors.close()
    (load,) = slices(events(tmp_path / "t"), "load")
    assert load["args"]["outcome"] == "cancelled"


@pytest.mark.parametrize("content", ["my notes", '{"traceEvents":[]}', ""])
def test_a_file_that_is_no_trace_of_ours_is_left_as_it_is(
    content: str, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "notes.txt"
    other.write_text(content)
    with caplog.at_level(logging.WARNING, "penstock"):
        loaded = penstock.open(file).load(framework="np", options=penstock.LoadOptions(trace=other))
        penstock.open(file)  # what the core logs comes with the next call
    assert len(loaded) == 24
    if content:
        assert other.read_text() == content
        assert "no trace of Penstock" in caplog.text
    else:
        assert slices(events(other), "load")


def test_a_trace_that_cannot_be_written_fails_no_load(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = penstock.LoadOptions(trace=tmp_path / "nowhere" / "t.json")
    with caplog.at_level(logging.WARNING, "penstock"):
        assert len(penstock.open(file).load(framework="np", options=options)) == 24
    assert "the trace of a load could not be written" in caplog.text
    with pytest.raises(penstock.ConfigError, match="trace=7 is not a path"):
        penstock.LoadOptions(trace=7)  # type: ignore[arg-type]


def test_what_is_printed_of_a_load_goes_by_stages_and_ends_with_advice(file: Path) -> None:
    checkpoint = penstock.open(file)
    checkpoint.load(framework="np")
    stats = checkpoint.stats
    assert stats is not None
    first, *stages, last = str(stats).splitlines()
    assert first.startswith("24 tensors, 28.80 MB in ")
    assert [line[:22].strip() for line in stages[:2]] == ["read", "place and enqueue"]
    assert last == stats.advice
    assert stats.limited_by.split()[-1] in last
    assert stats.storage_kind in {"memory", "disk"}
