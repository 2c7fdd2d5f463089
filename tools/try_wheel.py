"""What any wheel must do, where it was just installed: ``python tools/try_wheel.py``.

Loads, streams, maps and slices a file, from several threads too, and compares with safetensors' own reader; refuses one
that was cut short; runs the command. Needs numpy and safetensors; neither torch nor a GPU. Where Python has no GIL,
importing must leave it so.
"""

from __future__ import annotations

import contextlib
import io
import platform
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()
import penstock  # noqa: E402 - what it does to the GIL is looked at


def main() -> None:
    assert getattr(sys, "_is_gil_enabled", lambda: True)() == HAS_GIL, "importing penstock turned the GIL on"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        random = np.random.default_rng(0)
        tensors = {f"t{i}": random.standard_normal((64, 33 + i)).astype(np.float32) for i in range(50)}
        save_file(tensors | {"large": random.integers(0, 255, 9_000_000, dtype=np.uint8)}, path)
        loads(path)
        assert "51 tensors" in command("inspect", str(path), "--limit", "1")
        with path.open("r+b") as file:
            file.truncate(1000)
        try:
            penstock.open(path)
        except penstock.FormatError as error:
            assert error.remedy, error
        else:
            raise AssertionError("a file that was cut short was opened")
    gil = "" if HAS_GIL else ", without a GIL"
    print(f"ok: penstock {penstock.__version__}, Python {platform.python_version()}{gil}, {platform.machine()}")


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
