"""What the data report shows, computed with Daft from the folders that the steps left."""

from pathlib import Path
from typing import Any

from zgcm_data import engine

STRETCHES = 40
BINS = 40
EXAMPLES = 3
EXCERPT = 240


def rule_examples(clean: Path) -> list[dict[str, Any]]:
    """Return up to three documents for each reason that lowered a decision.

    Args:
        clean: The cleaned folder.

    Returns:
        Rows (reason, decision, id, text), the text shortened.
    """
    functions, column = engine.daft().functions, engine.daft().col
    frame = engine.read(clean).where(column("decision") != "keep")
    frame = frame.select("id", "decision", "reasons", functions.left(column("text"), EXCERPT).alias("text"))
    frame = frame.explode("reasons").where(column("reasons").not_null())
    place = functions.row_number().over(engine.daft().Window().partition_by("reasons").order_by("id"))
    frame = frame.with_column("place", place).where(column("place") <= EXAMPLES)
    frame = frame.select(column("reasons").alias("reason"), "decision", "id", "text")
    return engine.rows(frame.sort(["reason", "id"]))


def matches(folder: Path, count: int = 12) -> dict[str, Any]:
    """Return how many removals a folder of matches holds, and some of them.

    Args:
        folder: ``work/duplicates``, ``work/excluded``, ``work/cross_stage`` or ``work/contaminated``.
        count: Examples of each kind.

    Returns:
        ``{"kinds": {kind: documents}, "examples": [rows]}``.
    """
    functions, column = engine.daft().functions, engine.daft().col
    frame = engine.read(folder)
    names = frame.schema().column_names()
    if "kind" not in names:
        frame = frame.with_column("kind", engine.daft().lit("passage"))
    frame = frame.where(column("kind") != "").collect()
    kinds = frame.groupby("kind").agg(column("id").count().alias("documents")).sort("kind")
    place = functions.row_number().over(engine.daft().Window().partition_by("kind").order_by("id"))
    some = frame.with_column("place", place).where(column("place") <= count).exclude("place")
    return {
        "kinds": {row["kind"]: row["documents"] for row in engine.rows(kinds)},
        "examples": engine.rows(some.sort(["kind", "id"])),
    }


def shares_along(order: Path) -> dict[str, list[float]]:
    """Return the share of each category in equal stretches of a stage.

    Args:
        order: ``work/stage1`` or ``work/stage2``.

    Returns:
        Category to one share (0 to 1) for each of 40 stretches of equal tokens.
    """
    column = engine.daft().col
    frame = engine.read(order).select("position", "category", "take").with_column("all", engine.daft().lit(0))
    until = engine.running_sum(column("take"), partition=("all",), order=("position",))
    frame = frame.with_column("until", until).collect()
    total = engine.rows(frame.agg(column("take").sum().alias("total")))[0]["total"]
    kind = engine.daft().DataType
    middle = (column("until") * 2 - column("take")).cast(kind.float64()) / float(2 * total)
    frame = frame.with_column("stretch", (middle * STRETCHES).cast(kind.int64()))
    sums = frame.groupby("stretch", "category").agg(column("take").sum().alias("tokens"))
    rows = engine.rows(sums.sort(["category", "stretch"]))
    whole = [0] * STRETCHES
    for row in rows:
        whole[min(row["stretch"], STRETCHES - 1)] += row["tokens"]
    result: dict[str, list[float]] = {}
    for row in rows:
        stretch = min(row["stretch"], STRETCHES - 1)
        line = result.setdefault(row["category"], [0.0] * STRETCHES)
        line[stretch] += row["tokens"] / whole[stretch]
    return result


def complexity_histogram(scores: Path) -> dict[str, Any]:
    """Return the histogram of lexical complexity between its 0.1% and 99.9% quantiles.

    Args:
        scores: ``work/scores``.

    Returns:
        ``{"low", "high", "counts"}``; empty counts where nothing was scored.
    """
    import numpy as np

    column = engine.daft().col
    values = engine.read(scores).where(column("score").not_null()).select("score").to_pydict()["score"]
    if not values:
        return {"low": 0.0, "high": 0.0, "counts": []}
    low, high = (float(item) for item in np.quantile(values, [0.001, 0.999]))
    counts, _ = np.histogram(
        np.clip(values, low, high), bins=BINS, range=(low, high if high > low else low + 1)
    )
    return {"low": low, "high": high, "counts": counts.tolist()}


def length_histogram(tokens: Path) -> list[dict[str, Any]]:
    """Return documents and tokens by length, in powers of two.

    Args:
        tokens: ``work/tokens``.

    Returns:
        Rows (bits, documents, tokens): lengths from 2^(bits-1) to 2^bits - 1.
    """
    kind, column = engine.daft().DataType, engine.daft().col

    def bits(lengths: Any) -> list[int]:
        return [int(item).bit_length() for item in lengths.to_pylist()]

    frame = engine.read(tokens).select("tokens")
    frame = frame.with_column("bits", engine.function(kind.int64())(bits)(column("tokens")))
    sums = frame.groupby("bits").agg(
        column("tokens").count().alias("documents"), column("tokens").sum().alias("sum")
    )
    return engine.rows(sums.select("bits", "documents", column("sum").alias("tokens")).sort("bits"))
