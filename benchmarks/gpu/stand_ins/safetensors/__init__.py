"""The names that ``zgcm_model`` imports; using one says what to install."""

from typing import Any, NoReturn


class SafetensorError(Exception):
    """What the real package raises for a torn file."""


def safe_open(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse.

    Raises:
        ImportError: always.
    """
    raise ImportError("reading or writing checkpoints needs safetensors; run pip install safetensors")
