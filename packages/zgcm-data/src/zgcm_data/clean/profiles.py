"""Dataset profiles: what a known dataset calls its fields, and rules of its own.

A profile is a category, a mapping and a list of rules. To add one for a dataset of yours::

    from zgcm_data.clean.profiles import PROFILES, Profile, minimum

    PROFILES["forum"] = Profile(
        category="web",
        fields={"text": "body", "license": "terms"},
        rules=(minimum("votes", keep=3, review=0),),
    )

and name it in the recipe: ``[input.datasets.forum]`` with ``profile = "forum"``. Rules run before those of the
category and can only lower a decision.

Source: thresholds of the public release of the ZGCM-1 data pipeline, 0.1.0. Two are corrected: a missing
metric of a PDF and a missing score of a web page are flagged and reviewed, never silently dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from zgcm_data.clean.profile_rules import (
    agent_priority,
    compression,
    github_file,
    listed_errors,
    maximum,
    minimum,
    notebook,
    score_band,
)
from zgcm_data.clean.rules import Rule


@dataclass(frozen=True)
class Profile:
    """How one dataset is read and judged.

    Args:
        category: Category of its documents.
        fields: Name in the dataset of ``text``, ``id``, ``source``, ``license``.
        text_fields: Fields that are joined by newlines where there is no text field.
        rules: Run in order before the category's own rules.
    """

    category: str
    fields: Mapping[str, str] = field(default_factory=dict)
    text_fields: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()


PROFILES: dict[str, Profile] = {
    "gharchive": Profile("code", {"id": "blob_id", "text": "content"}, rules=(notebook, github_file)),
    "finepdfs": Profile(
        "pdf_ocr",
        rules=(
            minimum("lid", keep=0.85, review=0.85),
            maximum("minhash", keep=2),
            minimum("primary", keep=0.8, review=0.8),
        ),
    ),
    "olmocr": Profile(
        "pdf_ocr", rules=(compression, minimum("edu_score", keep=0.6, review=0.6, required=False))
    ),
    "web_knowledge": Profile("web", rules=(score_band,)),
    "nemotron_math": Profile("math", text_fields=("problem", "solution"), rules=(listed_errors,)),
    "agent_coding": Profile("agentic", rules=(agent_priority,)),
    "dolci_think": Profile("instruction", text_fields=("instruction", "response")),
    "dolci_tooluse": Profile("agentic"),
    "ultradata": Profile("instruction", text_fields=("instruction", "response")),
}


def find_profile(name: str) -> Profile:
    """Return a profile by name.

    Args:
        name: A key of ``PROFILES``; empty means a profile without a category or rules.

    Returns:
        The profile.

    Raises:
        ValueError: If there is none; lists the known ones.
    """
    if not name:
        return Profile("")
    if name not in PROFILES:
        raise ValueError(f"profile {name!r} is unknown; use one of {', '.join(sorted(PROFILES))}")
    return PROFILES[name]
