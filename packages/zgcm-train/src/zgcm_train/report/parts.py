"""Pieces of the page."""

import base64
import html
from collections.abc import Iterable, Sequence

from zgcm_train.report.charts import Chart

Cells = Sequence[str]


def section(title: str, content: str, note: str = "") -> str:
    """Return a section under a heading; ``content`` is HTML, ``note`` is text."""
    text = f"<p>{html.escape(note)}</p>" if note else ""
    return f"<section><h2>{html.escape(title)}</h2>{text}{content}</section>\n"


def figure(chart: Chart) -> str:
    """Return a picture with a form for narrow screens, held in the page itself."""
    wide, narrow = (base64.b64encode(svg.encode()).decode() for svg in (chart.wide, chart.narrow))
    kind = "data:image/svg+xml;base64"
    return (
        f'<figure><picture><source media="(max-width: 640px)" srcset="{kind},{narrow}">'
        f'<img src="{kind},{wide}" alt="{html.escape(chart.title)}"></picture></figure>'
    )


def table(heads: Cells, rows: Iterable[Cells], *, text: int) -> str:
    """Return a table whose first ``text`` columns are words and whose others are numbers."""
    head = "".join(f"<th{_align(i, text)}>{html.escape(h)}</th>" for i, h in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(f"<td{_align(i, text)}>{html.escape(c)}</td>" for i, c in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _align(column: int, text: int) -> str:
    return "" if column < text else ' class="number"'
