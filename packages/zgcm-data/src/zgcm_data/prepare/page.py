"""Build the data report, one self-contained HTML page: no network, no script."""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

COLORS = ("#3b6fb6", "#d9822b", "#3f8f5b", "#a3478f", "#8a6d3b", "#5b5fc7", "#b5484b", "#2f8f9d", "#707070")
STYLE = """
:root{color-scheme:light dark;--line:#d5d9e0;--soft:#f5f6f8;--ink:#1b1f26;--dim:#5c6470;--paper:#fff}
@media(prefers-color-scheme:dark){:root{--line:#39404b;--soft:#20242b;--ink:#e8eaed;--dim:#a2a9b4;--paper:#15181d}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1040px;padding:24px 20px 60px;background:var(--paper);
color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:26px;margin:0 0 4px}h2{font-size:19px;margin:36px 0 10px}
p{margin:6px 0;color:var(--dim);max-width:76ch}.wide{overflow-x:auto}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:5px 10px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--dim)}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.id{word-break:break-all;min-width:130px;max-width:360px}
pre{min-width:220px;margin:0;white-space:pre-wrap;word-break:break-word;font-size:12px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--dim);font-size:12px}.bar{height:14px;border-radius:2px}
.key{display:inline-block;margin:0 14px 6px 0;white-space:nowrap}.key i{display:inline-block;width:11px;height:11px;
margin-right:6px;border-radius:2px}details{margin:8px 0}summary{cursor:pointer;color:var(--dim)}
"""


def page(title: str, lead: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return a whole page.

    Args:
        title: Its heading.
        lead: One sentence below it.
        sections: Headings and ready HTML.

    Returns:
        The HTML.
    """
    body = "".join(f"<h2>{escape(name)}</h2>{content}" for name, content in sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"<p>{escape(lead)}</p>{body}</body></html>\n"
    )


def note(text: str) -> str:
    """Return a paragraph."""
    return f"<p>{escape(text)}</p>"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with equal keys as a table; numbers are set flush right."""
    if not rows:
        return note("None.")
    names = list(rows[0])
    numeric = {name for name in names if all(isinstance(row[name], int | float) for row in rows)}

    def cell(kind: str, name: str, text: str) -> str:
        style = ' class="n"' if name in numeric else ' class="id"' if name in ("id", "match") else ""
        return f"<{kind}{style}>{text}</{kind}>"

    head = "".join(cell("th", name, escape(name.replace("_", " "))) for name in names)
    body = "".join(
        "<tr>" + "".join(cell("td", name, shown(name, row[name])) for name in names) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def shown(name: str, value: Any) -> str:
    """Return the HTML of one cell."""
    if isinstance(value, float):
        return f"{value:.1%}" if name in ("share", "similarity") else f"{value:,.3f}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"<pre>{escape(str(value))}</pre>" if name == "text" else escape(str(value))


def histogram(counts: Sequence[int], labels: tuple[str, str], name: str) -> str:
    """Return bars of equal width as SVG, the smallest and largest value written below.

    Args:
        counts: Height of each bar.
        labels: Text at the left and right end of the axis.
        name: What is counted, for the tooltip and for screen readers.

    Returns:
        The SVG.
    """
    if not counts:
        return note("Nothing was counted.")
    width, height = 1000.0, 200.0
    step, top = width / len(counts), max(max(counts), 1)
    bars = "".join(
        f'<rect x="{number * step + 1:.1f}" y="{height - height * count / top:.1f}" width="{step - 2:.1f}" '
        f'height="{height * count / top:.1f}" fill="{COLORS[0]}"><title>{count:,} {escape(name)}</title></rect>'
        for number, count in enumerate(counts)
    )
    text = (
        f'<text x="0" y="218">{escape(labels[0])}</text>'
        f'<text x="{width}" y="218" text-anchor="end">{escape(labels[1])}</text>'
        f'<text x="{width / 2}" y="218" text-anchor="middle">highest bar: {top:,} {escape(name)}</text>'
    )
    return f'<svg viewBox="0 0 1000 224" role="img" aria-label="{escape(name)}">{bars}{text}</svg>'


def stacked(series: Mapping[str, Sequence[float]], labels: tuple[str, str]) -> str:
    """Return shares along an order as stacked bars, with a legend.

    Args:
        series: Name to one share for each stretch; they sum to 1 in each stretch.
        labels: Text at the left and right end of the axis.

    Returns:
        The HTML.
    """
    stretches = len(next(iter(series.values()), []))
    step, height, bars = 1000.0 / max(stretches, 1), 200.0, ""
    below = [0.0] * stretches
    for color, (name, shares) in zip(cycle(len(series)), series.items(), strict=True):
        for number, share in enumerate(shares):
            bars += (
                f'<rect x="{number * step + 0.5:.1f}" y="{height * (1 - below[number] - share):.1f}" '
                f'width="{step - 1:.1f}" height="{height * share:.1f}" fill="{color}">'
                f"<title>{escape(name)}: {share:.1%}</title></rect>"
            )
            below[number] += share
    keys = "".join(
        f'<span class="key"><i style="background:{color}"></i>{escape(name)}</span>'
        for color, name in zip(cycle(len(series)), series, strict=True)
    )
    text = (
        f'<text x="0" y="218">{escape(labels[0])}</text>'
        f'<text x="1000" y="218" text-anchor="end">{escape(labels[1])}</text>'
    )
    return f'<div>{keys}</div><svg viewBox="0 0 1000 224" role="img" aria-label="shares">{bars}{text}</svg>'


def cycle(count: int) -> list[str]:
    """Return ``count`` colors."""
    return [COLORS[number % len(COLORS)] for number in range(count)]


def folded(summary: str, value: Any) -> str:
    """Return data that opens on a click."""
    text = escape(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False))
    return f"<details><summary>{escape(summary)}</summary><pre>{text}</pre></details>"


def escape(text: str) -> str:
    """Return text that is safe inside HTML."""
    return html.escape(text.replace("\0", "\ufffd"), quote=True)
