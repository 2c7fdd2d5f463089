"""docs/architecture.md: functions of the walks call each other, and are few; the table names files that are there."""

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


def bodies(file: str, function: str) -> list[str]:
    """What the functions of that name are made of, comments aside: all that is indented further than they are."""
    text = re.sub(r"(?m)(^|\s)(//|#) .*$", "", located(file).read_text())
    found = []
    for match in re.finditer(rf"(?m)^( *)[\w() ]*\b(?:def|fn) {function}\b", text):
        rest = text[match.end() :]
        # It ends where a line is indented as the function is.
        begin = re.search(r"[{;]" if file.endswith(".rs") else r":\n", rest)
        if begin is not None:
            found.append(re.split(rf"\n(?! {{{len(match[1]) + 1}}}|\n)", rest[begin.end() - 1 :], maxsplit=1)[0])
    return found


WALKS = re.findall(r"\*\*(.+?)\*\*.*?\n\n(.+?)(?=\n\n\*\*|\Z)", section("Three walks"), re.DOTALL)
_FUNCTION = re.compile(r"(→\s+)?(?:`([\w./-]+\.(?:rs|py))`:\s+)?`(\w+)`")


@pytest.mark.parametrize(("name", "text"), WALKS, ids=[name for name, _ in WALKS])
def test_a_walk_is_short_and_each_of_its_functions_calls_the_next(name: str, text: str) -> None:
    arrows = end = 0
    before = file = ""
    calls: list[str] = []
    named = set()
    for match in _FUNCTION.finditer(text):
        file = match[2] or file
        function, found = f"{file}: {match[3]}", bodies(file, match[3])
        if not (match[1] or match[2] or found):
            continue  # a name of a class or of another library
        assert found, f"there is no {function}"
        if match[1]:
            assert text[end : match.start()].isspace(), f"what calls {match[3]}?"
            assert any(re.search(rf"\b{match[3]}\b", body) for body in calls), f"{before} does not call {function}"
            arrows += 1
        before, calls, end = function, found, match.end()
        named.add(function)
    assert text.count("→") == arrows
    assert 10 <= len(named) <= 37


def test_the_table_names_files_that_are_there() -> None:
    rows = re.findall(r"^\| (?!to change|---)(.+?) \| (.+?) \|$", section("Where things are"), re.MULTILINE)
    assert len(rows) >= 20
    for _, places in rows:
        first, *others = re.findall(r"`([^`]+)`", places)
        for path in re.sub(r"\{(\w+),(\w+)\}", r"\1", first), re.sub(r"\{(\w+),(\w+)\}", r"\2", first):
            assert (ROOT / path).exists(), path
        for other in others:
            assert (ROOT / other).exists() or (ROOT / first).parent.joinpath(other).exists(), other
