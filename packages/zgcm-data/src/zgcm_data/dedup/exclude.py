"""Leave out of one set whatever another set holds, exactly or nearly, and name the match.

Used for the held-out sets against training, and for stage 1 against stage 2. It looks harder than
deduplication does: narrow bands of four hashes find a pair of similarity 0.5 with a probability above 0.8.
"""

from typing import Any

from zgcm_data import engine
from zgcm_data.dedup.signatures import SENSITIVE_ROWS, band_frame, similarity
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
    keys = reference.groupby("content_key").agg(column("id").min().alias("match"))
    exact = candidates.join(keys, on="content_key")
    exact = exact.select("id", lit("exact").alias("kind"), "match", lit(1.0).alias("similarity")).collect()
    rest = candidates.join(exact.select("id"), on="id", how="anti").collect()
    bands = band_frame(rest, recipe, rows=SENSITIVE_ROWS)
    known = band_frame(reference, recipe, rows=SENSITIVE_ROWS)
    known = known.groupby("band").agg(column("id").min().alias("match"))
    pairs = bands.join(known, on="band").select("id", "match").distinct()
    scored = similarity(pairs, candidates.concat(reference).distinct("id"), recipe)
    scored = scored.where(column("similarity") >= recipe.exclude_threshold)
    best = engine.daft().Window().partition_by("id").order_by("similarity", "match", desc=[True, False])
    scored = scored.with_column("place", engine.daft().functions.row_number().over(best))
    near = scored.where(column("place") == 1).select("id", lit("near").alias("kind"), "match", "similarity")
    return exact.concat(near).collect()
