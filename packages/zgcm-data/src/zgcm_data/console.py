"""What people see on the terminal: progress, tables and JSON."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any


class Bar:
    """Progress on standard error: one line per step, redrawn in a terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = ""

    def __call__(self, step: str, fraction: float, note: str) -> None:
        """Show how far a step is."""
        end = "\n" if fraction >= 1 else "\r"
        if self._terminal:
            print(f"\x1b[2K{step:<10} {fraction:4.0%}  {note}", end=end, file=sys.stderr, flush=True)
        elif fraction >= 1:
            print(f"{step}: {note}", file=sys.stderr, flush=True)


def flat(values: dict[str, Any]) -> str:
    """Return a mapping as aligned lines; lists of mappings as tables below their name."""
    lines = []
    for name, value in values.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines.append(f"{name}\n{table(value)}")
        else:
            lines.append(
                f"{name:<18} {json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value}"
            )
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows with equal keys as an aligned table."""
    if not rows:
        return "(nothing)"
    names = list(rows[0])
    cells = [names, *([shown(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return "\n".join(
        "  ".join(aligned(cell, width) for cell, width in zip(line, widths, strict=True)) for line in cells
    )


def aligned(cell: str, width: int) -> str:
    """Return a cell at its width, numbers flush right."""
    number = cell.replace(",", "").replace(".", "").replace("-", "").isdigit()
    return cell.rjust(width) if number else cell.ljust(width)


def shown(value: Any) -> str:
    """Return one cell of a table."""
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, example: str
) -> argparse.ArgumentParser:
    """Add a command whose help ends with an example."""
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", epilog=f"example: {example}"
    )
    made.set_defaults(run=run)
    return made


def emit(options: argparse.Namespace, data: Any, text: str) -> None:
    """Print the result as JSON or for people."""
    print(json.dumps(data, indent=2, ensure_ascii=False) if options.json else text)
