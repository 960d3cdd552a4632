"""A ledger as a file: one JSON object per line, appended whole, repaired after a crash."""

import json
import os
from pathlib import Path
from typing import Any


def read_ledger(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of a ledger, without a torn last line.

    Args:
        path: the JSONL file; a missing one has no records.

    Raises:
        ValueError: a line other than the last is damaged.
    """
    file = Path(path)
    if not file.exists():
        return []
    lines = file.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        record = _decode(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise ValueError(f"{file}, line {number} is damaged; restore the ledger from a copy")
    return records


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and isinstance(record.get("step"), int) and "kind" in record
    return record if whole else None


def encode(record: dict[str, Any]) -> bytes:
    """Return the line of a record."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a record with a single write, and wait until it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(encode(record))
        os.fsync(file.fileno())


def repair(path: Path) -> None:
    """Finish a last line that lacks only its end, or remove a torn one."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole, _, last = data.rpartition(b"\n")
    if last:
        kept = data + b"\n" if _decode(last) is not None else whole + b"\n" if whole else b""
        replace(path, kept)


def replace(path: Path, data: bytes) -> None:
    """Put other bytes in the place of a file, at once."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
