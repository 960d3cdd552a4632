"""Cleaning by category: what changes in a text, what a document must fulfil, and on whose word."""

from zgcm_data.clean.pipeline import clean_record, step_names
from zgcm_data.clean.text import content_key, normalize

__all__ = ["clean_record", "content_key", "normalize", "step_names"]
