"""docs/architecture.md: the walks name functions that are there, and few of them; the table names files that are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text()
BASES = ["", "crates/penstock/src", "python/penstock", "python/penstock/integrations"]


def section(title: str) -> str:
    return TEXT.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def located(name: str) -> Path:
    found = [path for base in BASES if (path := ROOT / base / name).exists()]
    assert found, name
    return found[0]


WALKS = re.findall(r"\*\*(.+?)\*\*.*?\n\n(.+?)(?=\n\n\*\*|\Z)", section("Three walks"), re.DOTALL)


@pytest.mark.parametrize(("name", "text"), WALKS, ids=[name for name, _ in WALKS])
def test_a_walk_is_short_and_its_functions_are_there(name: str, text: str) -> None:
    named = 0
    for file, functions in re.findall(r"`([\w./-]+\.(?:rs|py))`:((?:\s+(?:→\s+)?`[\w.]+`(?:,| and)?)+)", text):
        source = located(file).read_text()
        for function in re.findall(r"`([\w.]+)`", functions):
            if function.endswith((".rs", ".py")):
                continue
            named += 1
            assert re.search(rf"\b(fn|def) {function}\b", source), f"{file}: {function}"
    assert 10 <= named <= 37


def test_the_table_names_files_that_are_there() -> None:
    rows = re.findall(r"^\| (?!to change|---)(.+?) \| (.+?) \|$", section("Where things are"), re.MULTILINE)
    assert len(rows) >= 20
    for _, places in rows:
        first, *others = re.findall(r"`([^`]+)`", places)
        for path in re.sub(r"\{(\w+),(\w+)\}", r"\1", first), re.sub(r"\{(\w+),(\w+)\}", r"\2", first):
            assert (ROOT / path).exists(), path
        for other in others:
            assert (ROOT / other).exists() or (ROOT / first).parent.joinpath(other).exists(), other
