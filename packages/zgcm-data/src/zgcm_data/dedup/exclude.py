"""Leave out of one set whatever another set holds, exactly or nearly, and name the match.

Used for the held-out sets against training, and for stage 1 against stage 2. It looks harder than
deduplication does: narrow bands of four hashes find a pair of similarity 0.5 with a probability above 0.8.
"""

from typing import Any

from zgcm_data import engine
from zgcm_data.dedup.signatures import SENSITIVE_ROWS, band_frames, similar
from zgcm_data.recipe import DedupRecipe


def exclude(candidates: Any, reference: Any, recipe: DedupRecipe) -> Any:
    """Find the candidates that the reference holds or nearly holds.

    Args:
        candidates: Signatures of the documents that may have to go, see ``signature_frame``.
        reference: Signatures of the documents that stay as they are.
        recipe: ``exclude_threshold`` and the shape of the signatures.

    Returns:
        A collected frame (id, kind, match, similarity), one row per candidate to leave out.
    """
    column, lit = engine.daft().col, engine.daft().lit
    keys = reference.groupby("content_key").agg(column("id").min().alias("match")).collect()
    exact = candidates.select("id", "content_key").join(keys, on="content_key")
    exact = exact.select("id", lit("exact").alias("kind"), "match", lit(1.0).alias("similarity")).collect()
    rest = candidates.join(exact.select("id"), on="id", how="anti")
    scored = near_matches(rest, reference, recipe)
    best = engine.daft().Window().partition_by("id").order_by("similarity", "match", desc=[True, False])
    scored = scored.with_column("place", engine.daft().functions.row_number().over(best))
    near = scored.where(column("place") == 1).select("id", lit("near").alias("kind"), "match", "similarity")
    return exact.concat(near).collect()


def near_matches(rest: Any, reference: Any, recipe: DedupRecipe) -> Any:
    """Return (id, match, similarity) of every near match, found in a few bands at a time."""
    column = engine.daft().col
    count = rest.count_rows() + reference.count_rows()
    every = rest.concat(reference)
    found = []
    ours = band_frames(rest, recipe, rows=SENSITIVE_ROWS, count=count)
    theirs = band_frames(reference, recipe, rows=SENSITIVE_ROWS, count=count)
    for bands, known in zip(ours, theirs, strict=True):
        first = known.groupby("band").agg(column("id").min().alias("match"))
        pairs = bands.join(first, on="band").select("id", "match").distinct().collect()
        found.append(similar(pairs, every, recipe, recipe.exclude_threshold))
    return engine.joined(found).distinct().collect()
