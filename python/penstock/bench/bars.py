"""Charts as SVG: horizontal bars whose labels and values are text beside them. It knows no results."""

from __future__ import annotations

import html

WIDTH = 640
LABELS = 186
BAR = (194, 380)  # where bars begin, and how long the longest is


def bars(title: str, rows: list[tuple[str, float, str]]) -> str:
    """A chart of rows: label, length, and the text at its end."""
    longest = max(length for _, length, _ in rows)
    height = 44 + 30 * len(rows)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-weight="bold" fill="#222222">{html.escape(title)}</text>',
    ]
    for place, (label, length, text) in enumerate(rows):
        top, width = 40 + 30 * place, round(BAR[1] * length / longest, 1)
        color = "#1f6feb" if label.lower() == "penstock" else "#8c959f"
        lines += [
            f'<text x="{LABELS}" y="{top + 16}" text-anchor="end" fill="#222222">{html.escape(label)}</text>',
            f'<rect x="{BAR[0]}" y="{top}" width="{width}" height="22" fill="{color}"/>',
            f'<text x="{BAR[0] + 6 + width}" y="{top + 16}" fill="#222222">{html.escape(text)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"
