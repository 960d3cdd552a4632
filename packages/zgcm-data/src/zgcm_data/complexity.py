"""The published lexical-complexity metric that orders general text in stage 1.

Words are runs of letters in lower case; a Han or Kana character is a word of its own. For a document with
words w_1 ... w_n, against a frozen frequency table of the corpus (count c(w), N words, V different ones):

| part | formula | weight |
|---|---|---|
| rarity | mean of -log10((c(w_i) + 1) / (N + V)) | 0.4 |
| word length | mean letters of w_i | 0.2 |
| sentence length | ln(n / sentences), sentences ending at . ! ? and their full-width forms or at an empty line | 0.2 |
| diversity | mean part of different words in consecutive segments of 50 words | 0.2 |

Each part is centred on its median over the corpus and divided by its interquartile range, both frozen with
the table; the score is their weighted sum, rounded to 1e-9. Every part is a mean, so the score does not grow
with length. A document of fewer than 50 words gets the median diversity, one without words no score at all.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zgcm_data import engine

METRIC = "zgcm-lexical-complexity/1"
PARTS = ("rarity", "word_length", "sentence_length", "diversity")
WEIGHTS = {"rarity": 0.4, "word_length": 0.2, "sentence_length": 0.2, "diversity": 0.2}
SEGMENT = 50
PAIRS_AT_ONCE = 6_000_000
WORD = r"[\p{Han}\p{Hiragana}\p{Katakana}]|[\p{L}--[\p{Han}\p{Hiragana}\p{Katakana}]]+"
SENTENCE_END = r"[.!?](?:\s|$)|[。！？]|\n\s*\n"


@dataclass(frozen=True)
class Scale:
    """The frozen numbers that turn parts into a score.

    Args:
        total: Words in the corpus, N.
        types: Different words, V.
        center: Median of each part.
        spread: Interquartile range of each part.
    """

    total: int
    types: int
    center: Mapping[str, float]
    spread: Mapping[str, float]

    def score(self, parts: Mapping[str, float | None]) -> float | None:
        """Return the weighted sum of the centred parts, ``None`` for a document without words.

        Args:
            parts: What ``measure`` returned.

        Returns:
            The lexical complexity; 0 is the middle of the corpus.
        """
        if parts["rarity"] is None:
            return None
        total = 0.0
        for name in PARTS:
            value = parts[name]
            if value is not None:
                total += WEIGHTS[name] * (value - self.center[name]) / self.spread[name]
        return round(total, 9)


def describe() -> dict[str, object]:
    """Return the metric as data, for reports and manifests.

    Returns:
        Name, parts, weights and segment length.
    """
    return {"metric": METRIC, "parts": list(PARTS), "weights": dict(WEIGHTS), "segment": SEGMENT}


def measure(
    words: Sequence[str], sentences: int, counts: Mapping[str, int], total: int, types: int
) -> dict[str, float | None]:
    """Measure the four parts of one document.

    Args:
        words: Its words in lower case.
        sentences: Sentence ends found in it.
        counts: Frequency table.
        total: Words in the table, N.
        types: Different words in the table, V.

    Returns:
        Part name to value; ``None`` where it cannot be measured.
    """
    if not words:
        return dict.fromkeys(PARTS)
    n = len(words)
    get = counts.get
    seen = math.fsum(math.log10(get(word, 0) + 1) for word in words) / n
    segments = [len(set(words[start : start + SEGMENT])) for start in range(0, n - SEGMENT + 1, SEGMENT)]
    return {
        "rarity": math.log10(total + types) - seen,
        "word_length": sum(map(len, words)) / n,
        "sentence_length": math.log(n / max(sentences, 1)),
        "diversity": sum(segments) / (SEGMENT * len(segments)) if segments else None,
    }


def words_frame(frame: Any) -> Any:
    """Return (id, words, sentences) of the texts of ``frame``, as a Daft plan."""
    functions, column = engine.daft().functions, engine.daft().col
    words = functions.regexp_extract_all(functions.lower(column("text")), WORD)
    ends = functions.regexp_count(column("text"), SENTENCE_END)
    return frame.select("id", words.alias("words"), ends.alias("sentences"))


def frequency_table(frame: Any, scratch: Path, *, most: int = PAIRS_AT_ONCE) -> dict[str, int]:
    """Count the words of ``frame`` (see ``words_frame``).

    The counts of single batches go to disk first: a part of the words is then summed at a time, so that memory
    grows with the number of different words and not with the corpus.

    Args:
        frame: A lazy frame.
        scratch: A folder for these counts, removed at the end.
        most: Pairs of a word and its count in one batch that are summed at a time.

    Returns:
        Word to count.
    """
    column = engine.daft().col
    engine.write(counted_words(frame), scratch)
    parts = -(-engine.read(scratch).count_rows() // most)
    result: dict[str, int] = {}
    for part in range(parts):
        pairs = engine.read(scratch).where(column("word").hash() % parts == part)
        table = pairs.groupby("word").agg(column("count").sum()).to_pydict()
        result.update(zip(table["word"], table["count"], strict=True))
    shutil.rmtree(scratch)
    return result


def counted_words(frame: Any) -> Any:
    """Return (word, count), a word once for each batch of documents that holds it, as a Daft plan."""
    kind, column = engine.daft().DataType, engine.daft().col
    pair = kind.struct({"word": kind.string(), "count": kind.int64()})
    counts = engine.function(kind.list(pair), batch=4096)(counted_together)(column("words"))
    pairs = frame.select(counts.alias("pair")).explode("pair").where(column("pair").not_null())
    return pairs.select(*(column("pair").get(name).alias(name) for name in ("word", "count")))


def counted_together(words: Any) -> Any:
    """Count the words of a batch of documents, so that the words themselves need not be kept until the end.

    Args:
        words: A Daft column of lists of words.

    Returns:
        An Arrow column of lists of (word, count): all pairs in the first row, none in the others.
    """
    pyarrow = engine.arrow()
    found = pyarrow.compute.value_counts(words.to_arrow().flatten())
    pairs = pyarrow.StructArray.from_arrays([found.field("values"), found.field("counts")], ["word", "count"])
    offsets = np.full(len(words) + 1, len(pairs), np.int64)
    offsets[0] = 0
    return pyarrow.LargeListArray.from_arrays(offsets, pairs)


def score_frame(frame: Any, counts: Mapping[str, int], out: Path) -> Scale:
    """Score every document of ``frame``, write (id, parts, score) to ``out``, and return the frozen scale.

    Args:
        frame: See ``words_frame``.
        counts: The frozen frequency table.
        out: Folder for the result.

    Returns:
        The scale, for scoring other texts the same way.
    """
    kind, column = engine.daft().DataType, engine.daft().col
    total, types = sum(counts.values()), len(counts)

    def run(words: Any, sentences: Any) -> list[dict[str, float | None]]:
        pairs = zip(words.to_pylist(), sentences.to_pylist(), strict=True)
        return [measure(item or [], number, counts, total, types) for item, number in pairs]

    parts = engine.function(kind.struct(dict.fromkeys(PARTS, kind.float64())), batch=512)(run)
    measured = frame.select("id", parts(column("words"), column("sentences")).alias("parts")).collect()
    scale = freeze(measured.select(*(column("parts").get(name).alias(name) for name in PARTS)), total, types)

    def grade(values: Any) -> list[float | None]:
        return [scale.score(item) for item in values.to_pylist()]

    score = engine.function(kind.float64())(grade)(column("parts"))
    fields = [column("parts").get(name).alias(name) for name in PARTS]
    engine.write(measured.select("id", *fields, score.alias("score")), out)
    return scale


def freeze(parts: Any, total: int, types: int) -> Scale:
    """Take median and interquartile range of each part over the corpus."""
    center, spread = {}, {}
    for name, values in parts.to_pydict().items():
        found = np.sort(np.array([item for item in values if item is not None], dtype=np.float64))
        low, middle, high = np.quantile(found, [0.25, 0.5, 0.75]) if len(found) else (0.0, 0.0, 0.0)
        center[name] = float(middle)
        spread[name] = float(high - low) or 1.0
    return Scale(total, types, center, spread)


def save_scale(scale: Scale, path: Path) -> None:
    """Write the frozen scale as JSON."""
    data = {
        **describe(),
        "words": scale.total,
        "types": scale.types,
        "center": scale.center,
        "spread": scale.spread,
    }
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
