"""Cleaning as a Daft plan, from a folder of raw records to a folder of decided ones."""

import json
from pathlib import Path
from typing import Any

from zgcm_data import engine
from zgcm_data.clean.pipeline import clean_record
from zgcm_data.clean.text import content_key
from zgcm_data.recipe import CleanRecipe
from zgcm_data.records import Record

INPUTS = ("id", "text", "source", "category", "license", "metadata", "profile")


OUTPUTS = ("text", "decision", "reasons", "flags", "metrics", "content_key", "bytes")


def clean_frame(frame: Any, recipe: CleanRecipe) -> Any:
    """Return the frame with cleaned texts, decisions, reasons and content keys.

    Args:
        frame: Columns ``INPUTS``, all strings; ``metadata`` is JSON.
        recipe: Limits.

    Returns:
        A frame with ``OUTPUTS`` in place of ``text`` and ``profile``; ``metrics`` is JSON.
    """
    kind = engine.daft().DataType
    column = engine.daft().col
    result = kind.struct(
        {
            "text": kind.string(),
            "decision": kind.string(),
            "reasons": kind.list(kind.string()),
            "flags": kind.list(kind.string()),
            "metrics": kind.string(),
            "content_key": kind.string(),
            "bytes": kind.int64(),
        }
    )

    def run(*columns: Any) -> list[dict[str, Any]]:
        return [clean_row(row, recipe) for row in zip(*(item.to_pylist() for item in columns), strict=True)]

    cleaned = engine.function(result, batch=512)(run)(*(column(name) for name in INPUTS))
    frame = frame.with_column("cleaned", cleaned)
    fields = [column("cleaned").get(name).alias(name) for name in OUTPUTS]
    return frame.select("id", "source", "category", "license", "metadata", *fields)


def clean_row(row: tuple[str, ...], recipe: CleanRecipe) -> dict[str, Any]:
    """Clean one row of ``INPUTS``."""
    identity, text, source, category, license_name, metadata, profile = row
    record = Record(identity, text, source, category, license_name, json.loads(metadata or "{}"), profile)
    clean_record(record, recipe)
    return {
        "text": record.text,
        "decision": record.decision,
        "reasons": record.reasons,
        "flags": sorted(record.flags),
        "metrics": json.dumps(record.metrics, sort_keys=True),
        "content_key": content_key(record.text, record.category),
        "bytes": len(record.text.encode()),
    }


def write_contract(path: Path, target: Path, *, dropped: bool = False) -> int:
    """Write cleaned documents as JSONL with the keys of the public record contract, atomically.

    Args:
        path: A cleaned folder.
        target: The file.
        dropped: Write dropped documents too.

    Returns:
        Records written.
    """
    columns = ("id", "source", "category", "license", "metadata", *OUTPUTS)
    temporary = target.with_name(f".{target.name}.partial")
    count = 0
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        for batch in engine.batches(path, columns):
            for row in batch.to_pylist():
                if row["decision"] != "drop" or dropped:
                    line = json.dumps(stored_record(row).to_dict(), ensure_ascii=False, sort_keys=True)
                    file.write(line + "\n")
                    count += 1
    temporary.replace(target)
    return count


def stored_record(row: dict[str, Any]) -> Record:
    """Return a cleaned row as a record."""
    return Record(
        id=row["id"],
        text=row["text"],
        source=row["source"],
        category=row["category"],
        license=row["license"],
        metadata=json.loads(row["metadata"] or "{}"),
        decision=row["decision"],
        reasons=row["reasons"],
        flags=set(row["flags"]),
        metrics=json.loads(row["metrics"]),
    )


def funnel(path: Path) -> dict[str, Any]:
    """Return documents and bytes per decision and source, and documents per reason.

    Args:
        path: A cleaned folder.

    Returns:
        ``{"decisions": [...], "reasons": {...}}``.
    """
    frame, column = engine.read(path), engine.daft().col
    decisions = frame.groupby("source", "category", "decision").agg(
        column("id").count().alias("documents"), column("bytes").sum().alias("bytes")
    )
    decisions = decisions.sort(["source", "category", "decision"])
    reasons = frame.select("id", "reasons").explode("reasons").where(column("reasons").not_null())
    reasons = reasons.groupby("reasons").agg(column("id").count().alias("documents")).sort("reasons")
    counts = {row["reasons"]: row["documents"] for row in engine.rows(reasons)}
    return {"decisions": engine.rows(decisions), "reasons": counts}
