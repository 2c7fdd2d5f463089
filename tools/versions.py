"""The versions that the tests ran with, as the table of docs/engines/index.md: ``python tools/versions.py`` writes it.

Of vLLM and SGLang they are those that ``tools/engines.sh`` installs; of libraries, those of the environment that this
runs in. ``make test-all`` runs it when everything has passed, so the table is what passed last.
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


def table() -> str:
    """The table, with the page's order of columns."""
    rows = ["| library | at least | in CI | by hand |", "|---|---|---|---|"]
    known = engines()
    for engine, (least, names) in ENGINES.items():
        ran = "; ".join(f"{known[name][0]} (torch {known[name][1]}, {HOW[name]})" for name in names)
        by_hand = "0.24.0 on an H200" if engine == "vLLM" else "0.5.20, 0.5.22"
        rows.append(f"| {engine} | {least} | {ran} | {by_hand} |")
    for library, (least, by_hand) in LIBRARIES.items():
        try:
            installed = version(library).partition("+")[0]
        except PackageNotFoundError:
            installed = re.search(rf"\| {library} \|[^|]*\| (\S*) \|", PAGE.read_text())[1]  # type: ignore[index]
        rows.append(f"| {library} | {least} | {installed} | {by_hand} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Writes the table."""
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + rest[rest.index(END) :])


if __name__ == "__main__":
    main()
