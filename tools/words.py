"""Refuses retired words and long sentences: ``python tools/words.py`` names each place, and what to write instead.

One word for one thing (docs/glossary.md). Identifiers are compared whole, so that ``course`` is refused and "of course"
is not: in Python and Rust, names in code and in backticks; in Markdown, names in backticks and code blocks. Phrases are
looked for everywhere. A sentence of the manual has at most 25 words; tables, code and walks through functions (with an
arrow) are left out.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

IDENTIFIERS = {
    # Remote stores
    "another_course": "for_load", "Course": "LoadContext", "Witness": "ResponseRecorder",
    "witness": "response_recorder",
    "pushed_back": "throttled", "push_backs": "throttled", "Pace": "LatencyTracker", "Hedge": "HedgePermit",
    "Patience": "RetryPolicy", "Trouble": "TransientError", "GivenUp": "RetriesExhausted", "Lack": "CredentialError",
    "Tally": "Counters", "tally": "counters", "standin": "local_replica", "StandIn": "LocalReplica",
    # Pipeline, plan and tuning
    "crew": "reader_pool", "Crew": "ReaderPool", "Meter": "ThroughputSampler", "Lane": "ReadContext",
    "Way": "BlockCopy", "Spent": "Timing", "Look": "Probe", "kind_of": "classify", "own_runs": "per_reader_ranges",
    "own_handles": "per_reader_fd", "bring_in_parts": "copy_pipelined", "entangled": "overlapping",
    "bridge_bytes": "coalesce_gap_bytes", "Ahead": "Prefetch", "first_readers": "cpu_seconds",
    "cores_share": "cpu_seconds",
    # Memory and devices
    "Slot": "StagingBuffer", "SLOT_SLACK": "ALIGNMENT_PADDING",
    "read_to_slot": "read_to_staging", "copy_past_caches": "non_temporal_copy",
    # Checkpoints and objects
    "remarks": "notes", "lies_at": "local_path", "rulers": "owners",
    # Python
    "penstock_config": "options", "ObjectNotFoundError": "LocationNotFoundError",
    "ObjectAccessError": "LocationAccessError", "ObjectChangedError": "LocationChangedError",
    "read_ahead_bytes": "window_bytes", "become_real": "materialise_in_place", "real_later": "materialise_later",
    "lazy_memory": "lazy_storage", "LoaderOptions": "ExtraConfig",
    "engine_options": "core_options",
}  # fmt: skip

PHRASES = {
    r"(?:pip3? install|uv add|uvx|pipx run) (?:-\S+ )*[\"']?penstock(?!-)\b": "penstock-loader, ours",
    r"penstock\.engines\b": "penstock.integrations",
    r"\bSee the module\.": "what it is for",
}

LONGEST = 25
"""Words of a sentence of the manual."""

_TELLS_OF_THEM = {"CHANGELOG.md", "benchmarks/NOTEBOOK.md", "tests/test_words.py", "tools/words.py"}
_NAME = re.compile(r"[A-Za-z_]\w*")
_QUOTED = re.compile(r"`[^`\n]*`")


def code_of(path: str, text: str) -> Iterator[tuple[int, str]]:
    """The lines of a file, as far as they are code: without prose and the text of messages."""
    in_block = False
    for number, line in enumerate(text.splitlines(), 1):
        if path.endswith(".md"):
            in_block ^= line.startswith("```")
            yield number, line if in_block or line.startswith("    ") else " ".join(_QUOTED.findall(line))
            continue
        start = "//" if path.endswith(".rs") else "#"
        code, _, comment = line.partition(start)
        code = re.sub(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.){2,}\'', '""', code)
        yield number, f"{code} {' '.join(_QUOTED.findall(comment))}"


def found_in(path: str, text: str) -> Iterator[str]:
    """Each retired word of a file, as ``path:line: word: what to write``."""
    docstring = False
    for number, code in code_of(path, text):
        if path.endswith(".py"):
            quotes = code.count('"""')
            inside, docstring = docstring, docstring ^ bool(quotes % 2)
            if inside or quotes:
                continue
        for name in _NAME.findall(code):
            if name in IDENTIFIERS:
                yield f"{path}:{number}: {name}: write {IDENTIFIERS[name]}"
    for pattern, instead in PHRASES.items():
        for match in re.finditer(pattern, text):
            yield f"{path}:{text[: match.start()].count(chr(10)) + 1}: {match[0]}: write {instead}"


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs and items of lists of a page, each with its first line: no tables, headings, code, pictures."""
    in_block, began, lines = False, 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        stripped = line.strip()
        item = re.match(r"(?:[*-]|\d+\.) +", stripped)
        fence = stripped.startswith("```")
        other = not stripped or stripped.startswith(("|", "#", "<!--", "![", ":::", "!!!"))
        if lines and (item or fence or other):
            yield began, " ".join(lines)
            lines = []
        in_block ^= fence
        if in_block or fence or other or (line.startswith("    ") and not lines and not item):
            continue
        began = began if lines else number
        lines.append(stripped[item.end() :] if item else stripped)


def long_sentences(path: str, text: str) -> Iterator[str]:
    """Each sentence that is too long, as ``path:line: words: its beginning``."""
    for number, paragraph in paragraphs(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", _QUOTED.sub("Code", paragraph)).replace("**", "")
        for sentence in re.split(r"[.!?][\"')]*\s+", plain):
            words = sum(bool(re.search(r"\w", word)) for word in sentence.split())
            if words > LONGEST and "→" not in sentence:
                yield f"{path}:{number}: {words} words in a sentence: {sentence[:60]}…"


def main() -> None:
    """Looks through the files that git knows; exits with 1 where it finds something."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True).stdout
    kinds = (".py", ".pyi", ".rs", ".md", ".toml", ".yaml", ".yml", ".sh", ".txt", "Makefile", "/run")
    paths = [path for path in listed.splitlines() if path.endswith(kinds) or "Dockerfile" in path]
    paths = [path for path in paths if path not in _TELLS_OF_THEM and (ROOT / path).exists()]
    found = [place for path in paths for place in found_in(path, (ROOT / path).read_text())]
    for path in (path for path in paths if path.endswith(".md")):
        if path.startswith("docs/") or "/" not in path:
            found += long_sentences(path, (ROOT / path).read_text())
    sys.stdout.writelines(f"{place}\n" for place in found)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
