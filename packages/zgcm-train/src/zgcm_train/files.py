"""Write files so that a reader never sees half of one."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

JSONObject = dict[str, Any]


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write ``content`` under a temporary name, flush it to the disk, then rename it to ``path``.

    Args:
        path: the final name; an older file there is replaced.
        content: text (written as UTF-8) or bytes.

    Raises:
        OSError: the disk is full or the folder is not writable; ``path`` is then as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_text(text: str) -> str:
    """Return the SHA-256 of a text's UTF-8 bytes in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_json_lines(path: Path) -> Iterator[JSONObject]:
    """Yield the objects of a JSONL file; a torn last line, left by a crash, is passed over.

    Args:
        path: the file; a missing one yields nothing.

    Raises:
        ValueError: a line before the last one is not JSON.
    """
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            yield json.loads(line)
        except ValueError:
            if number == len(lines):
                return
            raise ValueError(f"{path}, line {number}, is not JSON; the file was altered by hand.") from None


def append_json_line(path: Path, record: JSONObject) -> None:
    """Append one object as a line; numbers keep every digit."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False, allow_nan=True) + "\n")


def keep_lines(path: Path, keep: Callable[[JSONObject], bool]) -> None:
    """Rewrite a JSONL file with only the records for which ``keep`` is true."""
    if path.exists():
        kept = [
            json.dumps(record, ensure_ascii=False) + "\n" for record in read_json_lines(path) if keep(record)
        ]
        write_atomic(path, "".join(kept))
