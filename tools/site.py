"""Hooks of mkdocs: links out of ``docs/`` lead to the repository, and the command line describes itself."""

from __future__ import annotations

import re
from typing import Any

_OUT = re.compile(r"\[([^\]]*)\]\((?:\.\./)+((?:benchmarks|crates|python|tests|examples|[A-Z]+\.md)[^)]*)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """A page before it is rendered."""
    repository = (config.repo_url or "").rstrip("/")

    def link(match: re.Match[str]) -> str:
        return f"[{match[1]}]({repository}/blob/main/{match[2]})" if repository else match[1]

    if page.file.src_uri == "cli.md":
        markdown = markdown.replace("<!-- commands -->", commands())
    return _OUT.sub(link, markdown)


def commands() -> str:
    """Each command's help as a terminal of 78 columns shows it, and the exit codes with it."""
    from typer.testing import CliRunner

    from penstock.cli.app import app

    environment = {"COLUMNS": "78", "NO_COLOR": "1", "TERM": "dumb"}
    pages = []
    names = ["", *(command.name for command in app.registered_commands)]
    for group in app.registered_groups:
        names += [
            f"{group.typer_instance.info.name} {command.name}" for command in group.typer_instance.registered_commands
        ]
    for command in names:
        arguments = [*command.split(), "--help"]
        shown = CliRunner().invoke(app, arguments, env=environment, prog_name="penstock")
        if shown.exit_code:
            raise RuntimeError(shown.output)
        title = f"penstock {command}".strip()
        pages.append(f"## {title}\n\n```text\n{shown.output.strip()}\n```\n")
    return "\n".join(pages)
