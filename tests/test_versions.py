"""The manual's table of versions is what the tests run with."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import versions


def test_the_table_names_the_engines_that_the_tests_install() -> None:
    written = versions.written(versions.PAGE)
    rows = [row for row in versions.table().splitlines() if row.startswith(("| vLLM", "| SGLang"))]
    assert len(rows) == 2
    assert [row for row in rows if row not in written] == []
    # The libraries' versions are those of the machine that ran everything last.
    assert {row.split("|")[1].strip() for row in written.splitlines()} >= set(versions.LIBRARIES)


def test_each_page_of_an_integration_says_its_row_of_the_table() -> None:
    table = versions.written(versions.PAGE)
    pages = {library: versions.page(library) for library in versions.rows()}
    assert [library for library, page in pages.items() if page is None] == ["accelerate", "torch"]
    for library, page in pages.items():
        if page is not None:
            row = versions.written(page).splitlines()[-1]
            assert f"| {library} {row}" in table


def test_the_pages_of_engines_begin_with_the_versions_that_work() -> None:
    known = versions.engines()
    newest = {"vLLM": known["vllm-newest"][0].rpartition(".")[0], "SGLang": known["sglang"][0]}
    for engine, last in newest.items():
        path = versions.page(engine)
        assert path is not None
        text = " ".join(path.read_text().partition("```")[0].split())
        assert f"It works with {engine} {versions.ENGINES[engine][0]} to {last} " in text


def test_plugins_warn_of_engines_that_are_newer_than_the_tests() -> None:
    known = versions.engines()
    for engine, name in (("vllm", "vllm-newest"), ("sglang", "sglang")):
        source = (ROOT / "python" / "penstock" / "integrations" / engine / "__init__.py").read_text()
        newest = re.search(r"newest_tried=\(([\d, ]+)\)", source)
        assert newest is not None
        tried = newest[1].replace(" ", "").replace(",", ".")
        assert f"{known[name][0]}.".startswith(f"{tried}."), (engine, tried)


def test_the_version_is_said_in_one_place() -> None:
    import penstock

    (version,) = re.findall(r'^version = "(.+)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    assert penstock.__version__ == version
    for manifest in (ROOT / "crates").glob("*/Cargo.toml"):
        assert "version.workspace = true" in manifest.read_text(), manifest


def test_the_newest_changes_are_of_this_version_and_can_be_read_in_a_minute() -> None:
    import penstock

    newest, *_ = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert newest.startswith(penstock.__version__)
    assert len(re.findall(r"^- ", newest, re.MULTILINE)) <= 20
