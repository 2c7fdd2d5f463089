"""Charts as SVG: horizontal bars whose labels and values are text beside them. It knows no results.

Their colours are those of the system's light or dark mode, as the manual's are.
"""

from __future__ import annotations

import html

WIDTH = 640
LABELS = 186
BAR = (194, 380)  # where bars begin, and how long the longest is
STYLE = (
    ".back{fill:#fff}text{fill:#222}.ours{fill:#1f6feb}.other{fill:#8c959f}"
    "@media (prefers-color-scheme:dark){.back{fill:#1e2129}text{fill:#e6e6e6}.ours{fill:#4c8dff}.other{fill:#7d8590}}"
)


def bars(title: str, rows: list[tuple[str, float, str]]) -> str:
    """A chart of rows: label, length, and the text at its end."""
    longest = max(length for _, length, _ in rows)
    height = 44 + 30 * len(rows)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" class="back"/>',
        f'<text x="12" y="24" font-weight="bold">{html.escape(title)}</text>',
    ]
    for place, (label, length, text) in enumerate(rows):
        top, width = 40 + 30 * place, round(BAR[1] * length / longest, 1)
        whose = "ours" if label.lower() == "penstock" else "other"
        lines += [
            f'<text x="{LABELS}" y="{top + 16}" text-anchor="end">{html.escape(label)}</text>',
            f'<rect x="{BAR[0]}" y="{top}" width="{width}" height="22" class="{whose}"/>',
            f'<text x="{BAR[0] + 6 + width}" y="{top + 16}">{html.escape(text)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"
