"""README.md and docs/install.md run as they are pasted, in an empty directory, without a GPU or a bucket.

Blocks that need what is not here say so in a comment above them: Python is then compiled only, a command not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- needs [^\n]*-->\n)?```(python|bash)\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/install.md", "docs/quickstart.md"])
def test_the_page_runs_as_it_is_pasted(page: str, tmp_path: Path) -> None:
    # The command and the interpreter of this environment, by the names that people have them under.
    names = tmp_path / "bin"
    names.mkdir()
    (names / "penstock").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
    (names / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for name in names.iterdir():
        name.chmod(0o755)
    environment = os.environ | {"PATH": f"{names}:{os.environ['PATH']}"}
    ran = 0
    for needs, language, text in BLOCK.findall((ROOT / page).read_text()):
        if language == "python":
            compile(text, page, "exec")
        if not needs:
            command = [sys.executable, "-c", text] if language == "python" else ["bash", "-euo", "pipefail", "-c", text]
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=100
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            assert done.stdout.strip(), text
            ran += 1
    assert ran >= 1


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in {_anchor(title) for title in re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)}, (
                anchor
            )


def _anchor(title: str) -> str:
    """What a heading is called in links: as GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower())
    return kept.replace(" ", "-")
