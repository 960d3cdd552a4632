"""Loss masks, document ids and exact counts, all from the docs tables of rows.

Attention (what can be seen) and loss (what is learned) are separate: ``document_ids`` is for the first,
``loss_mask`` for the second. A target belongs to the document of the token that is predicted.

* Position t of a row has the input ``tokens[t]`` and the target ``tokens[t + 1]``.
* Padding is never a target. When documents are isolated, neither is the first token of a document, because
  nothing of its own document comes before it.
* A document counts where its end-of-document id is a target: once, whatever the packing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zgcm_data.rows import PADDING_SOURCE, SOURCE, START, Integers, Row


@dataclass(frozen=True, slots=True)
class Segments:
    """Stretches of one document (or of padding) in a block of R rows, K in all, ordered by row and start.

    Attributes:
        rows: R.
        width: T + 1.
        row: int64 ``[K]``, row of the block.
        number: int64 ``[K]``, 0 for the first stretch of its row.
        start: int64 ``[K]``, first position.
        end: int64 ``[K]``, one past the last position.
        source: int64 ``[K]``, source id, or -1 for padding.
        bounds: int64 ``[R+1]``, number of the first stretch of each row, and K.
        padding: bool ``[K]``, where the source is -1.
        padded: whether there is any padding.
    """

    rows: int
    width: int
    row: Integers
    number: Integers
    start: Integers
    end: Integers
    source: Integers
    bounds: Integers
    padding: npt.NDArray[np.bool_]
    padded: bool

    @classmethod
    def of(cls, docs: Integers, per_row: Integers, width: int) -> "Segments":
        """Build from the docs tables of the rows, one after the other.

        Args:
            docs: int64 ``[K, 4]``.
            per_row: int64 ``[R]``, entries of each row.
            width: T + 1.
        """
        bounds = np.zeros(len(per_row) + 1, np.int64)
        after = np.cumsum(per_row, out=bounds[1:])
        row = np.repeat(np.arange(len(per_row)), per_row)
        start = np.ascontiguousarray(docs[:, START])
        end = np.empty_like(start)
        end[:-1] = start[1:]
        end[after - 1] = width
        number = np.arange(len(docs)) - (after - per_row)[row]
        source = np.ascontiguousarray(docs[:, SOURCE])
        padding = source == PADDING_SOURCE
        return cls(len(per_row), width, row, number, start, end, source, bounds, padding, bool(padding.any()))

    def first_fault(self, sources: int) -> int | None:
        """Return the first row of the block whose docs table cannot be true, or None."""
        bad = (self.end <= self.start) | ((self.number == 0) & (self.start != 0))
        bad |= (self.source < PADDING_SOURCE) | (self.source >= sources)
        return int(self.row[np.argmax(bad)]) if bool(bad.any()) else None


_NONE = np.empty(0, np.int64)


class RowFields:
    """Document ids and loss masks of a block of rows, made for a few rows at a time.

    Args:
        segments: the rows.
        isolate: leave the first target of each document out of the loss.
    """

    def __init__(self, segments: Segments, *, isolate: bool) -> None:
        self._inputs = segments.width - 1
        ends = np.minimum(segments.end, self._inputs)
        self._lengths = ends - np.minimum(segments.start, self._inputs)
        self._ids = np.where(segments.padding, -1, segments.number) if segments.padded else segments.number
        self._bounds = segments.bounds
        self._excluded = _first_targets(segments) if isolate else _NONE
        self._padded = _padded_targets(segments) if segments.padded else _NONE.reshape(0, 3)

    def document_ids(self, first: int, stop: int) -> Integers:
        """Return int64 ``[stop - first, T]``: 0, 1, 2, ... for the documents of each row, -1 for padding."""
        part = slice(self._bounds[first], self._bounds[stop])
        return np.repeat(self._ids[part], self._lengths[part]).reshape(stop - first, self._inputs)

    def loss_mask(self, first: int, stop: int) -> npt.NDArray[np.bool_]:
        """Return bool ``[stop - first, T]``, true where the target counts in the loss."""
        mask = np.ones((stop - first, self._inputs), np.bool_)
        if len(self._excluded):
            low, high = np.searchsorted(self._excluded, [first * self._inputs, stop * self._inputs])
            mask.reshape(-1)[self._excluded[low:high] - first * self._inputs] = False
        if len(self._padded):
            low, high = np.searchsorted(self._padded[:, 0], [first, stop])
            for row, start, end in self._padded[low:high].tolist():
                mask[row - first, start:end] = False
        return mask


def _first_targets(segments: Segments) -> Integers:
    """Return the places of documents' first targets in the block's mask, flat and ascending."""
    later = segments.start > 0
    return np.asarray(segments.row[later] * (segments.width - 1) + segments.start[later] - 1)


def _padded_targets(segments: Segments) -> Integers:
    """Return row, first and one past the last target of each padded stretch, int64 ``[p, 3]``."""
    places = (segments.row, np.maximum(segments.start, 1) - 1, segments.end - 1)
    return np.stack([place[segments.padding] for place in places], axis=1)


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """Exact counts per group of rows and source, each int64 ``[groups, S]``."""

    tokens: Integers
    loss_tokens: Integers
    documents: Integers
    rows: Integers


def count_sources(
    segments: Segments, ended: npt.NDArray[np.bool_], group_rows: int, sources: int, *, isolate: bool
) -> SourceCounts:
    """Count targets, loss targets, documents and rows of each source.

    Args:
        segments: the rows.
        ended: bool ``[R]``, whether the last token of the row ends its document.
        group_rows: consecutive rows that are counted together, such as a micro batch.
        sources: S.
        isolate: whether the first target of each document is left out of the loss.

    Returns:
        Counts for ``R // group_rows`` groups. ``rows`` counts the rows in which a source has a target.
    """
    groups = segments.rows // group_rows
    row, source, start, end = (segments.row, segments.source, segments.start, segments.end)
    if segments.padded:
        row, source, start, end = (column[~segments.padding] for column in (row, source, start, end))
    targets = end - np.maximum(start, 1)
    finished = (end > 1) & ((end < segments.width) | ended[row])
    key = (np.arange(segments.rows) // group_rows * sources)[row] + source
    present = np.zeros((segments.rows, sources), np.bool_)
    held = targets > 0
    present[row[held], source[held]] = True

    def total(keys: Integers, weights: npt.NDArray[np.generic] | None = None) -> Integers:
        sums = np.bincount(keys, weights, groups * sources)
        return sums.astype(np.int64).reshape(groups, sources)

    tokens = total(key, targets)
    return SourceCounts(
        tokens=tokens,
        loss_tokens=tokens - total(key[start > 0]) if isolate else tokens,
        documents=total(key[finished]),
        rows=present.reshape(groups, group_rows, sources).sum(axis=1, dtype=np.int64),
    )


def count_row(row: Row, eos_id: int, counts: Integers) -> None:
    """Add the documents and tokens of one row to ``counts``, int64 ``[2, S]``."""
    segments = Segments.of(row.docs, np.array([len(row.docs)]), len(row.tokens))
    last = np.array([row.tokens[-1] == eos_id])
    found = count_sources(segments, last, 1, counts.shape[1], isolate=False)
    counts[0] += found.documents[0]
    counts[1] += found.tokens[0]
