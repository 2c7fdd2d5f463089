"""The lint of retired words and long sentences: `tools/words.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

import words


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.rs", "let crew = Crew::new();"),
        ("a.rs", "// As `Slot` says."),
        ("a.py", "remarks = 1"),
        ("a.md", "Set `read_ahead_bytes`."),
        ("a.md", "    pip install penstock vllm"),
        ("Dockerfile", "RUN pip install --no-cache-dir penstock"),
        ("a.sh", "uv pip install 'penstock[torch]'"),
        ("a.yml", "run: uv add penstock==0.1"),
    ],
)
def test_a_retired_word_is_refused_where_it_is_a_name(path: str, text: str) -> None:
    assert list(words.found_in(path, text))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.rs", "// A crew of readers, and what it remarks."),
        ("a.rs", 'let text = "Slot and crew";'),
        ("a.py", '"""Says what the crew remarks.\n\nLook at Terms.\n"""\nnotes = 1'),
        ("a.md", "The Terms of the crew."),
        ("a.md", "    pip install penstock-loader vllm"),
    ],
)
def test_prose_and_messages_may_use_the_english_word(path: str, text: str) -> None:
    assert not list(words.found_in(path, text))


LONG = "This is " + "word " * 24


@pytest.mark.parametrize(
    "text",
    [
        LONG,
        f"Short. {LONG}. Short.",
        f"- {LONG}\n- short",
        f"1. {LONG}",
        f"[{LONG}](a.md)",
        LONG.replace(" word", "\nword"),
    ],
)
def test_a_long_sentence_is_refused(text: str) -> None:
    assert len(list(words.long_sentences("docs/a.md", text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        " ".join(["word"] * 25),
        "Ten words are here, and that is fine. " * 9,
        f"| {LONG} |",
        f"```text\n{LONG}\n```",
        f"# {LONG}",
        f"`{LONG}`",
        "\n".join(f"- {number} words, in items" for number in range(20)),
        f"`a` → `b` {LONG}",
    ],
)
def test_other_text_is_not(text: str) -> None:
    assert list(words.long_sentences("docs/a.md", text)) == []
