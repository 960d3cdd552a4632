"""Find training documents that hold passages of evaluation texts, and name the match.

A document is contaminated when it shares at least ``min_shared`` different n-grams of words with one
evaluation text (13 words by default; in scripts without spaces a character is a word). An evaluation text
shorter than that counts by all of its words, from five on; shorter ones match too much and are only counted.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zgcm_data import engine
from zgcm_data.dedup.signatures import NOT_WORD, UNSPACED

SHORTEST = 5
Keys = NDArray[np.uint64]


@dataclass
class PassageIndex:
    """The n-grams of evaluation texts, by their length in words.

    Args:
        ngram: Words in an n-gram.
        owners: Length to key to the smallest id of a text that holds the n-gram.
        too_short: Evaluation texts of fewer than five words.
    """

    ngram: int
    owners: dict[int, dict[int, str]] = field(default_factory=dict)
    too_short: int = 0

    def add(self, name: str, words: Sequence[str]) -> None:
        """Add one evaluation text.

        Args:
            name: Its id.
            words: Its words in lower case.
        """
        length = min(self.ngram, len(words))
        if length < SHORTEST:
            self.too_short += 1
            return
        known = self.owners.setdefault(length, {})
        for key in ngram_keys(words, length).tolist():
            known[key] = min(name, known.get(key, name))

    def match(self, words: Sequence[str]) -> tuple[str, int]:
        """Find the evaluation text that shares most n-grams with a document.

        Args:
            words: The document's words in lower case.

        Returns:
            Its id (empty for none; the smallest of equals) and the number of different n-grams shared.
        """
        shared: dict[str, int] = {}
        for length, known in self.owners.items():
            for key in set(ngram_keys(words, length).tolist()) & known.keys():
                shared[known[key]] = shared.get(known[key], 0) + 1
        return min(shared.items(), key=lambda item: (-item[1], item[0]), default=("", 0))


def ngram_keys(words: Sequence[str], length: int) -> Keys:
    """Hash every run of ``length`` words.

    Args:
        words: Words.
        length: Words in a run.

    Returns:
        One 64-bit key per run; none if there are too few words.
    """
    values = np.array([word_key(word) for word in words], dtype=np.uint64)
    count = len(words) - length + 1
    if count < 1:
        return values[:0]
    keys = np.full(count, length, dtype=np.uint64)
    for position in range(length):
        keys = (keys ^ values[position : position + count]) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    return keys


@lru_cache(maxsize=1 << 18)
def word_key(word: str) -> int:
    """Return a 64-bit hash of a word that is the same in every process."""
    return int.from_bytes(
        hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
    )


def passage_index(texts: Mapping[str, str], ngram: int) -> PassageIndex:
    """Index evaluation texts.

    Args:
        texts: Id to text.
        ngram: Words in an n-gram.

    Returns:
        The index.
    """
    index = PassageIndex(ngram)
    columns = {"id": list(texts), "text": list(texts.values())}
    strings = engine.arrow().schema([(name, engine.arrow().large_string()) for name in columns])
    frame = engine.daft().from_arrow(engine.arrow().table(columns, schema=strings))
    for row in engine.rows(frame.select("id", words_of("text").alias("words"))):
        index.add(row["id"], row["words"].split())
    return index


def contaminated(frame: Any, index: PassageIndex, min_shared: int) -> Any:
    """Find the documents of a frame that hold passages of evaluation texts.

    Args:
        frame: Columns ``id`` and ``text``.
        index: The evaluation texts.
        min_shared: Different n-grams from which a document counts as contaminated.

    Returns:
        A lazy frame (id, match, shared).
    """
    kind, column = engine.daft().DataType, engine.daft().col

    def run(words: Any) -> list[dict[str, Any]]:
        found = (index.match(text.split()) for text in words.to_pylist())
        return [{"match": name, "shared": shared} for name, shared in found]

    result = kind.struct({"match": kind.string(), "shared": kind.int64()})
    frame = frame.select("id", words_of("text").alias("words"))
    frame = frame.with_column("found", engine.function(result, batch=256)(run)(column("words")))
    frame = frame.select(
        "id", column("found").get("match").alias("match"), column("found").get("shared").alias("shared")
    )
    return frame.where(column("shared") >= min_shared)


def words_of(name: str) -> Any:
    """Return the expression of a text column's words, joined by single spaces; see ``signatures``."""
    functions, column = engine.daft().functions, engine.daft().col
    words = functions.regexp_replace(functions.lower(column(name)), UNSPACED, " ${1} ")
    return functions.strip(functions.regexp_replace(words, NOT_WORD, " "))
