"""The result of one check, as ``check`` and ``verify`` list it."""

from dataclasses import dataclass

from zgcm_train.errors import VerificationError, ZgcmError


@dataclass(frozen=True)
class Check:
    """One thing that must hold.

    Attributes:
        name: what was looked at.
        passed: whether it holds.
        detail: what was found.
        kind: the error, and so the exit code, if it does not hold.
    """

    name: str
    passed: bool
    detail: str
    kind: type[ZgcmError] = VerificationError

    def error(self) -> ZgcmError:
        """Return the error that a failed check stands for."""
        return self.kind(f"{self.name}: {self.detail}.")
