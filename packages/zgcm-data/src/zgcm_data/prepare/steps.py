"""Run named steps once: a step whose inputs are unchanged and whose output is whole is skipped.

The key of a step is a digest of its name, its settings and the keys of the steps it reads from; beside the
output lies ``work/state/STEP.json`` with that key, the output files with their sizes, and the step's result.
It is written last, so a step that was killed has none and runs again.
"""

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zgcm_data._version import __version__

Progress = Callable[[str, float, str], None]
Work = Callable[[Callable[[float, str], None]], dict[str, Any]]
PIPELINE = 4  # raised whenever a step gives another result for the same inputs
FULL = ("No space left", "os error 28", "Disk quota")


class BuildError(OSError):
    """The output folder cannot be written; the message names it and the remedy."""


class Steps:
    """The steps of one build.

    Args:
        out: The output folder; created.
        progress: Called with (step, fraction, note).

    Raises:
        BuildError: If the folder cannot be written.
    """

    def __init__(self, out: Path, progress: Progress | None = None) -> None:
        self.out = out
        self.work = out / "work"
        self.state = self.work / "state"
        self.log: list[dict[str, Any]] = []
        self._progress = progress
        try:
            self.state.mkdir(parents=True, exist_ok=True)
            probe = self.state / ".probe"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise explain(error, out, "start") from error

    def run(self, name: str, inputs: Mapping[str, Any], outputs: list[Path], work: Work) -> dict[str, Any]:
        """Run a step unless its output is already there.

        Args:
            name: Its name.
            inputs: Everything that decides its result, JSON-compatible.
            outputs: Files and folders it writes.
            work: Does it; gets a function (fraction, note) and returns a JSON-compatible result.

        Returns:
            The result, with ``key`` added for later steps to name.

        Raises:
            BuildError: If the disk is full or the folder cannot be written; finished steps are kept.
        """
        key = digest({"step": name, "version": [__version__, PIPELINE], "inputs": inputs})
        path = self.state / f"{name}.json"
        known = finished(path, key, self.out)
        if known is not None:
            self.tell(name, 1.0, "unchanged")
            self.log.append({"step": name, "seconds": 0.0, "skipped": True})
            return known
        path.unlink(missing_ok=True)
        start = time.monotonic()
        self.tell(name, 0.0, "")
        try:
            result = work(lambda fraction, note: self.tell(name, fraction, note)) | {"key": key}
            state = {"key": key, "files": sizes(outputs, self.out), "result": result}
            write_json(path, state)
        except Exception as error:
            if is_full(error) or isinstance(error, PermissionError):
                raise explain(error, self.out, name) from error
            raise
        self.log.append({"step": name, "seconds": time.monotonic() - start, "skipped": False})
        self.tell(name, 1.0, "done")
        return result

    def tell(self, name: str, fraction: float, note: str) -> None:
        """Report progress, if anyone listens."""
        if self._progress is not None:
            self._progress(name, fraction, note)


def finished(path: Path, key: str, out: Path) -> dict[str, Any] | None:
    """Return the stored result of a step with this key whose files are all there, else ``None``."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if state.get("key") != key:
        return None
    for name, size in state["files"].items():
        file = out / name
        if not file.is_file() or file.stat().st_size != size:
            return None
    result: dict[str, Any] = state["result"]
    return result


def sizes(outputs: list[Path], out: Path) -> dict[str, int]:
    """Return the size of every file in ``outputs``, by name relative to ``out``."""
    files = [file for item in outputs for file in ([item] if item.is_file() else sorted(item.rglob("*")))]
    return {file.relative_to(out).as_posix(): file.stat().st_size for file in files if file.is_file()}


def digest(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON, atomically."""
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, then rename it."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def is_full(error: BaseException) -> bool:
    """Whether an error, of whatever library, means that the disk is full."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(text in str(error) for text in FULL)


def explain(error: BaseException, out: Path, step: str) -> BuildError:
    """Turn a write error into one sentence for people."""
    if is_full(error):
        text = (
            f"the disk of {out} is full (step {step}); free some space and run again, finished steps are kept"
        )
    else:
        text = (
            f"folder {out} cannot be written (step {step}: {error}); choose another or change its permissions"
        )
    number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    result = BuildError(text)
    result.errno = number
    return result
