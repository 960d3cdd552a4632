"""Held-out loss, bits per byte and comparisons of language models, each on a frozen set."""

from zgcm_eval._version import __version__

__all__ = ["__version__"]
