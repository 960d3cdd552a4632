"""MinHash signatures, their LSH bands, and the similarity two signatures estimate.

Text is lowered and split at everything that is not a letter, mark or digit. A character of a script
without spaces (Han, Kana, Thai, Lao, Khmer, Myanmar) is a word of its own, so that n-grams of words are
n-grams of characters there.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zgcm_data import engine
from zgcm_data.recipe import DedupRecipe

UNSPACED = r"([\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}])"
NOT_WORD = r"[^\p{L}\p{M}\p{N}]+"
SENSITIVE_ROWS = 4
SEED = 1
ROWS_AT_ONCE = 500_000
PAIRS_AT_ONCE = 200_000


def signature_frame(frame: Any, recipe: DedupRecipe) -> Any:
    """Return (id, content_key, bytes, rank, shingles, signature) of every document of ``frame``.

    Args:
        frame: Columns ``id``, ``text``, ``content_key``, ``bytes``, ``decision``.
        recipe: Number of hashes (bands * rows) and n-gram size.

    Returns:
        A lazy frame; ``rank`` is 0 for kept and 1 for review documents.
    """
    functions, column = engine.daft().functions, engine.daft().col
    words = functions.regexp_replace(functions.lower(column("text")), UNSPACED, " ${1} ")
    words = functions.strip(functions.regexp_replace(words, NOT_WORD, " "))
    count = functions.length(words) - functions.length(functions.replace(words, " ", "")) + 1
    kind = engine.daft().DataType
    return (
        frame.with_column("words", words)
        .with_column("shingles", (count.cast(kind.int64()) - (recipe.ngram - 1)))
        .with_column("rank", (column("decision") != "keep").cast(kind.int64()))
        .with_column("signature", minhash(recipe))
        .select("id", "content_key", "bytes", "rank", "shingles", "signature")
    )


def minhash(recipe: DedupRecipe) -> Any:
    """Return Daft's MinHash expression over the column ``words``."""
    return engine.daft().functions.minhash(
        engine.daft().col("words"), num_hashes=recipe.bands * recipe.rows, ngram_size=recipe.ngram, seed=SEED
    )


def band_frames(signatures: Any, recipe: DedupRecipe, *, rows: int, count: int) -> Iterator[Any]:
    """Yield (id, band) frames, one row for every LSH band of every document long enough.

    Bands are computed a few at a time, so that no frame holds many more than ``ROWS_AT_ONCE`` rows.

    Args:
        signatures: See ``signature_frame``.
        recipe: Shape of the signatures and smallest number of shingles.
        rows: Hash values per band; fewer find more pairs.
        count: Documents, roughly.

    Yields:
        Lazy frames; ``band`` is a 64-bit number that includes the band's position.
    """
    column = engine.daft().col
    total = recipe.bands * recipe.rows // rows
    step = min(total, max(1, ROWS_AT_ONCE // max(count, 1)))
    long_enough = signatures.where(column("shingles") >= recipe.min_shingles)
    for first in range(0, total, step):
        chosen = range(first, min(first + step, total))
        yield long_enough.select("id", bands_of(recipe, rows, chosen).alias("band")).explode("band")


def bands_of(recipe: DedupRecipe, rows: int, chosen: range) -> Any:
    """Return the expression of the keys of some bands of a signature."""
    kind = engine.daft().DataType
    hashes = recipe.bands * recipe.rows

    def run(signature: Any) -> Any:
        keys = band_keys(matrix(signature, hashes), rows)[:, chosen.start : chosen.stop]
        return engine.arrow().array(list(keys), type=engine.arrow().list_(engine.arrow().uint64()))

    return engine.function(kind.list(kind.uint64()))(run)(engine.daft().col("signature"))


def band_keys(signature: NDArray[np.uint32], rows: int) -> NDArray[np.uint64]:
    """Mix every ``rows`` hash values and their band's position into one 64-bit key.

    Args:
        signature: [documents, hashes]; hashes beyond the last whole band are not used.
        rows: Hash values per band.

    Returns:
        [documents, bands].
    """
    count = signature.shape[1] // rows
    values = signature[:, : count * rows].reshape(len(signature), count, rows).astype(np.uint64)
    keys = np.broadcast_to(np.arange(1, count + 1, dtype=np.uint64), values.shape[:2]).copy()
    for position in range(rows):
        keys = (keys ^ values[:, :, position]) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    return keys


def similar(pairs: Any, signatures: Any, recipe: DedupRecipe, at_least: float) -> Any:
    """Keep the pairs (id, match) that are similar: by the part of equal hash values, an estimate of Jaccard.

    Args:
        pairs: A collected frame with ``id`` and ``match``.
        signatures: See ``signature_frame``.
        recipe: Shape of the signatures.
        at_least: Smallest similarity to keep.

    Returns:
        A collected frame (id, match, similarity).
    """
    column = engine.daft().col
    parts = pairs.count_rows() // PAIRS_AT_ONCE + 1
    kept = []
    for number in range(parts):
        part = pairs
        if parts > 1:
            part = pairs.where(engine.daft().functions.hash(column("id")) % parts == number).collect()
        kept.append(scored(part, signatures, recipe).where(column("similarity") >= at_least).collect())
    return engine.joined(kept)


def scored(pairs: Any, signatures: Any, recipe: DedupRecipe) -> Any:
    """Add the similarity to a frame of pairs.

    Signatures are joined by the number of their row and compared outside the frame: a join that carries
    them twice takes many times as long.
    """
    column, pyarrow = engine.daft().col, engine.arrow()
    named = pairs.select("id").concat(pairs.select(column("match").alias("id"))).distinct().collect()
    needed = signatures.select("id", "signature").join(named, on="id", how="semi").collect().to_arrow()
    values = matrix_of(needed.column("signature"), recipe.bands * recipe.rows)
    rows = pyarrow.table({"id": needed.column("id"), "row": np.arange(len(values))})
    places = engine.daft().from_arrow(rows)
    left = places.select(column("id"), column("row").alias("left"))
    right = places.select(column("id").alias("match"), column("row").alias("right"))
    found = pairs.select("id", "match").join(left, on="id").join(right, on="match").collect().to_arrow()
    one, two = (found.column(name).to_numpy() for name in ("left", "right"))
    similarity = np.mean(values[one] == values[two], axis=1) if len(one) else np.zeros(0)
    columns = {name: found.column(name) for name in ("id", "match")}
    return engine.daft().from_arrow(pyarrow.table({**columns, "similarity": similarity}))


def matrix(series: Any, hashes: int) -> NDArray[np.uint32]:
    """Return a Daft column of signatures as an array [documents, hashes]."""
    return matrix_of(series.to_arrow(), hashes)


def matrix_of(array: Any, hashes: int) -> NDArray[np.uint32]:
    """Return an Arrow column of signatures as an array [documents, hashes]."""
    array = array.combine_chunks() if hasattr(array, "combine_chunks") else array
    values: NDArray[np.uint32] = array.flatten().to_numpy(zero_copy_only=False).astype(np.uint32)
    return values.reshape(-1, hashes)
