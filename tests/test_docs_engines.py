"""What the manual says of engines runs as it is written: every block of Python, in order, in an empty directory.

Blocks that need what is not here (a bucket, a large model) say so in a comment above them, and are only compiled.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

for library in ("torch", "transformers", "diffusers", "peft", "accelerate"):
    pytest.importorskip(library)
from tiny_models import QUIET

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings(*QUIET)]
DOCS = Path(__file__).parent.parent / "docs"
PAGES = ["index.md", "transformers.md", "diffusers.md", "peft.md", "safetensors.md"]
BLOCK = re.compile(r"(<!-- needs [^\n]*-->\n)?```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs_as_written(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((DOCS / "engines" / page).read_text())
    namespace: dict[str, object] = {"__name__": page}
    ran = 0
    for needs, code in blocks:
        compiled = compile(code, f"{page}, block", "exec")
        if not needs:
            exec(compiled, namespace)  # noqa: S102
            ran += 1
    assert ran >= 1


def test_links_lead_somewhere() -> None:
    for page in [*(DOCS / "engines").glob("*.md"), DOCS / "kubernetes.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)", page.read_text()):
            assert not target or (page.parent / target).exists(), (page.name, target)
