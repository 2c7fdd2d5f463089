"""The ``penstock`` command, run as people and scripts run it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("typer")
pytest.importorskip("rich")

COMMAND = [sys.executable, "-m", "penstock.cli"]


def penstock(*arguments: object, columns: int | None = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end. Loads use numpy, which starts faster than torch."""
    settings = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    settings |= {"NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"} | environment
    settings.pop("COLUMNS", None)
    if columns is not None:
        settings["COLUMNS"] = str(columns)
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=settings, check=False, timeout=60)


def load(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return penstock("load", "--framework", "np", *arguments, **environment)


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON of a command that went well."""
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A file with twelve layers, a scalar and metadata: 14 tensors, 1,205 parameters."""
    tensors: dict[str, np.ndarray] = {f"layer.{i}.weight": np.full((10, 10), i, np.float32) for i in range(12)}
    tensors |= {"embed": np.arange(4, dtype=np.int64), "step": np.array(7, np.float16)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "np", "author": "someone"})
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A directory with two shards and their index."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    where = {}
    for number in (1, 2):
        file = f"model-{number:05}-of-00002.safetensors"
        name = f"model.layers.{number}.self_attn.q_proj.weight"
        save_file({name: np.ones((number, 1000), np.float32)}, folder / file)
        where[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.fixture
def malformed(tmp_path: Path) -> Path:
    path = tmp_path / "malformed.safetensors"
    path.write_bytes(b"\xff" * 100)
    return path


class TestInspect:
    """``penstock inspect``"""

    def test_shows_every_tensor_and_the_totals(self, single: Path) -> None:
        shown = penstock("inspect", single)
        assert shown.returncode == 0, shown.stderr
        rows = [line.split() for line in shown.stdout.splitlines()]
        assert ["layer.3.weight", "F32", "10×10", "400", "B"] in rows
        assert ["step", "F16", "scalar", "2", "B"] in rows
        assert "14 tensors, 1,205 parameters, 4.83 kB in 1 file" in shown.stdout
        assert "F32 4.80 kB, I64 32 B, F16 2 B" in shown.stdout
        assert "author: someone" in shown.stdout

    def test_names_the_shard_of_each_tensor(self, sharded: Path) -> None:
        shown = penstock("inspect", sharded)
        assert "in 2 files" in shown.stdout
        rows = [line.split() for line in shown.stdout.splitlines()]
        assert ["model.layers.2.self_attn.q_proj.weight", "F32", "2×1000", "8.00", "kB",
                "model-00002-of-00002.safetensors"] in rows  # fmt: skip

    def test_numbers_shards_where_the_terminal_is_narrow(self, sharded: Path) -> None:
        lines = penstock("inspect", sharded, columns=80).stdout.splitlines()
        assert all(len(line) <= 80 for line in lines)
        assert any("q_proj.weight" in line and line.rstrip().endswith("2/2") for line in lines)

    def test_tells_files_of_one_name_apart(self, tmp_path: Path) -> None:
        for part in ("unet", "vae"):
            (tmp_path / part).mkdir()
            save_file({f"{part}.w": np.zeros(1, np.float32)}, tmp_path / part / "model.safetensors")
        shown = penstock("inspect", tmp_path / "unet/model.safetensors", tmp_path / "vae/model.safetensors")
        assert "unet/model.safetensors" in shown.stdout
        assert "vae/model.safetensors" in shown.stdout

    def test_breaks_no_names_when_piped(self, tmp_path: Path) -> None:
        name = "a." + "very." * 50 + "long.name"
        save_file({name: np.zeros(1, np.float32)}, tmp_path / "long.safetensors")
        assert name in penstock("inspect", tmp_path / "long.safetensors", columns=None).stdout

    def test_as_json_is_the_whole_catalogue(self, sharded: Path) -> None:
        told = answer(penstock("inspect", sharded, "--json", "--limit", 1))
        files = [sharded / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        assert told["paths"] == [str(sharded)]
        assert told["objects"] == [{"location": str(file), "bytes": file.stat().st_size} for file in files]
        assert told["metadata"] is None
        assert told["total"] == {
            "tensors": 2, "parameters": 3000, "nbytes": 12000, "nbytes_by_dtype": {"F32": 12000}, "objects": 2,
        }  # fmt: skip
        second = told["tensors"][1]
        end = files[1].stat().st_size
        assert second == {
            "name": "model.layers.2.self_attn.q_proj.weight",
            "dtype": "F32",
            "shape": [2, 1000],
            "nbytes": 8000,
            "object": str(files[1]),
            "byte_range": [end - 8000, end],
        }

    def test_sorts_numbers_as_numbers(self, single: Path) -> None:
        names = [tensor["name"] for tensor in answer(penstock("inspect", single, "--json"))["tensors"]]
        assert names == ["embed", *[f"layer.{i}.weight" for i in range(12)], "step"]

    def test_sorts_by_place_in_the_file_and_by_size(self, single: Path) -> None:
        by_offset = answer(penstock("inspect", single, "--json", "--sort", "offset"))["tensors"]
        starts = [tensor["byte_range"][0] for tensor in by_offset]
        assert starts == sorted(starts)
        by_size = answer(penstock("inspect", single, "--json", "--sort", "size"))["tensors"]
        assert [tensor["nbytes"] for tensor in by_size] == [400] * 12 + [32, 2]

    def test_shows_only_names_that_match_a_pattern(self, single: Path) -> None:
        shown = penstock("inspect", single, "--filter", "layer.1*", "--filter", "step").stdout
        assert "4 of 14 tensors" in shown
        assert "layer.11.weight" in shown
        assert "embed" not in shown

    def test_says_that_nothing_matches(self, single: Path) -> None:
        shown = penstock("inspect", single, "--filter", "nothing.*")
        assert shown.returncode == 0
        assert "0 of 14 tensors" in shown.stdout

    @pytest.mark.parametrize(("limit", "rows", "more"), [(5, 5, "9 more"), (0, 14, None), (14, 14, None)])
    def test_shows_as_many_rows_as_asked_for(self, single: Path, limit: int, rows: int, more: str | None) -> None:
        shown = penstock("inspect", single, "--limit", limit).stdout
        assert sum(line.endswith(" B") and len(line.split()) == 5 for line in shown.splitlines()) == rows
        assert (more in shown) if more else ("more" not in shown)

    def test_shows_escape_sequences_instead_of_obeying_them(self, tmp_path: Path) -> None:
        tensors = {"red\x1b[31m\nline": np.zeros(1, np.float32), "[bold]markup": np.zeros(1, np.float32)}
        save_file(tensors, tmp_path / "odd.safetensors", metadata={"key": "\x1b]0;title\x07"})
        shown = penstock("inspect", tmp_path / "odd.safetensors").stdout
        assert r"red\x1b[31m\nline" in shown
        assert "[bold]markup" in shown
        assert "\x1b" not in shown
        assert "\x07" not in shown

    def test_writes_to_terminals_without_unicode(self, single: Path) -> None:
        shown = penstock("inspect", single, "--limit", 1, PYTHONIOENCODING="ascii")
        assert shown.returncode == 0, shown.stderr
        assert "13 more" in shown.stdout

    def test_cuts_long_metadata(self, tmp_path: Path) -> None:
        path = tmp_path / "m.safetensors"
        save_file({"w": np.zeros(1, np.float32)}, path, metadata={"notes": "x" * 10_000})
        assert "(10,000 characters)" in penstock("inspect", path).stdout
        assert answer(penstock("inspect", path, "--json"))["metadata"] == {"notes": "x" * 10_000}


class TestLoad:
    """``penstock load``"""

    def test_says_in_one_line_what_it_did(self, single: Path) -> None:
        done = load(single)
        assert done.returncode == 0, done.stderr
        (line,) = done.stdout.splitlines()
        assert line.startswith("14 tensors, 4.83 kB to cpu in ")
        assert " s: " in line
        assert "GB/s, limited by " in line
        assert done.stderr == "", "no progress bar where stderr is no terminal"

    def test_stats_are_a_table_of_all_figures(self, single: Path) -> None:
        import penstock as package

        checkpoint = package.open(single)
        checkpoint.load(framework="np")
        assert checkpoint.stats is not None
        shown = load(single, "--stats").stdout
        for figure in checkpoint.stats.as_dict().keys() - {"notes"}:
            assert figure.replace("_", " ") in shown

    def test_as_json_holds_the_stats(self, sharded: Path) -> None:
        told = answer(load(sharded, "--json"))
        assert (told["tensors"], told["bytes"], told["device"], told["framework"]) == (2, 12000, "cpu", "np")
        assert 0 < told["open_seconds"] < told["seconds"]
        assert told["gb_per_s"] == pytest.approx(12000 / told["seconds"] / 1e9, abs=1e-6)
        assert told["stats"]["bytes"] == 12000
        assert told["stats"]["limited_by"]

    def test_settings_reach_the_engine(self, single: Path) -> None:
        options = ["--readers", 2, "--block-bytes", "8KiB", "--cache", "bypass"]
        stats = answer(load(single, "--json", *options))["stats"]
        assert stats["block_bytes"] == 8192
        assert stats["readers"] <= 2
        assert stats["cached_bytes"] == 0

    def test_a_setting_may_come_from_the_environment(self, single: Path) -> None:
        assert answer(load(single, "--json", PENSTOCK_BLOCK_BYTES="16KiB"))["stats"]["block_bytes"] == 16384

    def test_maps_files_when_asked_to(self, single: Path) -> None:
        told = answer(load(single, "--json", "--mmap"))
        assert (told["mmap"], told["tensors"], told["stats"]) == (True, 14, None)
        assert "4.83 kB mapped in" in load(single, "--mmap").stdout

    def test_loads_only_what_is_chosen(self, single: Path) -> None:
        assert answer(load(single, "--json", "--filter", "layer.*"))["tensors"] == 12
        assert answer(load(single, "--json", "--names", "step", "--names", "embed"))["bytes"] == 34

    def test_uses_torch_where_it_is_installed(self, single: Path) -> None:
        pytest.importorskip("torch")
        assert answer(penstock("load", single, "--json"))["framework"] == "pt"

    def test_shows_a_bar_on_a_terminal(self, single: Path) -> None:
        assert "loading to cpu" in _stderr_of_a_terminal("load", single, "--framework", "np")

    @pytest.mark.parametrize("option", ["--quiet", "--json"])
    def test_shows_no_bar_where_none_is_wanted(self, single: Path, option: str) -> None:
        assert _stderr_of_a_terminal("load", single, "--framework", "np", option) == ""


def _stderr_of_a_terminal(*arguments: object) -> str:
    """What the command writes to stderr when that is a terminal."""
    ours, theirs = pty.openpty()
    try:
        command = [*COMMAND, *map(str, arguments)]
        environment = os.environ | {"TERM": "xterm"}
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment) as process:
            os.close(theirs)
            seen = b""
            try:
                while chunk := os.read(ours, 65536):
                    seen += chunk
            except OSError:  # Linux says "input/output error" when the other side is closed.
                pass
        assert process.returncode == 0, seen
    finally:
        os.close(ours)
    return seen.decode()


class TestFailures:
    """How the command ends when something is wrong."""

    def test_exit_codes_tell_failures_apart(self, single: Path, malformed: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        for arguments, code, words in [
            (["inspect", tmp_path / "none"], 3, "none"),
            (["inspect", tmp_path / "empty"], 3, "empty"),
            (["load", single, "--framework", "np", "--names", "nope"], 3, "nope"),
            (["inspect", malformed], 4, "header"),
            (["inspect", "/dev/null"], 5, "/dev/null"),
            (["load", single, "--framework", "np", "--device", "cuda:99"], 7, "cuda:99"),
            (["load", single, "--framework", "np", "--readers", 0], 8, "readers"),
            (["load", single, "--framework", "nope"], 8, "framework"),
            (["load", single, "--framework", "np", "--filter", "nope*"], 8, "nope*"),
            (["load", single, "--framework", "np", "--block-bytes", "4x"], 2, "4x"),
            (["load", single, "--cache", "perhaps"], 2, "perhaps"),
            (["inspect"], 2, "Missing argument"),
            (["nope"], 2, "nope"),
        ]:
            done = penstock(*arguments)
            assert done.returncode == code, (arguments, done)
            assert words in done.stderr, (arguments, done)
            assert "Traceback" not in done.stderr
            assert done.stdout == ""

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_a_file_that_may_not_be_read(self, single: Path) -> None:
        single.chmod(0)
        assert penstock("inspect", single).returncode == 5

    def test_an_error_is_one_block_that_says_what_to_try(self, tmp_path: Path) -> None:
        done = penstock("inspect", tmp_path / "none")
        error, remedy = done.stderr.splitlines()
        assert error.startswith(f"error: {tmp_path / 'none'}: ")
        assert remedy.startswith("  try: ")

    def test_an_error_is_json_where_json_was_asked_for(self, malformed: Path) -> None:
        done = penstock("inspect", malformed, "--json")
        assert done.returncode == 4
        error = json.loads(done.stdout)["error"]
        assert error.keys() == {"type", "message", "object", "tensor", "byte_range", "cause", "remedy"}
        assert error["type"] == "FormatError"
        assert error["object"] == str(malformed)
        assert error["byte_range"] == [0, 8]
        assert error["cause"] in error["message"]

    def test_debug_adds_the_traceback_and_keeps_the_code(self, malformed: Path) -> None:
        done = penstock("inspect", malformed, "--debug")
        assert done.returncode == 4
        assert "Traceback" in done.stderr
        assert "FormatError" in done.stderr

    @pytest.mark.parametrize("options", ["", "--json"])
    def test_a_reader_that_has_seen_enough_is_no_failure(self, tmp_path: Path, options: str) -> None:
        many = {f"tensor.{i}": np.zeros(1, np.float32) for i in range(3000)}
        save_file(many, tmp_path / "many.safetensors")
        command = f"'{sys.executable}' -m penstock.cli inspect many.safetensors --limit 0 {options} | head -n 1"
        bash = ["bash", "-o", "pipefail", "-c", command]
        done = subprocess.run(bash, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")

    def test_an_interrupt_ends_it_with_130(self) -> None:
        program = (
            "import os, signal, sys; from penstock.cli.failures import handled\n"
            "with handled(as_json=True, debug=False): os.kill(os.getpid(), signal.SIGINT); signal.pause()"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "error: interrupted\n")
        assert json.loads(done.stdout)["error"]["type"] == "KeyboardInterrupt"

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            ("ValueError('a surprise')", 1),
            ("MemoryError()", 7),
            ("penstock.ObjectChangedError('m')", 6),
            ("penstock.StorageError('m')", 6),
            ("penstock.OutOfMemoryError('m')", 7),
            ("penstock.MissingDependencyError('m')", 1),
        ],
    )
    def test_errors_that_are_hard_to_provoke_have_codes_too(self, error: str, code: int) -> None:
        import penstock as package
        from penstock.cli.failures import block, code_of

        raised = eval(error, {"penstock": package})  # noqa: S307
        assert code_of(raised) == code
        assert block(raised).startswith("error: ")


class TestCommand:
    """The command as a whole."""

    def test_version_is_the_packages(self) -> None:
        import penstock as package

        assert penstock("--version").stdout == f"penstock {package.__version__}\n"

    @pytest.mark.parametrize("command", [[], ["inspect"], ["load"]])
    def test_help_documents_the_exit_codes(self, command: list[str]) -> None:
        from typer.testing import CliRunner

        from penstock.cli.app import app

        shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80", "NO_COLOR": "1"})
        assert shown.exit_code == 0
        assert "Exit codes: 0 success" in shown.output
        assert "130 interrupted" in shown.output

    def test_runs_in_the_process_of_whoever_calls_the_app(self, single: Path) -> None:
        from typer.testing import CliRunner

        from penstock.cli.app import app

        assert "14 tensors" in CliRunner().invoke(app, ["inspect", str(single)]).output
        assert CliRunner().invoke(app, ["inspect", str(single.parent / "none")]).exit_code == 3

    @pytest.mark.parametrize("missing", ["typer", "rich"])
    def test_says_how_to_get_what_is_missing(self, missing: str) -> None:
        program = f"import sys; sys.modules[{missing!r}] = None; from penstock.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert repr(missing) in line
        assert "pip install 'penstock[cli]'" in line

    @pytest.mark.parametrize(
        ("imported", "absent"),
        [("penstock", {"typer", "rich", "penstock.cli"}), ("penstock.cli", {"typer", "torch", "numpy"}),
         ("penstock.cli.app", {"torch", "numpy"})],
    )  # fmt: skip
    def test_importing_brings_in_no_more_than_needed(self, imported: str, absent: set[str]) -> None:
        program = f"import sys, {imported}; print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
        assert absent.isdisjoint(done.stdout.split())

    @pytest.mark.parametrize(
        ("text", "size"), [("4096", 4096), ("4KiB", 4096), ("2M", 2 << 20), ("1 GiB", 1 << 30), ("4MB", 4_000_000)]
    )
    def test_sizes_are_written_as_in_the_environment(self, text: str, size: int) -> None:
        from penstock.cli.app import parse_size

        assert parse_size(text) == size

    @pytest.mark.parametrize(
        ("nbytes", "shown"),
        [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_999, "1.00 MB"), (4_976_698_672, "4.98 GB"),
         (16_060_556_376, "16.1 GB"), (524_288, "524 kB"), (1_500_000_000_000, "1.50 TB")],
    )  # fmt: skip
    def test_bytes_are_shown_in_three_digits(self, nbytes: int, shown: str) -> None:
        from penstock.cli.output import size

        assert size(nbytes) == shown
