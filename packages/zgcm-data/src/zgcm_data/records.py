"""What a document is, and how decisions about it are recorded.

A record has an id, a text, a source and a category; license and metadata are optional. Cleaning adds a
decision (keep, review or drop), the reasons for it in order, flags and metrics. Decisions only go down.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

CATEGORIES = (
    "code",
    "general_text",
    "web",
    "pdf_ocr",
    "math",
    "latex",
    "instruction",
    "reasoning",
    "agentic",
)
DECISIONS = ("keep", "review", "drop")


class CorpusError(ValueError):
    """A corpus that cannot be used as it is; the message names the file, the fault and the remedy."""


@dataclass(slots=True)
class Record:
    """One document on its way through the pipeline.

    Args:
        id: Unique name of the document.
        text: The document itself.
        source: Where it comes from, e.g. ``"torch-python"``.
        category: One of ``CATEGORIES``.
        license: Name of its license, empty if unknown.
        metadata: Whatever else the input said about it.
        profile: Name of the cleaning profile of its dataset, empty for none.
        decision: ``"keep"``, ``"review"`` or ``"drop"``.
        reasons: Why, in order, each once.
        flags: Findings that change no decision.
        metrics: Measured numbers.
    """

    id: str
    text: str
    source: str
    category: str
    license: str = ""
    metadata: dict[str, object] = field(default_factory=dict)
    profile: str = ""
    decision: str = "keep"
    reasons: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    metrics: dict[str, float] = field(default_factory=dict)

    def lower(self, decision: str, reason: str) -> None:
        """Move the decision down to ``decision`` (never up) and note the reason.

        Args:
            decision: The decision a rule asks for.
            reason: The name of that rule.

        Raises:
            ValueError: If the decision is unknown.
        """
        if decision not in DECISIONS:
            raise ValueError(f"decision is {decision!r}; use one of {', '.join(DECISIONS)}")
        if DECISIONS.index(decision) > DECISIONS.index(self.decision):
            self.decision = decision
        if reason not in self.reasons:
            self.reasons.append(reason)

    def to_dict(self) -> dict[str, object]:
        """Return the record with the keys of the public record contract.

        Returns:
            A JSON-compatible dictionary; ``record_sha256`` covers ``data`` alone.
        """
        data = {"text": self.text, "license": self.license, **self.metadata}
        return {
            "dataset": self.source,
            "source_id": self.id,
            "stage": "pretrain",
            "category": self.category,
            "data": data,
            "decision": self.decision,
            "reasons": list(self.reasons),
            "flags": sorted(self.flags),
            "metrics": dict(sorted(self.metrics.items())),
            "record_sha256": canonical_sha256(data),
        }


def canonical_sha256(value: Mapping[str, object]) -> str:
    """Return the SHA-256 of the canonical JSON of ``value`` (sorted keys, no spaces, UTF-8).

    Args:
        value: A JSON-compatible mapping.

    Returns:
        The digest in hexadecimal.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def check_category(category: str, where: str) -> str:
    """Return ``category`` if it is known.

    Args:
        category: The category that an input names.
        where: File and place, for the message.

    Returns:
        The category.

    Raises:
        CorpusError: If it is not one of ``CATEGORIES``; the nearest one is suggested.
    """
    if category in CATEGORIES:
        return category
    near = get_close_matches(category, CATEGORIES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(CATEGORIES)}."
    raise CorpusError(f"{where}: unknown category {category!r}; {hint}")


def keyed_hash(seed: str, key: str) -> str:
    """Return the 128-bit BLAKE2b of ``seed``, a zero byte and ``key``: the only source of chance here.

    Args:
        seed: Purpose and seed, e.g. ``"stage2:20260603"``.
        key: What is placed, usually a document id.

    Returns:
        32 hexadecimal digits; the same on every machine.
    """
    data = f"{seed}\0{key}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16).hexdigest()
