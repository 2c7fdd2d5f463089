"""The versions that the tests ran with, in docs/engines: ``python tools/versions.py`` writes them.

The page of all integrations has a table, and each integration's page its row of that. Of vLLM and SGLang they are those
that ``tools/engines.sh`` installs; of libraries, those of the environment that this runs in. ``make test-all`` runs it
when everything has passed, so the pages say what passed last.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "engines" / "index.md"
BEGIN, END = "<!-- versions: written by tools/versions.py -->\n", "<!-- versions end -->"

# The oldest that is supported, and what was run besides by hand.
LIBRARIES = {
    "transformers": ("4.56", "4.56.2, 4.57.6"),
    "diffusers": ("0.35", "0.35.2"),
    "peft": ("0.17", "0.17.1"),
    "accelerate": ("1.10", "1.10.1"),
    "safetensors": ("0.4", "0.9.0rc1"),
    "torch": ("2.3", "2.11 on GPUs"),
}
ENGINES = {"vLLM": ("0.24", ("vllm-oldest", "vllm", "vllm-newest")), "SGLang": ("0.5.20", ("sglang",))}
HOW = {"vllm-oldest": "CPU", "vllm": "CPU", "vllm-newest": "CPU, loading only", "sglang": "CPU"}


def engines() -> dict[str, tuple[str, str]]:
    """The engine's version and its torch's, by the names of ``tools/engines.sh``."""
    script = (ROOT / "tools" / "engines.sh").read_text()
    found = re.findall(r"^  ([\w-]+)\)\n    version=(\S+) torch=(\S+)", script, re.MULTILINE)
    return {name: (engine, torch) for name, engine, torch in found}


def rows() -> dict[str, tuple[str, str, str]]:
    """By library: the oldest version that is supported, what CI runs, and what was run by hand."""
    found = {}
    known = engines()
    for engine, (least, names) in ENGINES.items():
        ran = "; ".join(f"{known[name][0]} (torch {known[name][1]}, {HOW[name]})" for name in names)
        found[engine] = (least, ran, "0.24.0 on an H200" if engine == "vLLM" else "0.5.20, 0.5.22")
    for library, (least, by_hand) in LIBRARIES.items():
        try:
            installed = version(library).partition("+")[0]
        except PackageNotFoundError:
            installed = re.search(rf"\| {library} \|[^|]*\| (\S*) \|", PAGE.read_text())[1]  # type: ignore[index]
        found[library] = (least, installed, by_hand)
    return found


def table() -> str:
    """The table of all, with the page's order of columns."""
    lines = ["| library | at least | in CI | by hand |", "|---|---|---|---|"]
    lines += [f"| {library} | {' | '.join(row)} |" for library, row in rows().items()]
    return "\n".join(lines) + "\n"


def of_page(library: str) -> str:
    """The same of one library, for its page."""
    least, ran, by_hand = rows()[library]
    return f"| at least | in CI | by hand |\n|---|---|---|\n| {least} | {ran} | {by_hand} |\n"


def page(library: str) -> Path | None:
    """The page of an integration that says its versions, if there is one."""
    path = PAGE.with_name(f"{library.lower()}.md")
    return path if path.exists() else None


def written(path: Path, text: str | None = None) -> str:
    """What a page says between the marks, or, given other text, the page with that."""
    before, rest = path.read_text().split(BEGIN)
    return rest[: rest.index(END)] if text is None else before + BEGIN + text + rest[rest.index(END) :]


def main() -> None:
    """Writes the pages."""
    PAGE.write_text(written(PAGE, table()))
    for library in rows():
        if path := page(library):
            path.write_text(written(path, of_page(library)))


if __name__ == "__main__":
    main()
