"""MinHash signatures, their LSH bands, and the similarity two signatures estimate.

Text is lowered and split at everything that is not a letter, mark or digit. A character of a script
without spaces (Han, Kana, Thai, Lao, Khmer, Myanmar) is a word of its own, so that n-grams of words are
n-grams of characters there.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zgcm_data import engine
from zgcm_data.recipe import DedupRecipe

UNSPACED = r"([\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}])"
NOT_WORD = r"[^\p{L}\p{M}\p{N}]+"
SENSITIVE_ROWS = 4
SEED = 1


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


def band_frame(signatures: Any, recipe: DedupRecipe, *, rows: int) -> Any:
    """Return (id, band): one row for every LSH band of every document long enough.

    Args:
        signatures: See ``signature_frame``.
        recipe: Shape of the signatures and smallest number of shingles.
        rows: Hash values per band; fewer find more pairs.

    Returns:
        A lazy frame; ``band`` is a 64-bit number that includes the band's position.
    """
    kind, column = engine.daft().DataType, engine.daft().col
    hashes = recipe.bands * recipe.rows

    def run(signature: Any) -> Any:
        return engine.arrow().array(list(band_keys(matrix(signature, hashes), rows)))

    bands = engine.function(kind.list(kind.uint64()))(run)(column("signature"))
    long_enough = signatures.where(column("shingles") >= recipe.min_shingles)
    return long_enough.select("id", bands.alias("band")).explode("band")


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


def similarity(pairs: Any, signatures: Any, recipe: DedupRecipe) -> Any:
    """Add to (id, match) the part of equal hash values, which estimates their Jaccard similarity.

    Args:
        pairs: A frame with ``id`` and ``match``.
        signatures: See ``signature_frame``.
        recipe: Shape of the signatures.

    Returns:
        The frame with ``similarity`` in [0, 1].
    """
    kind, column = engine.daft().DataType, engine.daft().col
    hashes = recipe.bands * recipe.rows
    left = signatures.select(column("id"), column("signature").alias("left"))
    right = signatures.select(column("id").alias("match"), column("signature").alias("right"))

    def run(first: Any, second: Any) -> Any:
        return np.mean(matrix(first, hashes) == matrix(second, hashes), axis=1)

    joined = pairs.join(left, on="id").join(right, on="match")
    score = engine.function(kind.float64())(run)(column("left"), column("right"))
    return joined.with_column("similarity", score).exclude("left", "right")


def matrix(series: Any, hashes: int) -> NDArray[np.uint32]:
    """Return a column of signatures as an array [documents, hashes]."""
    array = series.to_arrow()
    array = array.combine_chunks() if hasattr(array, "combine_chunks") else array
    values: NDArray[np.uint32] = array.flatten().to_numpy(zero_copy_only=False).astype(np.uint32)
    return values.reshape(-1, hashes)
