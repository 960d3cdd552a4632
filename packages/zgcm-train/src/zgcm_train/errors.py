"""What can go wrong, each with the exit code that the commands return."""

import errno
from pathlib import Path


class ZgcmError(Exception):
    """A fault that a person can mend; its text names the thing and the remedy."""

    exit_code = 2


class MissingSettingError(ZgcmError):
    """A setting that has no default was not given."""

    exit_code = 1


class ConfigurationError(ZgcmError, ValueError):
    """A recipe, an option or their combination is wrong."""

    exit_code = 2


class PathError(ZgcmError):
    """A path or a dataset is missing, unreadable, unwritable or wrong."""

    exit_code = 3


class CheckpointError(ZgcmError):
    """A checkpoint is missing, torn or not the one asked for."""

    exit_code = 4


class DivergedError(ZgcmError):
    """Training met more non-finite updates in a row than the recipe allows."""

    exit_code = 5


class VerificationError(ZgcmError):
    """A check that must hold did not."""

    exit_code = 6


class MeetingError(ZgcmError):
    """Some ranks of a run did not come, or did not join the others; torchrun starts all of them again."""

    exit_code = 1  # what torchrun itself returns for ranks that failed, and the watchdog for ranks that hang


class InterruptedRunError(ZgcmError):
    """The run was asked to stop; what it had done is saved."""

    exit_code = 0


def explain_os_error(error: OSError, doing: str) -> PathError:
    """Turn an operating-system error into one sentence with a remedy.

    Args:
        error: what the system said.
        doing: what was being done, for the sentence.

    Returns:
        The error to raise instead.
    """
    place = f" at {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PathError(
            f"The disk is full while {doing}{place}; free some space and run the same command again."
        )
    if error.errno == errno.EFBIG:
        return PathError(
            f"The file-size limit is reached while {doing}{place}; raise it (ulimit -f) and run again."
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PathError(f"No permission to write while {doing}{place}; choose another folder with --out.")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return PathError(
            f"A file stands where a folder is needed while {doing}{place}; choose another --out."
        )
    if error.errno == errno.ENOENT:
        return PathError(f"Nothing is there while {doing}{place}; check the path.")
    return PathError(f"{error.strerror or error} while {doing}{place}.")


def find_os_error(error: BaseException) -> OSError | None:
    """Return the operating-system error behind an error of PyTorch's distributed checkpoint, if there is one.

    Args:
        error: a ``CheckpointException``, which holds one error per failed rank, or any chained error.
    """
    failures = getattr(error, "failures", {})
    waiting = [error, *(failure for failure, _ in failures.values())]
    for candidate in waiting:
        if isinstance(candidate, OSError):
            return candidate
        waiting += [
            e for e in (candidate.__cause__, candidate.__context__) if e is not None and e not in waiting
        ]
    return None


def require_folder(path: Path, what: str) -> Path:
    """Return ``path`` if it is a folder.

    Args:
        path: where it should be.
        what: its name in the error.

    Returns:
        The same path.

    Raises:
        PathError: it is not there or not a folder.
    """
    if not path.is_dir():
        raise PathError(f"{what} is not a folder: {path}; check the path or build it first.")
    return path
