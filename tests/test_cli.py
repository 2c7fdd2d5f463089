"""The ``penstock`` command, run as people and scripts run it."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import servers

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

    @pytest.mark.parametrize("columns", [40, 60, 80, 120])
    def test_fits_terminals_of_every_width(self, sharded: Path, columns: int) -> None:
        lines = penstock("inspect", sharded, columns=columns).stdout.splitlines()
        table = lines[: lines.index("")]
        assert all(len(line) <= columns for line in table)
        rows = [line for line in table if "1000" in line]
        assert len(rows) == 2, "a row for each tensor, however narrow"
        assert all("self_attn" in row or "…" in row for row in rows)
        assert all(" kB" in row for row in rows), "sizes are not cut off"

    def test_models_that_have_nothing_in_common_are_noted(self, tmp_path: Path) -> None:
        for part in ("unet", "vae"):
            save_file({f"{part}.w": np.zeros(1, np.float32)}, tmp_path / f"{part}.safetensors")
        assert "note: 2 files without an index" in penstock("inspect", tmp_path).stdout
        save_file({"unet.v": np.zeros(1, np.float32)}, tmp_path / "more.safetensors")
        assert "note:" not in penstock("inspect", tmp_path).stdout

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
        assert told["files"] == [{"location": str(file), "bytes": file.stat().st_size} for file in files]
        assert told["metadata"] is None
        assert told["total"] == {
            "tensors": 2, "parameters": 3000, "nbytes": 12000, "nbytes_by_dtype": {"F32": 12000}, "files": 2,
        }  # fmt: skip
        second = told["tensors"][1]
        end = files[1].stat().st_size
        assert second == {
            "name": "model.layers.2.self_attn.q_proj.weight",
            "dtype": "F32",
            "shape": [2, 1000],
            "nbytes": 8000,
            "location": str(files[1]),
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
        assert (shown.returncode, shown.stdout) == (8, "")
        assert "no tensor matches 'nothing.*' (there are 14)" in shown.stderr

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
        assert re.search(r"in \d+\.\d{3} s \(\d+\.\d{3} s of it to open\): [\d.]+ [kMG]?B/s, limited by ", line)
        assert done.stderr == "", "no progress bar where stderr is no terminal"

    def test_all_stats_are_a_table_of_all_figures(self, single: Path) -> None:
        import penstock as package
        from penstock.cli.load import FIGURES

        checkpoint = package.open(single)
        checkpoint.load(framework="np")
        assert checkpoint.stats is not None
        assert checkpoint.stats.as_dict().keys() - {"notes", "advice"} == FIGURES.keys()
        shown = [line.strip() for line in load(single, "--all-stats").stdout.splitlines()]
        for figure in FIGURES.values():
            assert any(line.startswith(f"{figure.label} ") for line in shown), figure

    def test_stats_leave_out_what_is_zero_and_end_in_what_limits(self, single: Path) -> None:
        shown = load(single, "--stats", "--cache", "use").stdout
        assert "load time" in shown
        assert "throttled" not in shown
        assert "from network" not in shown
        assert re.search(r"^[\w ,]+ (is|are) what limits: ", shown, re.MULTILINE), shown

    def test_figures_that_are_not_known_are_shown_all_the_same(self) -> None:
        from penstock.cli.load import table
        from penstock.cli.output import Output

        out = Output()
        with out.capture() as captured:
            out.print(table({"bytes": 3, "new_figure": 7}, every=False))
        assert "new figure" in captured.get()

    def test_names_and_filters_are_both_meant(self, single: Path) -> None:
        assert answer(load(single, "--json", "--names", "step", "--names", "embed", "--filter", "s*"))["tensors"] == 1
        refused = load(single, "--names", "step", "--filter", "layer.*")
        assert refused.returncode == 8
        assert "no tensor matches 'layer.*' (of the 1 that --names chose)" in refused.stderr

    def test_a_disk_cache_for_local_files_is_ignored_with_a_note(self, single: Path, tmp_path: Path) -> None:
        done = load(single, "--cache-dir", tmp_path / "cache")
        assert done.returncode == 0
        assert done.stderr.startswith("note: --cache-dir is ignored")
        assert not (tmp_path / "cache").exists()

    def test_as_json_holds_the_stats(self, sharded: Path) -> None:
        told = answer(load(sharded, "--json"))
        assert (told["tensors"], told["bytes"], told["device"], told["framework"]) == (2, 12000, "cpu", "np")
        assert 0 < told["open_seconds"] < told["total_seconds"]
        assert told["total_gb_per_s"] == pytest.approx(12000 / told["total_seconds"] / 1e9, abs=1e-6)
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

    def test_logs_on_stderr_when_asked_to(self, single: Path) -> None:
        assert penstock("load", single, "--framework", "np").stderr == ""
        told = penstock("load", "-v", single, "--framework", "np").stderr
        assert "penstock.checkpoint: opened" in told
        assert "penstock.checkpoint: loaded from" in told
        assert "penstock.checkpoint: opened" in penstock("inspect", "-v", single).stderr

    def test_shows_a_bar_on_a_terminal(self, single: Path) -> None:
        assert "loading to cpu" in _stderr_of_a_terminal("load", single, "--framework", "np")

    @pytest.mark.parametrize("option", ["--quiet", "--json"])
    def test_shows_no_bar_where_none_is_wanted(self, single: Path, option: str) -> None:
        assert _stderr_of_a_terminal("load", single, "--framework", "np", option) == ""


def test_a_gpu_without_torch_says_what_to_install(single: Path) -> None:
    code = (
        "import importlib.util as u, sys\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
        "sys.modules['torch'] = None\n"
        "sys.argv = ['penstock', *sys.argv[1:]]\n"
        "from penstock.cli import main; main()"
    )
    for more, asked in (
        ([], "device='cuda'"),
        (["--framework", "np"], "device='cuda'"),
        (["--framework", "pt"], "'pt'"),
    ):
        command = [sys.executable, "-c", code, "load", "--device", "cuda", *more, str(single)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert f"{asked} needs the package 'torch', which is not installed" in done.stderr
        assert "try: pip install torch" in done.stderr
        assert "dlpack'" not in done.stderr or "pt" in more


@pytest.mark.parametrize("url", ["s3://bucket/model/", "org/name", "./model"])
def test_a_pull_without_a_directory_says_that_it_is_missing(url: str) -> None:
    done = penstock("pull", url)
    assert done.returncode == 2
    assert "Missing argument 'DIRECTORY'" in done.stderr


def test_a_pull_of_a_name_on_the_hub_says_how_to_write_it(tmp_path: Path) -> None:
    done = penstock("pull", "org/name", tmp_path, columns=200)
    assert done.returncode == 2
    assert "Invalid value for 'URL'" in done.stderr
    assert "write hf://org/name" in done.stderr
    assert "hf://." not in penstock("pull", "./name", tmp_path, columns=200).stderr


def test_a_pull_counts_files_on_a_terminal(sharded: Path, tmp_path: Path) -> None:
    with servers.web(tmp_path) as remote:
        for file in sharded.iterdir():
            remote.put(f"model/{file.name}", file.read_bytes())
        files = len(list(sharded.iterdir()))
        seen = _stderr_of_a_terminal("pull", f"{remote.root}/model/", tmp_path / "here", NO_COLOR="1", COLUMNS="120")
    assert f"pulling {files}/{files} files" in seen
    assert "/0 bytes" not in seen, "a plain server tells sizes only when it is asked for the objects"


def _stderr_of_a_terminal(*arguments: object, code: int = 0, **settings: str) -> str:
    """What the command writes to stderr when that is a terminal."""
    ours, theirs = pty.openpty()
    try:
        command = [*COMMAND, *map(str, arguments)]
        environment = {key: value for key, value in os.environ.items() if key not in {"NO_COLOR", "FORCE_COLOR"}}
        environment |= {"TERM": "xterm"} | settings
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment) as process:
            os.close(theirs)
            seen = b""
            try:
                while chunk := os.read(ours, 65536):
                    seen += chunk
            except OSError:  # Linux says "input/output error" when the other side is closed.
                pass
        assert process.returncode == code, seen
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
            (["load", single, "--framework", "np", "--names", "nope"], 8, "nope"),
            (["load", single, "--device", "gpu"], 2, "Give cpu or cuda:N"),
            (["inspect", single, "--sort", "nope"], 2, "'nope' is not one of name, offset, size"),
            (["inspect", single, "--filter", "nope*"], 8, "nope*"),
            (["pull", tmp_path, tmp_path / "to"], 2, "not a URL"),
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
            # The box of a wrong command line is folded to the terminal.
            assert words in " ".join(done.stderr.replace("│", " ").split()), (arguments, done)
            assert "Traceback" not in done.stderr
            assert "Value error" not in done.stderr
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
        named = {"type", "code", "message", "location", "tensor", "byte_range", "cause", "remedy", "details"}
        assert error.keys() == named
        assert error["type"] == "FormatError"
        assert error["location"] == str(malformed)
        assert error["byte_range"] == [0, 8]
        assert error["cause"] in error["message"]

    def test_debug_adds_the_traceback_and_keeps_the_code(self, malformed: Path) -> None:
        done = penstock("inspect", malformed, "--debug")
        assert done.returncode == 4
        assert "Traceback" in done.stderr
        assert "FormatError" in done.stderr

    @pytest.mark.parametrize(
        "arguments", [["load", "--json"], ["load", "x", "--json", "--cache", "no"], ["nope", "--json"]]
    )
    def test_wrong_usage_is_json_where_json_was_asked_for(self, arguments: list[str]) -> None:
        done = penstock(*arguments)
        assert done.returncode == 2
        error = json.loads(done.stdout)["error"]
        assert error["type"] == "UsageError"
        assert error["message"]
        assert done.stderr.startswith("error: ")

    @pytest.mark.parametrize("json_option", [[], ["--json"]])
    def test_a_full_disk_under_stdout_is_named(self, single: Path, json_option: list[str]) -> None:
        command = [*COMMAND, "inspect", str(single), *json_option]
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
        assert done.returncode == 6
        error, remedy = done.stderr.splitlines()
        assert error == "error: the output could not be written: No space left on device"
        assert remedy.startswith("  try: ")

    @pytest.mark.parametrize(
        ("settings", "colored"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
    )
    def test_errors_have_colors_on_a_terminal_that_shows_them(
        self, tmp_path: Path, settings: dict[str, str], colored: bool
    ) -> None:
        seen = _stderr_of_a_terminal("inspect", tmp_path / "none", code=3, **settings)
        assert ("\x1b[1;31merror:\x1b[0m" in seen) == colored
        assert ("\x1b[36mtry:\x1b[0m" in seen) == colored
        assert "error:" in seen

    @pytest.mark.parametrize("json_option", ["False", "True"])
    def test_an_interrupt_that_a_library_would_swallow_ends_it(self, json_option: str) -> None:
        program = (
            "import os, signal; from penstock.cli.failures import interrupt_ends_process\n"
            f"with interrupt_ends_process(as_json={json_option}):\n"
            "    try: os.kill(os.getpid(), signal.SIGINT); [None for _ in range(1000)]\n"
            "    except KeyboardInterrupt: pass\n"
            "    print('went on')"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
        assert "went on" not in done.stdout
        assert json_option != "True" or json.loads(done.stdout)["error"]["type"] == "KeyboardInterrupt"

    def test_interrupts_are_python_s_again_afterwards(self) -> None:
        from penstock.cli.failures import interrupt_ends_process

        before = signal.getsignal(signal.SIGINT)
        with interrupt_ends_process(as_json=False):
            assert signal.getsignal(signal.SIGINT) is not before or before is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is before

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
            ("penstock.LocationChangedError('m')", 6),
            ("penstock.StorageError('m')", 6),
            ("penstock.InsufficientMemoryError('m')", 7),
            ("penstock.MissingDependencyError('m')", 1),
        ],
    )
    def test_errors_that_are_hard_to_provoke_have_codes_too(self, error: str, code: int) -> None:
        import penstock as package
        from penstock.cli.failures import block, code_of

        raised = eval(error, {"penstock": package})  # noqa: S307
        assert code_of(raised) == code
        assert block(raised).startswith("error: ")

    @pytest.mark.parametrize(
        ("message", "happened", "to_try"),
        [
            ("no x. Install it (pip install x), or wait", "no x", "Install it (pip install x), or wait"),
            ("no x. Install it: pip install x", "no x", "Install it: pip install x"),
            ("there is no x (pip install x)", "there is no x", "pip install x"),
            ("s3://b/x: no x. pip install x", "s3://b/x: no x", "pip install x"),
            ("there is no x", "there is no x", "pip install x"),
        ],
    )
    def test_what_to_try_is_never_half_a_sentence(self, message: str, happened: str, to_try: str) -> None:
        import penstock as package
        from penstock.cli.failures import block

        error = package.MissingDependencyError(message, remedy="pip install x")
        assert block(error) == f"error: {happened}\n  try: {to_try}\n"


class TestCommand:
    """The command as a whole."""

    def test_version_is_the_packages(self) -> None:
        import penstock as package

        assert penstock("--version").stdout == f"penstock {package.__version__}\n"

    @pytest.mark.parametrize(
        "command",
        ["", "inspect", "load", "pull", "doctor", "cache", "cache ls", "cache verify", "cache rm", "cache prune"],
    )
    def test_every_help_has_examples_and_the_exit_codes(self, command: str) -> None:
        from typer.testing import CliRunner

        from penstock.cli.app import app

        shown = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "80", "NO_COLOR": "1"})
        assert shown.exit_code == 0
        folded = " ".join(shown.output.split())
        assert f"Examples: penstock {command}" in folded
        assert "Exit codes: 0 success" in folded
        assert "130 interrupted" in folded
        assert not re.search(r"<(bool|str|int|list)|x>=|\\]\.\.\.\]", folded), "types are noise"

    @pytest.mark.parametrize("command", ["inspect", "load", "pull"])
    def test_help_shows_urls_and_examples(self, command: str) -> None:
        from typer.testing import CliRunner

        from penstock.cli.app import app

        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "100", "NO_COLOR": "1"}).output
        lines = [line.strip() for line in shown.splitlines()]
        assert "Examples:" in lines
        assert any(line.startswith(f"penstock {command} ") and "s3://" in line for line in lines)
        assert "hf://org/name[@revision]" in shown, "brackets are no markup"

    def test_python_runs_the_package(self) -> None:
        command = [sys.executable, "-m", "penstock", "--version"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.startswith("penstock ")

    def test_the_version_needs_no_other_package(self) -> None:
        program = "import sys; sys.modules['typer'] = sys.modules['rich'] = None; from penstock.cli import main; main()"
        command = [sys.executable, "-c", program, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.startswith("penstock ")

    def test_what_the_command_needs_comes_with_the_package(self) -> None:
        text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
        (needed,) = re.findall(r"^dependencies = \[(.*)\]$", text, re.MULTILINE)
        assert [re.split(r"\W", name)[0] for name in re.findall(r'"([^"]+)"', needed)] == ["typer", "rich"]

    def test_shells_complete_commands_and_paths(self, single: Path) -> None:
        shell = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
        words = f"penstock inspect {single.parent}/mod"
        done = penstock(COMP_WORDS=words, **shell)
        assert done.stdout.split() == [str(single)]
        source = penstock(_PENSTOCK_COMPLETE="source_bash")
        assert "penstock" in source.stdout
        assert source.returncode == 0

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
        assert line.endswith("pip install typer rich")

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
        ("text", "size"),
        [("4096", 4096), ("4KiB", 4096), ("2M", 2 << 20), ("1 GiB", 1 << 30), ("4MB", 4_000_000), ("5TB", 5 * 10**12),
         ("500gb", 500 * 10**9), ("1 tib", 1 << 40), ("7b", 7), ("", None), ("-1", None), ("1.5G", None), ("4i", None),
         ("4PB", None), ("GB", None), ("\u0664", None)],
    )  # fmt: skip
    def test_sizes_are_written_with_units_of_any_case(self, text: str, size: int | None) -> None:
        from penstock.units import size_meant

        assert size_meant(text) == size

    @pytest.mark.parametrize(
        ("nbytes", "shown"),
        [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_999, "1.00 MB"), (4_976_698_672, "4.98 GB"),
         (16_060_556_376, "16.1 GB"), (524_288, "524 kB"), (1_500_000_000_000, "1.50 TB")],
    )  # fmt: skip
    def test_bytes_are_shown_in_three_digits(self, nbytes: int, shown: str) -> None:
        from penstock.units import size

        assert size(nbytes) == shown
