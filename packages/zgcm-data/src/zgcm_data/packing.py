"""Cut tokenized documents into rows of T + 1 token ids.

Both ways put one end-of-document id after every document, and both make every token a target exactly once
apart from the first token of a row that continues nothing.

* ``concatenate`` joins all documents to one stream and cuts it every T tokens; consecutive rows overlap by
  one token. What is left after the last full row is dropped and counted.
* ``best_fit`` keeps documents whole: each goes into the open row with the least room that still holds it.
  A document longer than a row is cut into pieces that overlap by one token; its last piece opens a row, so
  that the token it shares with the piece before is never a target twice. Free room is padding.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from zgcm_data.rows import PADDING_SOURCE, Integers, Row, TokenizedDocument, Tokens

OPEN_ROWS = 256
"""Rows that ``best_fit`` keeps open; a document lands at most this many rows away from its place."""


@dataclass
class PackingStats:
    """What packing did, counted exactly.

    Attributes:
        documents: documents read.
        tokens: their tokens, end-of-document ids included.
        rows: rows made.
        dropped_tokens: tokens in no row (the rest of the last row of ``concatenate``).
        padding_tokens: positions filled with padding (``best_fit``).
        split_documents: documents longer than a row (``best_fit``).
    """

    documents: int = 0
    tokens: int = 0
    rows: int = 0
    dropped_tokens: int = 0
    padding_tokens: int = 0
    split_documents: int = 0


def concatenate(
    documents: Iterable[TokenizedDocument],
    sequence_length: int,
    eos_id: int,
    *,
    stats: PackingStats | None = None,
) -> Iterator[Row]:
    """Join documents with one end-of-document id after each and cut every ``sequence_length`` tokens.

    Args:
        documents: in the order in which they are to be learned.
        sequence_length: T, inputs per row.
        eos_id: the end-of-document id.
        stats: filled with the counts, final once the iterator is used up.

    Returns:
        An iterator of rows; row i + 1 starts with the last token of row i.

    Raises:
        ValueError: a document is empty or already holds ``eos_id``, or T is below 1.
    """
    counts = stats if stats is not None else PackingStats()
    width = _width(sequence_length)
    buffer, fill, entries = np.empty(width, np.uint32), 0, list[tuple[int, int, int, int]]()
    for document in documents:
        tokens, used = _terminated(document, eos_id, counts), 0
        identity = (document.source, document.ordinal, document.epoch)
        entries.append((fill, *identity))
        while used < len(tokens):
            take = min(width - fill, len(tokens) - used)
            buffer[fill : fill + take] = tokens[used : used + take]
            fill, used = fill + take, used + take
            if fill == width:
                yield _row(buffer.copy(), entries, counts)
                buffer[0], fill, entries = buffer[-1], 1, [(0, *identity)]
    counts.dropped_tokens = fill - 1 if counts.rows else fill


def _width(sequence_length: int) -> int:
    if sequence_length < 1:
        raise ValueError(
            f"sequence_length is {sequence_length}; a row needs at least one input, so use 1 or more"
        )
    return sequence_length + 1


def _terminated(document: TokenizedDocument, eos_id: int, counts: PackingStats) -> Tokens:
    tokens = np.asarray(document.tokens, dtype=np.uint32)
    name = f"document {document.ordinal} of source {document.source}"
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError(f"{name} has shape {list(tokens.shape)}; leave out documents without tokens")
    if bool((tokens == eos_id).any()):
        raise ValueError(
            f"{name} already holds the end-of-document id {eos_id}; packing adds it, so tokenize without it"
        )
    counts.documents += 1
    counts.tokens += len(tokens) + 1
    return np.append(tokens, np.uint32(eos_id))


def _row(tokens: Tokens, entries: list[tuple[int, int, int, int]], counts: PackingStats) -> Row:
    counts.rows += 1
    return Row(tokens, np.array(entries, dtype=np.int64).reshape(-1, 4))


@dataclass
class _OpenRow:
    """A row that still has room: its pieces and who they belong to."""

    age: int
    room: int
    pieces: list[Tokens] = field(default_factory=list)
    entries: list[tuple[int, int, int, int]] = field(default_factory=list)

    def add(self, tokens: Tokens, identity: tuple[int, int, int], width: int) -> None:
        self.entries.append((width - self.room, *identity))
        self.pieces.append(tokens)
        self.room -= len(tokens)

    def close(self, pad_id: int, width: int, counts: PackingStats) -> Row:
        counts.padding_tokens += self.room
        if self.room:
            self.add(np.full(self.room, pad_id, np.uint32), (PADDING_SOURCE, -1, 0), width)
        return _row(np.concatenate(self.pieces), self.entries, counts)


class _OpenRows:
    """The open rows by age and by room, so that the tightest fit is found by bisection."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._rows: dict[int, _OpenRow] = {}
        self._by_room: list[tuple[int, int]] = []
        self._made = 0

    def __len__(self) -> int:
        return len(self._rows)

    def new(self) -> _OpenRow:
        self._made += 1
        return _OpenRow(self._made, self._width)

    def take(self, needed: int) -> _OpenRow | None:
        """Remove and return the row with the least room that is enough, the oldest of equals."""
        place = bisect_left(self._by_room, (needed, -1))
        if place == len(self._by_room):
            return None
        return self._rows.pop(self._by_room.pop(place)[1])

    def put(self, row: _OpenRow) -> None:
        self._rows[row.age] = row
        insort(self._by_room, (row.room, row.age))

    def oldest(self) -> _OpenRow:
        row = self._rows.pop(min(self._rows))
        self._by_room.remove((row.room, row.age))
        return row


