"""Write reports, read them back whatever their kind, and print them as tables."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zgcm_eval import heldout_report, long_context, memorization, multiple_choice
from zgcm_eval.metrics import Report

KINDS: Mapping[str, Any] = {
    heldout_report.FORMAT: heldout_report.HeldoutReport,
    multiple_choice.FORMAT: multiple_choice.ChoicesReport,
    memorization.FORMAT: memorization.MemorizationReport,
    long_context.FORMAT: long_context.LongContextReport,
}
"""The class that reads each format."""


def write_report(path: Path | str, report: Report) -> None:
    """Write a report as JSON under a temporary name and rename it.

    Args:
        path: file to write; its folder is made.
        report: any report of this package.

    Raises:
        ValueError: a figure is not finite.
    """
    path = Path(path)
    text = json.dumps(report.as_dict(), indent=1, ensure_ascii=False, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_report(path: Path | str) -> Report:
    """Read a report of any kind.

    Args:
        path: what ``write_report`` wrote.

    Returns:
        The report.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no report of this package.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; give a report that zgcm-eval wrote with --out")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); give a report that zgcm-eval wrote") from error
    kind = KINDS.get(str(record.get("format"))) if isinstance(record, dict) else None
    if kind is None:
        raise ValueError(f"{path} is no report of zgcm-eval; its format must be one of {sorted(KINDS)}")
    report: Report = kind.from_dict(record)
    return report


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Lay out rows of equal keys as text, numbers to the right.

    Args:
        rows: one mapping per line; digests are left out.

    Returns:
        The table, with a heading; an empty text for no rows.
    """
    if not rows:
        return ""
    names = [name for name in rows[0] if name != "sha256"]
    cells = [[_cell(row[name]) for name in names] for row in rows]
    heads = [name.replace("_", " ") for name in names]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    left = [isinstance(rows[0][name], str) for name in names]
    lines = [_line(line, widths, left) for line in (heads, ["-" * width for width in widths], *cells)]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _line(cells: Sequence[str], widths: Sequence[int], left: Sequence[bool]) -> str:
    parts = (
        cell.ljust(width) if to_left else cell.rjust(width)
        for cell, width, to_left in zip(cells, widths, left, strict=True)
    )
    return "  ".join(parts).rstrip()
