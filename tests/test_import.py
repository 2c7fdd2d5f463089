"""Importing Penstock costs nothing and does nothing."""

import json
import subprocess
import sys

PROBE = """
import json, os, sys, threading, time
environment = dict(os.environ)
began = time.perf_counter()
import penstock
seconds = time.perf_counter() - began
heavy = [m for m in ("torch", "numpy", "typer", "rich", "tqdm", "safetensors") if m in sys.modules]
tasks = len(os.listdir("/proc/self/task"))
print(json.dumps([seconds, heavy, tasks, dict(os.environ) == environment]))
"""


def probe() -> tuple[float, list[str], int, bool]:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    seconds, heavy, tasks, same_environment = json.loads(done.stdout)
    return seconds, heavy, tasks, same_environment


def test_import_takes_under_60_ms() -> None:
    # The best of several: a busy machine makes any single one slow.
    assert min(probe()[0] for _ in range(5)) < 0.060


def test_import_brings_no_framework_and_no_cli_and_starts_no_thread() -> None:
    _, heavy, tasks, same_environment = probe()
    assert (heavy, tasks, same_environment) == ([], 1, True)


def test_everything_that_is_promised_can_be_reached() -> None:
    import penstock

    assert all(getattr(penstock, name) is not None for name in penstock.__all__)
    assert set(penstock.__all__) <= set(dir(penstock))
