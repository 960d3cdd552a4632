"""Name, complete, find, check and prune checkpoint folders."""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from zgcm_train.checkpoint.progress import Identity, Progress, parse_state
from zgcm_train.errors import CheckpointError
from zgcm_train.files import sha256_file, write_atomic

_NAME = re.compile(r"step-(\d{9})")
MARK = "COMPLETE"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk.

    Attributes:
        path: its folder.
        progress: where the run stood.
        identity: what the run was.
    """

    path: Path
    progress: Progress
    identity: Identity


def folder_name(step: int) -> str:
    """Return the folder's name for ``step`` updates done."""
    return f"step-{step:09d}"


def seal(temporary: Path, final: Path) -> None:
    """Write ``COMPLETE`` with sizes and digests, then rename the folder to its final name.

    Args:
        temporary: the folder as written.
        final: its final name; an older folder there is replaced.
    """
    files = sorted(p for p in temporary.rglob("*") if p.is_file() and p.name != MARK)
    listing = {
        str(p.relative_to(temporary)): {"bytes": p.stat().st_size, "sha256": sha256_file(p)} for p in files
    }
    write_atomic(temporary / MARK, json.dumps(listing, indent=1, sort_keys=True) + "\n")
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify_checkpoint(path: Path, *, digests: bool = True) -> list[str]:
    """Compare a checkpoint folder with its ``COMPLETE`` mark.

    Args:
        path: the folder.
        digests: also read every file and compare its SHA-256.

    Returns:
        One sentence per fault; empty when it is whole.
    """
    mark = path / MARK
    if not mark.is_file():
        return [f"{path} has no {MARK} mark: its save did not finish"]
    try:
        listing = json.loads(mark.read_text(encoding="utf-8"))
    except ValueError:
        return [f"{mark} is not JSON"]
    faults = []
    for name, expected in listing.items():
        file = path / name
        if not file.is_file():
            faults.append(f"{file} is missing")
        elif file.stat().st_size != expected["bytes"]:
            faults.append(f"{file} has {file.stat().st_size} bytes, not {expected['bytes']}")
        elif digests and sha256_file(file) != expected["sha256"]:
            faults.append(f"{file} has other bytes than when it was saved")
    return faults


def open_checkpoint(path: Path) -> Checkpoint:
    """Return a checkpoint whose every byte is as it was saved.

    Raises:
        CheckpointError: it is missing, torn or altered; nothing of it was unpickled.
    """
    if not path.is_dir():
        raise CheckpointError(f"There is no checkpoint {path}.")
    faults = verify_checkpoint(path)
    if faults:
        raise CheckpointError(f"{path} cannot be used: {faults[0]}; choose another checkpoint.")
    progress, identity = parse_state((path / "state.json").read_text(encoding="utf-8"), str(path))
    return Checkpoint(path, progress, identity)


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint folders under ``folder``, oldest first, whole or torn."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(p for p in found if _NAME.fullmatch(p.name) and p.is_dir())


def newest_complete(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest whole checkpoint and the faults of the newer ones that were passed over.

    Args:
        folder: where the ``step-*`` folders are.
    """
    passed_over: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            return open_checkpoint(path), passed_over
        except CheckpointError as error:
            passed_over.append(str(error))
    return None, passed_over


def prune(folder: Path, *, keep: int, protected: set[int]) -> list[Path]:
    """Delete old checkpoints, never the newest ``keep`` whole ones nor a protected one.

    Args:
        folder: where the ``step-*`` folders are.
        keep: how many whole checkpoints stay, at least 1.
        protected: steps whose checkpoint stays in any case, such as the ends of stages.

    Returns:
        The folders that were deleted.
    """
    whole = [p for p in checkpoints(folder) if not verify_checkpoint(p, digests=False)]
    old = [p for p in whole[: -max(keep, 1)] if int(p.name.removeprefix("step-")) not in protected]
    for path in old:
        (path / MARK).unlink()  # first, so that a half-deleted folder reads as torn
        shutil.rmtree(path)
    return old


def remove_unfinished(folder: Path) -> None:
    """Delete what saves that never finished left behind."""
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path)
