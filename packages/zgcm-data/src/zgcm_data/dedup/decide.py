"""Which of several equal or nearly equal documents stays.

The survivor of a cluster is the document with the best decision (keep before review), then the most bytes,
then the smallest id. Two documents are near duplicates when they share an LSH band and their signatures
estimate a similarity of at least the threshold; inside a bucket every document is compared with its
smallest id, so the work grows linearly with the size of a bucket.
"""

from typing import Any

from zgcm_data import engine
from zgcm_data.dedup.clusters import connected_components
from zgcm_data.dedup.signatures import band_frames, similar
from zgcm_data.recipe import DedupRecipe

MOST_BYTES = 10**15
KEY_WIDTH = 17  # one digit for the decision, sixteen for the bytes


def decide_duplicates(signatures: Any, recipe: DedupRecipe) -> Any:
    """Decide for every document whether it stays.

    Args:
        signatures: A collected or stored frame, see ``signature_frame``.
        recipe: Bands, rows and threshold.

    Returns:
        A collected frame (id, kind, match, similarity): ``kind`` is ``""`` for a survivor, else
        ``"exact"`` or ``"near"`` with the id of the survivor.
    """
    column, lit = engine.daft().col, engine.daft().lit
    facts = signatures.select("id", "content_key", "bytes", "rank")
    exact = survivors(facts, "content_key").collect()
    copies = exact.where(column("id") != column("survivor"))
    copies = copies.select(
        "id", lit("exact").alias("kind"), column("survivor").alias("match"), lit(1.0).alias("similarity")
    ).collect()
    first = signatures.join(copies.select("id"), on="id", how="anti")
    near = near_matches(first, near_pairs(first, recipe), recipe)
    removed = copies.concat(near)
    kept = facts.select("id").join(removed.select("id"), on="id", how="anti")
    kept = kept.select("id", lit("").alias("kind"), lit("").alias("match"), lit(0.0).alias("similarity"))
    return follow(removed.concat(kept)).collect()


def near_pairs(frame: Any, recipe: DedupRecipe) -> Any:
    """Return the pairs (id, match) of near duplicates, each with ``match`` before ``id``, as a collected frame."""
    column = engine.daft().col
    found = []
    for bands in band_frames(frame, recipe, rows=recipe.rows, count=frame.count_rows()):
        bands = bands.collect()
        buckets = bands.groupby("band").agg(
            column("id").min().alias("match"), column("id").count().alias("size")
        )
        buckets = buckets.where(column("size") > 1).select("band", "match")
        pairs = bands.join(buckets, on="band").where(column("id") != column("match")).select("id", "match")
        found.append(pairs.distinct().collect())
    pairs = engine.joined(found).distinct().collect()
    return similar(pairs, frame, recipe, recipe.threshold).select("id", "match")


def near_matches(frame: Any, pairs: Any, recipe: DedupRecipe) -> Any:
    """Return (id, kind, match, similarity) of the documents that near deduplication removes."""
    column, lit = engine.daft().col, engine.daft().lit
    if pairs.count_rows() == 0:
        empty = frame.where(lit(False))
        return empty.select(
            "id", lit("near").alias("kind"), column("id").alias("match"), lit(0.0).alias("similarity")
        )
    members = frame.select("id", "bytes", "rank").join(connected_components(pairs), on="id")
    ranked = survivors(members, "cluster").where(column("id") != column("survivor"))
    matched = similar(ranked.select("id", column("survivor").alias("match")).collect(), frame, recipe, 0.0)
    return matched.select("id", lit("near").alias("kind"), "match", "similarity")


def survivors(frame: Any, group: str) -> Any:
    """Add the id of the survivor of each row's ``group``.

    The three keys of the rule are written one behind the other as text of fixed width, so that the survivor
    is a minimum; most groups have one row, for which a window would cost far more memory.
    """
    functions, column, lit = engine.daft().functions, engine.daft().col, engine.daft().lit
    text = engine.daft().DataType.string()
    size = functions.lpad((lit(MOST_BYTES) - column("bytes")).cast(text), KEY_WIDTH - 1, "0")
    frame = frame.with_column("key", column("rank").cast(text) + size + column("id"))
    groups = frame.groupby(group).agg(column("key").min().alias("best"), column("id").count().alias("rows"))
    groups = groups.where(column("rows") > 1)
    best = groups.select(group, functions.substr(column("best"), KEY_WIDTH).alias("best"))
    joined = frame.exclude("key").join(best, on=group, how="left")
    return joined.with_column("survivor", column("best").fill_null(column("id"))).exclude("best")


def follow(decisions: Any) -> Any:
    """Point exact copies of a document that near deduplication removed at the one that stays."""
    column = engine.daft().col
    final = decisions.where(column("kind") == "near")
    final = final.select(column("id").alias("match"), column("match").alias("last"))
    joined = decisions.join(final, on="match", how="left")
    match = column("last").fill_null(column("match")).alias("match")
    return joined.select("id", "kind", match, "similarity")
