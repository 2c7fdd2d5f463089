"""What the manual's site has besides the pages: links out of ``docs/``, commands, the repository's address."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("typer")

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("penstock_site", ROOT / "tools" / "site.py")
assert _spec is not None
assert _spec.loader is not None
site = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(site)

ADDRESS = "https://github.com/someone/penstock"


@pytest.mark.parametrize(
    ("path", "text", "without", "at_address"),
    [
        ("docs/index.md", "[a](s3.md#x)", "[a](s3.md#x)", None),
        ("docs/index.md", "[a](../SECURITY.md)", "[a](security.md)", None),
        ("docs/engines/vllm.md", "[a](../../SECURITY.md)", "[a](../security.md)", None),
        ("docs/engines/vllm.md", "[a](../s3.md)", "[a](../s3.md)", None),
        ("SUPPORT.md", "[a](docs/engines/index.md#versions)", "[a](engines/index.md#versions)", None),
        ("docs/index.md", "![a](charts/disk.svg)", "![a](charts/disk.svg)", None),
        ("docs/index.md", "[a](https://b.c/d)", "[a](https://b.c/d)", None),
        ("docs/index.md", "[a](#b)", "[a](#b)", None),
        ("docs/index.md", "[a](../LICENSE)", "a", f"[a]({ADDRESS}/blob/main/LICENSE)"),
        ("docs/engines/vllm.md", "[a](../../benchmarks/NOTEBOOK.md#b)", "a", None),
        ("docs/install.md", "--repo OWNER/REPOSITORY", "--repo OWNER/REPOSITORY", "--repo someone/penstock"),
        ("docs/install.md", "on the release page", "on the release page", f"on [the release page]({ADDRESS}/releases)"),
    ],
)
def test_links_lead_to_pages_or_to_the_repository(path: str, text: str, without: str, at_address: str | None) -> None:
    assert site.linked(text, path, "") == without
    if at_address is not None:
        assert site.linked(text, path, ADDRESS) == at_address


def test_the_address_is_filled_in_in_one_place() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    placeholder = '# [project.urls]\n# Repository = "https://github.com/OWNER/REPOSITORY"\n'
    if placeholder not in text:
        assert site.repository().startswith("https://")
        return
    assert site.repository() == ""
    filled = text.replace(placeholder, f'[project.urls]\nRepository = "{ADDRESS}/"\n')
    assert site.repository(filled) == ADDRESS
    found = subprocess.run(["git", "-C", str(ROOT), "grep", "-l", "OWNER/"], capture_output=True, text=True, check=True)
    # The site replaces that of the page.
    assert set(found.stdout.split()) <= {"pyproject.toml", "docs/install.md", "tools/site.py", "tests/test_site.py"}


def test_the_page_of_the_command_line_names_every_command_and_exit_code() -> None:
    from penstock.cli.failures import CODES, CODES_HELP

    page = (ROOT / "docs" / "cli.md").read_text()
    named = re.findall(r"^\| `penstock ([\w -]+)` \|", page, re.MULTILINE)
    assert sorted(named) == sorted(name for name in site.names() if name)
    codes = set(re.findall(r"^\| (\d+) \|", page, re.MULTILINE))
    assert codes == set(re.findall(r"\d+", CODES_HELP)) >= {str(code) for _, code in CODES}


def test_the_page_of_variables_names_every_one_of_penstocks() -> None:
    command = ["git", "-C", str(ROOT), "grep", "-hoE", r"\bPENSTOCK_[A-Z_]+\b", "--", "python", "crates/*/src/*"]
    read = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    named = re.findall(r"`(PENSTOCK_[A-Z_]+)`", (ROOT / "docs" / "environment.md").read_text())
    assert {name for name in read if "_TEST_" not in name} == set(named)


def test_what_variables_mean_to_stores_is_on_that_page_too() -> None:
    page = set(re.findall(r"`([A-Z]+_[A-Z0-9_]+)`", (ROOT / "docs" / "environment.md").read_text()))
    source = "".join(path.read_text() for path in (ROOT / "crates/penstock/src/store").rglob("*.rs"))
    other = {name for name in page if f'"{name}"' not in source and not name.startswith("PENSTOCK_")}
    assert other <= {"NO_COLOR", "FORCE_COLOR"}, "variables that nothing reads"


def test_the_page_of_slow_loads_has_a_row_for_everything_that_can_limit_one() -> None:
    source = (ROOT / "crates/penstock/src/stats.rs").read_text()
    causes = source.partition("pub fn limited_by")[2].partition("\n    }\n")[0]
    page = (ROOT / "docs" / "slow.md").read_text()
    rows = page.partition("| limited by |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([\w ]+)` \|", rows, re.MULTILINE)) == set(re.findall(r'"([a-z ]+)"', causes))
