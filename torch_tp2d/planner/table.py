"""Tables as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

__all__ = ["as_html", "as_text", "in_bytes"]

Row = Sequence[str]


def in_bytes(size: float) -> str:
    """A number of bytes to three digits, in units of 1024: ``1.50 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    digits = 0 if unit == "B" or size >= 100 else 1 if size >= 10 else 2
    return f"{size:.{digits}f} {unit}"


def as_text(head: Row, rows: Sequence[Row]) -> str:
    """A table as text, with columns aligned by spaces."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def as_html(title: str, head: Row, rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """A table as HTML, for a notebook."""

    def line(tag: str, cells: Row) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    below = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    caption = f"<caption>{html.escape(title)}</caption>"
    return f"<table>{caption}<thead>{line('th', head)}</thead><tbody>{body}</tbody></table>{below}"
