"""Ordered, deduplicated, accounted training data: from raw text to shards that never lose their place."""

from zgcm_data._version import __version__

__all__ = ["__version__"]
