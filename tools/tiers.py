"""Which tiers of tests a change can touch: ``python tools/tiers.py [COMMIT]`` prints their names, one to a line.

The tiers are `make test-NAME`: `stores`, `libraries`, `engines`. `make test` is no tier: it always runs. The change is
what lies between COMMIT and the working tree; by default COMMIT is what `make test-all` wrote to `tests/tested-commit`
when everything passed last. A commit that is not known means all tiers; so does a file that no rule knows.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTED = ROOT / "tests" / "tested-commit"
ALL = ("stores", "libraries", "engines")

_NONE: tuple[str, ...] = ()
RULES: list[tuple[str, tuple[str, ...]]] = [
    # The first pattern that matches the beginning of a path decides.
    (r"tests/tested-commit$", _NONE),
    (r"tests/logs/", _NONE),
    (r"tests/engines/", ("engines",)),
    (r"docs/engines/|examples/", ("libraries",)),  # whose code is run by tests
    (r"docs/(s3|gcs|azure|huggingface|pull|saving)\.md", ("stores",)),
    (r"docs/|benchmarks/|fuzz/|[A-Z]+(\.md)?$|\.git|mkdocs\.yml|deny\.toml|tools/(notices|wheels|site)", _NONE),
    (r"python/penstock/integrations/(vllm|sglang)/", ("engines",)),
    (r"python/penstock/integrations/(transformers|diffusers|peft|safetensors)/", ("libraries",)),
    (r"python/penstock/(pool|fp8)/", ("libraries",)),
    (r"python/penstock/trust/", ("stores", "libraries")),
    (r"python/penstock/(recording|distributed)/", ("engines",)),
    (r"python/penstock/start/cache/", ("stores", "engines")),
    (r"python/penstock/(bench|cli|doctor|start)/", _NONE),
    (r"python/penstock/saving/", ("stores",)),
    (r"python/penstock/(pulling|storage_options|google_tokens)\.py", ("stores",)),
    (r"compat/", ("engines", "stores")),
    (r"crates/penstock-checks/", ("stores",)),
    (r"crates/penstock/src/(store/remote|store/disk_cache|pull|save)/", ("stores",)),
    (r"crates/penstock/tests/(remote|servers)/|tools/servers", ("stores",)),
    (r"tools/engines", ("engines",)),
]


def tiers_of(paths: Iterable[str]) -> list[str]:
    """The tiers that a change of these files can touch, in the order of ``ALL``."""
    touched: set[str] = set()
    for path in paths:
        touched.update(_of_file(path))
    return [tier for tier in ALL if tier in touched]


def _of_file(path: str) -> Iterable[str]:
    if re.fullmatch(r"tests/test_\w+\.py", path):
        return _marks(ROOT / path)
    return next((tiers for pattern, tiers in RULES if re.match(pattern, path)), ALL)


def _marks(path: Path) -> Iterable[str]:
    """The tiers that a module of tests names; one that is gone touches none."""
    text = path.read_text() if path.exists() else ""
    return [tier for tier in ALL if f"pytest.mark.{tier}" in text]


def changed(commit: str) -> list[str] | None:
    """Files that differ from a commit, or None where it is not known."""
    asked = ["git", "-C", str(ROOT), "diff", "--name-only", "--no-renames", commit, "--"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else None


def main() -> None:
    """Prints the tiers of the change since the commit that is named, or was tested whole last."""
    named = sys.argv[1] if len(sys.argv) > 1 else TESTED.read_text().strip() if TESTED.exists() else ""
    files = changed(named) if named else None
    sys.stdout.writelines(f"{tier}\n" for tier in (ALL if files is None else tiers_of(files)))


if __name__ == "__main__":
    main()
