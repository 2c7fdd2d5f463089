"""What any wheel must do, where it was just installed: ``python tools/try_wheel.py``.

Loads, streams, maps and slices a file, from several threads too, and compares with safetensors' own reader; refuses one
that was cut short; runs the command, on a file and on a repository of a hub of this process. Where Python has no GIL,
importing must leave it so. Needs numpy and safetensors, no GPU. Where torch is installed, README.md's snippets run too,
as they are pasted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import platform
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()
import penstock  # noqa: E402 - what it does to the GIL is looked at

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))  # last: the wheel is what is tried
from hub import hub  # noqa: E402


def main() -> None:
    assert not Path(penstock.__file__).is_relative_to(ROOT / "python"), "this is the clone's package, not the wheel's"
    assert command("--version") == f"penstock {penstock.__version__}\n"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        tensors = {f"t{i}": np.sin(np.arange(64 * (33 + i), dtype=np.float32) + i).reshape(64, -1) for i in range(50)}
        save_file(tensors | {"large": (np.arange(9_000_000) % 251).astype(np.uint8)}, path)
        loads(path)
        assert "51 tensors" in command("inspect", str(path), "--limit", "1")
        inspects_a_hub(path)
        with path.open("r+b") as file:
            file.truncate(1000)
        try:
            penstock.open(path)
        except penstock.FormatError as error:
            assert error.remedy, error
        else:
            raise AssertionError("a file that was cut short was opened")
        pasted = importlib.util.find_spec("torch") is not None
        if pasted:
            pastes_the_readme(Path(directory))
    assert getattr(sys, "_is_gil_enabled", lambda: True)() == HAS_GIL, "penstock turned the GIL on"
    gil = "" if HAS_GIL else ", without a GIL"
    libc = "glibc" if platform.libc_ver()[0] == "glibc" else "musl"
    readme = "README.md as pasted" if pasted else "no torch for README.md"
    where = f"Python {platform.python_version()}{gil}, {platform.machine()}, {libc}, {readme}"
    print(f"ok: penstock {penstock.__version__}, {where}")


def command(*arguments: str) -> str:
    """What the command prints. In this process: an emulated Python cannot start another."""
    from penstock.cli import main as run

    sys.argv = ["penstock", *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            run()
        except SystemExit as ended:
            assert not ended.code, ended.code
    return printed.getvalue()


def inspects_a_hub(path: Path) -> None:
    with hub() as served:
        served.push("org/name", {"model.safetensors": path.read_bytes(), "config.json": b"{}"})
        before = dict(os.environ)
        os.environ |= {"HF_ENDPOINT": served.endpoint, "HF_HOME": str(path.parent / "hf")}
        try:
            assert "51 tensors" in command("inspect", "hf://org/name", "--limit", "1")
        finally:
            os.environ.clear()
            os.environ.update(before)


def pastes_the_readme(directory: Path) -> None:
    """Its blocks in their order, without those that need what is not here, in a directory of their own."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    (here := directory / "pasted").mkdir()
    blocks = re.findall(r"(?<!-->\n)```(python|bash)\n(.*?)```", readme, re.DOTALL)
    assert {language for language, _ in blocks} == {"python", "bash"}
    for language, text in blocks:
        program = [sys.executable, "-c"] if language == "python" else ["bash", "-euo", "pipefail", "-c"]
        subprocess.run([*program, text], cwd=here, env=os.environ | {"PATH": names}, check=True, stdout=sys.stderr)


def loads(path: Path) -> None:
    wanted = load_file(path)

    def same(loaded: dict[str, Any]) -> None:
        assert loaded.keys() == wanted.keys()
        for name, array in wanted.items():
            assert loaded[name].dtype == array.dtype
            np.testing.assert_array_equal(loaded[name], array)

    ckpt = penstock.open(path)
    same(ckpt.load(framework="np"))
    same(dict(ckpt.stream(framework="np")))
    same(ckpt.load(framework="np", mmap=True))
    part = ckpt.load(["t3"], framework="np", slices={"t3": (slice(2, 9), slice(1, 4))})["t3"]
    np.testing.assert_array_equal(part, wanted["t3"][2:9, 1:4])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(same, pool.map(lambda _: ckpt.load(framework="np"), range(16))))


if __name__ == "__main__":
    main()
