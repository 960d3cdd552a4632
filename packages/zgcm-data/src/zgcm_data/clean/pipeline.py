"""The cleaning steps in their order, from the profile of the dataset to length and quality."""

import math
import re
from collections.abc import Callable

from zgcm_data.clean.profiles import find_profile
from zgcm_data.clean.rules import CATEGORY_RULES, number
from zgcm_data.clean.text import normalize
from zgcm_data.recipe import CleanRecipe
from zgcm_data.records import Record

Step = Callable[[Record, CleanRecipe], None]

SECRET = re.compile(
    r"(?i)\b(?:api[_-]?key|secret[_-]?key|access[_-]?token|auth[_-]?token|client[_-]?secret|password|passwd)\b"
    r"""["']?\s*[:=]\s*["'][A-Za-z0-9+/_\-]{12,}["']"""
)
PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
LENGTH_BOUNDS = (2048, 8192, 32768, 65536)


def clean_record(record: Record, recipe: CleanRecipe) -> Record:
    """Run every step on a record, in place; a dropped record takes no further steps.

    Args:
        record: The record; its text is replaced by the normalized one.
        recipe: Limits.

    Returns:
        The same record.
    """
    for _, step in STEPS:
        if record.decision == "drop":
            break
        step(record, recipe)
    return record


def step_names() -> list[str]:
    """Return the names of the steps in order.

    Returns:
        The names that counts in the report are kept under.
    """
    return [name for name, _ in STEPS]


def normalize_step(record: Record, recipe: CleanRecipe) -> None:
    """Replace the text by its normal form."""
    record.text = normalize(record.text, record.category)


def integrity(record: Record, recipe: CleanRecipe) -> None:
    """Drop empty and tiny texts, review giant ones."""
    length = len(record.text)
    if not record.text.strip():
        record.lower("drop", "empty")
    elif length < recipe.min_chars:
        record.lower("drop", "too_short")
    elif length > recipe.max_chars:
        record.lower("review", "too_long")


def provenance(record: Record, recipe: CleanRecipe) -> None:
    """Review a missing source; review a missing license where one is required."""
    if not record.source:
        record.lower("review", "no_source")
    if recipe.require_license and not record.license:
        record.lower("review", "no_license")


def secrets(record: Record, recipe: CleanRecipe) -> None:
    """Review texts that seem to hold a credential or a term the recipe names."""
    if SECRET.search(record.text) or PRIVATE_KEY.search(record.text):
        record.lower("review", "secret")
    if any(term in record.text for term in recipe.sensitive_terms):
        record.lower("review", "sensitive_term")


def category(record: Record, recipe: CleanRecipe) -> None:
    """Apply the rules of the category."""
    rule = CATEGORY_RULES.get(record.category)
    if rule is not None:
        rule(record)


def quality(record: Record, recipe: CleanRecipe) -> None:
    """Judge a document by the scores that came with it."""
    keys = [key for key in (record.source, record.category, "default") if key in recipe.quality]
    if not keys:
        return
    limits = recipe.quality[keys[0]]
    score = number(record.metadata.get(limits.score))
    if score is None:
        if limits.require_score:
            record.lower("review", "missing_score")
    elif score < limits.keep_min:
        record.lower("drop" if score < limits.review_min else "review", "low_score")
    errors = number(record.metadata.get("hard_error"))
    if 0 <= limits.hard_error_max < (errors or 0):
        record.lower("drop", "hard_error")


def profile_step(record: Record, recipe: CleanRecipe) -> None:
    """Apply the rules of the dataset's profile."""
    for rule in find_profile(record.profile).rules:
        rule(record)


def lengths(record: Record, recipe: CleanRecipe) -> None:
    """Note the estimated tokens (characters / 4, rounded up) and the length bucket."""
    estimate = math.ceil(len(record.text) / 4)
    record.metrics["estimated_tokens"] = estimate
    record.metrics["length_bucket"] = sum(estimate > bound for bound in LENGTH_BOUNDS)


STEPS: tuple[tuple[str, Step], ...] = (
    ("profile", profile_step),
    ("normalize", normalize_step),
    ("integrity", integrity),
    ("provenance", provenance),
    ("secrets", secrets),
    ("category", category),
    ("quality", quality),
    ("lengths", lengths),
)
