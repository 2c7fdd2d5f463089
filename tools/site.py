"""Hooks of mkdocs: what the site has besides ``docs/``.

The address of the repository comes from ``[project.urls]`` of pyproject.toml, the one place that has it. Changes,
support, security and contributing are pages too, and other files are linked to in the repository. The command line
describes itself.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = {
    "CHANGELOG.md": "changes.md",
    "SUPPORT.md": "support.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)]*)?\)")


def repository(pyproject: str | None = None) -> str:
    """The address of the repository, "" where none is filled in."""
    text = (ROOT / "pyproject.toml").read_text() if pyproject is None else pyproject
    found = re.search(r'^Repository = "(.*?)/?"', text, re.MULTILINE)
    return found[1] if found else ""


def on_config(config: Any) -> Any:
    """The address, for the theme."""
    config.repo_url = repository() or None
    return config


def on_files(files: Any, config: Any) -> Any:
    """Pages that lie beside ``docs/``."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page before it is rendered."""
    uri = page.file.src_uri
    if uri == "compare.md":
        page.meta["hide"] = ["toc"]  # the table is wide
    if uri == "cli.md":
        markdown = markdown.replace("<!-- commands -->", commands())
    markdown = re.sub(r"In a clone this page .*?\n\n", "", markdown, flags=re.DOTALL)
    beside = {page: name for name, page in PAGES.items()}
    return linked(markdown, beside.get(uri) or f"docs/{uri}", repository())


def linked(markdown: str, path: str, address: str) -> str:
    """The text of the file `path` of the repository at `address` with links as the site has them."""
    at = posixpath.dirname(PAGES.get(path) or posixpath.relpath(path, "docs"))

    def link(match: re.Match[str]) -> str:
        picture, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        page = PAGES.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
        if page:
            return f"{picture}[{text}]({posixpath.relpath(page, at or '.')}{anchor})"
        return f"{picture}[{text}]({address}/blob/main/{file}{anchor})" if address else text

    markdown = _LINK.sub(link, markdown)
    if not address:
        return markdown
    markdown = markdown.replace("OWNER/REPOSITORY", "/".join(address.split("/")[-2:]))
    return re.sub(r"\bthe release page\b", f"[the release page]({address}/releases)", markdown)


def commands() -> str:
    """Each command's help as a terminal of 78 columns shows it, and the exit codes with it."""
    from typer.testing import CliRunner

    from penstock.cli.app import app

    environment = {"COLUMNS": "78", "NO_COLOR": "1", "TERM": "dumb"}
    pages = []
    for command in names():
        shown = CliRunner().invoke(app, [*command.split(), "--help"], env=environment, prog_name="penstock")
        if shown.exit_code:
            raise RuntimeError(shown.output)
        title = f"penstock {command}".strip()
        pages.append(f"## {title}\n\n```text\n{shown.output.strip()}\n```\n")
    return "\n".join(pages)


def names() -> list[str]:
    """The commands as they are written after ``penstock``, "" for the program itself first."""
    from penstock.cli.app import app

    found = ["", *(str(command.name) for command in app.registered_commands)]
    for group in app.registered_groups:
        inner = group.typer_instance
        if inner is not None:
            found += [f"{inner.info.name} {command.name}" for command in inner.registered_commands]
    return found
