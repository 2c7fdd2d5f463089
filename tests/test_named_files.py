"""Pages and module comments name files and modules that are there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
PAGES = [name for name in FILES if name.endswith(".md") and not name.startswith(("CHANGELOG", "benchmarks/"))]
_PATH = re.compile(r"`((?:crates|python|tests|tools|benchmarks|examples|docs|compat|fuzz)/[\w./-]+)")
_LISTED = re.compile(r"(?:^//! \* |[.] )`([a-z_0-9]+)`:", re.MULTILINE)
_DECLARED = re.compile(r"^(#\[cfg\(test\)\]\n)?(?:pub(?:\(.*?\))? )?mod (\w+);", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_files_that_are_there(page: str) -> None:
    named = {path.rstrip("/.") for path in _PATH.findall((ROOT / page).read_text())}
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


@pytest.mark.parametrize("module", [name for name in FILES if re.fullmatch(r"crates/.*/src/.*(mod|lib)\.rs", name)])
def test_a_module_names_the_modules_that_it_is_made_of_and_no_others(module: str) -> None:
    text = (ROOT / module).read_text()
    comment = "\n".join(line for line in text.splitlines() if line.startswith("//!"))
    declared = {name for _, name in _DECLARED.findall(text)}
    if not declared or "/tests/" in module:
        pytest.skip("made of one file, or of tests")
    shipped = {name for of_tests, name in _DECLARED.findall(text) if not of_tests}
    assert shipped <= set(re.findall(r"`(\w+)`", comment)), "modules that the header does not name"
    assert set(_LISTED.findall(comment)) <= declared, "modules that are not there"
