"""What CI runs for a change: `tools/tiers.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import tiers


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["docs/index.md", "CHANGELOG.md"], []),
        (["python/penstock/integrations/vllm/loader.py"], ["engines"]),
        (["python/penstock/start/cache/key.py"], ["stores", "engines"]),
        (["python/penstock/start/run.py"], []),
        (["python/penstock/integrations/diffusers/pipelines.py"], ["libraries"]),
        (
            ["crates/penstock/src/store/remote/provider/s3.rs", "python/penstock/recording/lazy.py"],
            ["stores", "engines"],
        ),
        (["crates/penstock/src/pipeline/reader.rs"], list(tiers.ALL)),
        (["a/new/place.txt"], list(tiers.ALL)),
        (["tests/test_engine_peft.py"], ["libraries"]),
        ([], []),
    ],
)
def test_a_change_runs_the_tiers_that_it_can_touch(files: list[str], wanted: list[str]) -> None:
    assert tiers.tiers_of(files) == wanted


def test_a_commit_that_is_not_known_means_all() -> None:
    script = str(ROOT / "tools" / "tiers.py")
    done = subprocess.run([sys.executable, script, "0" * 40], capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(tiers.ALL)


def test_every_rule_names_something_that_is_there() -> None:
    """A pattern that matches no file any more is a rule that a move has silently turned off."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no checkout of git")
    files = listed.stdout.splitlines()
    missing = [pattern for pattern, _ in tiers.RULES if not any(tiers.re.match(pattern, path) for path in files)]
    assert set(missing) <= {r"tests/tested-commit$"}
