"""The two orders of pretraining.

| stage | documents | order |
|---|---|---|
| 1 | by keyed hash up to each source's token quota, without complexity outliers | complexity, ascending |
| 2 | likewise, of what stage 1 does not hold, exactly or nearly | keyed hash of (seed, id, epoch) |

The complexity orders natural-language text. Code, math and LaTeX stand apart: each is in an order of its
own (keyed hash) and spread evenly along stage 1 by tokens.

A document of stage 1 stands at the middle of its tokens in the running total of its stream, divided by the
total of the stream: so any stretch holds each stream's share to within about its longest document;
``share_error`` measures how closely.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zgcm_data import engine
from zgcm_data.complexity import METRIC

APART = ("code", "math", "latex")
ORDERED = "natural_language"


def describe() -> list[dict[str, str]]:
    """Return the table of this module as data.

    Returns:
        One row per stage.
    """
    return [
        {"stage": "1", "kind": "curriculum", "metric": METRIC, "apart": ", ".join(APART)},
        {"stage": "2", "kind": "shuffle", "metric": "", "apart": ""},
    ]


def without_outliers(scores: Any, low: float, high: float) -> tuple[Any, dict[str, float]]:
    """Drop natural-language documents outside two quantiles of complexity, and those without a score.

    Args:
        scores: Frame (id, score) of the natural-language documents.
        low: Lower quantile.
        high: Upper quantile.

    Returns:
        The frame that stays, and the scores at the two quantiles.
    """
    column = engine.daft().col
    values = np.array(scores.where(column("score").not_null()).select("score").to_pydict()["score"])
    if len(values) == 0:
        return scores.where(engine.daft().lit(False)), {"low": 0.0, "high": 0.0}
    bounds = (np.quantile(values, low, method="higher"), np.quantile(values, high, method="lower"))
    inside = (column("score") >= float(bounds[0])) & (column("score") <= float(bounds[1]))
    return scores.where(column("score").not_null() & inside), {
        "low": float(bounds[0]),
        "high": float(bounds[1]),
    }


def choose(pool: Any, quotas: Mapping[tuple[str, str], int], seed: str, max_epochs: Mapping[str, int]) -> Any:
    """Choose documents of each source by keyed hash until its token quota is met exactly.

    The last document of a source is cut where the quota ends (``take`` counts its end-of-document token).

    Args:
        pool: Frame (id, document, category, source, tokens), ``tokens`` without the end-of-document token; the
            parts of one ``document`` are chosen one after another.
        quotas: (category, source) to tokens.
        seed: Key of the choice.
        max_epochs: How often each document of a category may be used.

    Returns:
        A collected frame with ``epoch`` and ``take`` added.
    """
    column, lit = engine.daft().col, engine.daft().lit
    wanted = engine.daft().from_pydict(
        {
            "category": [key[0] for key in quotas],
            "source": [key[1] for key in quotas],
            "quota": list(quotas.values()),
        }
    )
    joined = pool.join(wanted, on=["category", "source"])
    joined = joined.with_column("place", engine.keyed(column("document"), seed))
    repeated = joined.with_column("epoch", lit(0))
    for epoch in range(1, max(max_epochs.values(), default=1)):
        again = [category for category, limit in max_epochs.items() if limit > epoch]
        repeated = repeated.concat(
            joined.where(column("category").is_in(again)).with_column("epoch", lit(epoch))
        )
    repeated = repeated.with_column("size", column("tokens") + 1)
    order = ("epoch", "place", "id")
    total = engine.running_sum(column("size"), partition=("category", "source"), order=order)
    return cut_to_quota(repeated.with_column("until", total)).collect()


def cut_to_quota(frame: Any) -> Any:
    """Keep the documents that begin before the quota ends and cut the last one there.

    A rest of one token cannot hold a document and its end; the document before gives it one of its own.
    """
    column, lit = engine.daft().col, engine.daft().lit
    when = engine.daft().functions.when
    left = (column("quota") - column("until") + column("size")).alias("left")
    frame = frame.with_column("left", left).where(column("left") > 0)
    take = (
        when(column("left") == 1, lit(2))
        .when(column("left") == column("size") + 1, column("size") - 1)
        .when(column("left") < column("size"), column("left"))
        .otherwise(column("size"))
    )
    frame = frame.with_column("take", take.cast(engine.daft().DataType.int64()))
    return frame.select("id", "document", "category", "source", "tokens", "epoch", "take")


def curriculum_order(chosen: Any, scores: Any, seed: str) -> Any:
    """Give every chosen document of stage 1 its position.

    Args:
        chosen: See ``choose``.
        scores: Frame (id, score) of the natural-language documents.
        seed: Key of the order inside the streams that stand apart.

    Returns:
        A frame sorted by ``position`` with ``along`` in [0, 1], ``stream`` and ``score`` added.
    """
    column, lit = engine.daft().col, engine.daft().lit
    when = engine.daft().functions.when
    apart = column("category").is_in(list(APART))
    frame = chosen.join(scores.select("id", "score"), on="id", how="left")
    frame = frame.with_column("stream", when(apart, column("category")).otherwise(lit(ORDERED)))
    frame = frame.with_column("rank", when(apart, lit(0.0)).otherwise(column("score").fill_null(0.0)))
    frame = frame.with_column("place", engine.keyed(column("document"), seed))
    until = engine.running_sum(column("take"), partition=("stream",), order=("rank", "place", "id", "epoch"))
    totals = chosen_totals(frame)
    frame = frame.with_column("until", until).join(totals, on="stream")
    middle = (column("until") * 2 - column("take")).cast(engine.daft().DataType.float64())
    frame = frame.with_column("along", middle / (column("total") * 2).cast(engine.daft().DataType.float64()))
    return numbered(frame, ["along", "stream", "id", "epoch"])


def shuffle_order(chosen: Any, seed: int) -> Any:
    """Give every chosen document of stage 2 its position in one global shuffle.

    Args:
        chosen: See ``choose``.
        seed: The recorded seed.

    Returns:
        A frame sorted by ``position``.
    """
    column = engine.daft().col
    name = engine.daft().functions.format("{}#{}", column("id"), column("epoch"))
    return numbered(
        chosen.with_column("place", engine.keyed(name, f"stage2:{seed}")), ["place", "id", "epoch"]
    )


def numbered(frame: Any, keys: list[str]) -> Any:
    """Sort by ``keys`` and number the rows."""
    window = engine.daft().Window().order_by(*keys)
    position = engine.daft().functions.row_number().over(window).cast(engine.daft().DataType.int64()) - 1
    return frame.with_column("position", position).sort("position").collect()


def chosen_totals(frame: Any) -> Any:
    """Return the tokens of each stream."""
    return frame.groupby("stream").agg(engine.daft().col("take").sum().alias("total"))


def share_error(order: Path) -> dict[str, int]:
    """Return by how many tokens the share of each stream is missed at most, over all stretches of an order.

    Args:
        order: A folder of ``curriculum_order``.

    Returns:
        Stream to tokens, rounded up: no stretch of whole documents holds more or fewer of the stream than its
        share of the stretch by more than that.
    """
    totals = {row["stream"]: row["total"] for row in engine.rows(chosen_totals(engine.read(order)))}
    every = sum(totals.values())
    given, done = dict.fromkeys(totals, 0), 0
    low, high = dict.fromkeys(totals, 0.0), dict.fromkeys(totals, 0.0)
    for batch in engine.batches(order, ("stream", "take"), size=65_536):
        streams, take = batch.column("stream").to_numpy(zero_copy_only=False), batch.column("take").to_numpy()
        until = done + np.cumsum(take)
        for name, total in totals.items():
            ours = given[name] + np.cumsum(np.where(streams == name, take, 0))
            ahead = ours - until * (total / every)
            low[name], high[name] = min(low[name], float(ahead.min())), max(high[name], float(ahead.max()))
            given[name] = int(ours[-1])
        done = int(until[-1])
    return {name: math.ceil(high[name] - low[name]) for name in sorted(totals)}