def best_fit(
    documents: Iterable[TokenizedDocument],
    sequence_length: int,
    eos_id: int,
    *,
    pad_id: int | None = None,
    stats: PackingStats | None = None,
) -> Iterator[Row]:
    """Pack whole documents, each with one end-of-document id, into rows by best fit.

    Args:
        documents: in the order in which they are to be learned; rows keep it to within ``OPEN_ROWS`` rows.
        sequence_length: T, inputs per row; a document of up to T tokens and its end id is never cut.
        eos_id: the end-of-document id.
        pad_id: fills free room, ``eos_id`` if not given; padding never counts in the loss.
        stats: filled with the counts, final once the iterator is used up.

    Returns:
        An iterator of rows that do not overlap.

    Raises:
        ValueError: a document is empty or already holds ``eos_id``, or T is below 1.
    """
    counts = stats if stats is not None else PackingStats()
    width, filler = _width(sequence_length), eos_id if pad_id is None else pad_id
    rows = _OpenRows(width)
    for document in documents:
        tokens = _terminated(document, eos_id, counts)
        identity = (document.source, document.ordinal, document.epoch)
        split = len(tokens) > width
        counts.split_documents += split
        while len(tokens) > width:
            yield _row(tokens[:width].copy(), [(0, *identity)], counts)
            tokens = tokens[width - 1 :]
        row = (None if split else rows.take(len(tokens))) or rows.new()
        row.add(tokens, identity, width)
        if row.room:
            rows.put(row)
        else:
            yield row.close(filler, width, counts)
        if len(rows) > OPEN_ROWS:
            yield rows.oldest().close(filler, width, counts)
    while len(rows):
        yield rows.oldest().close(filler, width, counts)


def document_ends(row: Row, eos_id: int) -> Integers:
    """Return the positions in 1..T at which a document ends, the unit in which documents are counted.

    A document counts in the row where its end-of-document id is a target. That happens exactly once,
    whatever the packing: position 0 of an overlapping row was a target one row earlier.

    Args:
        row: a packed row.
        eos_id: the end-of-document id.
    """
    ends = np.append(row.docs[1:, 0], len(row.tokens)) - 1
    real = row.docs[:, 1] != PADDING_SOURCE
    return np.asarray(ends[(ends > 0) & real & (row.tokens[ends] == eos_id)])
