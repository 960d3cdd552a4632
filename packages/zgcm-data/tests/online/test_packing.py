"""Packing: every token a target exactly once, whole documents, exact counts."""

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zgcm_data import PackingStats, Row, TokenizedDocument, best_fit, concatenate
from zgcm_data.packing import OPEN_ROWS, document_ends

EOS = 7

_documents = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=0, max_size=40)


def _numbered(shapes: list[tuple[int, int]]) -> list[TokenizedDocument]:
    """Documents whose tokens are all different, so that each can be followed."""
    documents, next_id = [], 100
    for ordinal, (source, length) in enumerate(shapes):
        tokens = np.arange(next_id, next_id + length, dtype=np.uint32)
        documents.append(TokenizedDocument(source, ordinal, 0, tokens))
        next_id += length
    return documents


def _stream(documents: list[TokenizedDocument]) -> list[int]:
    return [int(t) for d in documents for t in [*d.tokens, EOS]]


@given(_documents, st.integers(1, 17))
@settings(max_examples=150, deadline=None)
def test_concatenate_is_the_stream_cut_with_one_token_of_overlap(
    shapes: list[tuple[int, int]], length: int
) -> None:
    documents, stats = _numbered(shapes), PackingStats()
    rows = list(concatenate(documents, length, EOS, stats=stats))
    stream = _stream(documents)
    assert len(rows) == max(0, (len(stream) - 1) // length)
    for i, row in enumerate(rows):
        assert row.tokens.tolist() == stream[i * length : i * length + length + 1]
    in_rows = len(rows) * length + 1 if rows else 0
    assert stats.dropped_tokens == len(stream) - in_rows
    assert (stats.documents, stats.tokens, stats.rows) == (len(documents), len(stream), len(rows))


@given(_documents, st.integers(1, 17))
@settings(max_examples=150, deadline=None)
def test_concatenate_says_whose_every_position_is(shapes: list[tuple[int, int]], length: int) -> None:
    documents = _numbered(shapes)
    owner = [d.ordinal for d in documents for _ in range(len(d.tokens) + 1)]
    for i, row in enumerate(concatenate(documents, length, EOS)):
        starts = [*row.docs[:, 0].tolist(), length + 1]
        assert starts[0] == 0
        said = [int(o) for k, o in enumerate(row.docs[:, 2]) for _ in range(starts[k + 1] - starts[k])]
        assert said == owner[i * length : i * length + length + 1]
        assert [documents[o].source for o in row.docs[:, 2]] == row.docs[:, 1].tolist()


@given(_documents, st.integers(1, 17))
@settings(max_examples=150, deadline=None)
def test_best_fit_targets_each_token_once_and_keeps_documents_whole(
    shapes: list[tuple[int, int]], length: int
) -> None:
    documents, stats = _numbered(shapes), PackingStats()
    rows = list(best_fit(documents, length, EOS, stats=stats))
    seen: Counter[int] = Counter()
    homes: dict[int, set[int]] = {}
    padding = 0
    for number, row in enumerate(rows):
        bounds = [*row.docs[:, 0].tolist(), length + 1]
        for k, (_, source, ordinal, _) in enumerate(row.docs.tolist()):
            piece = row.tokens[bounds[k] : bounds[k + 1]].tolist()
            if source == -1:
                assert k == len(row.docs) - 1
                assert set(piece) == {EOS}
                padding += len(piece)
                continue
            homes.setdefault(ordinal, set()).add(number)
            seen.update(t for t in (piece[1:] if k == 0 else piece) if t != EOS)
            if len(documents[ordinal].tokens) + 1 <= length + 1:
                assert piece == [*documents[ordinal].tokens.tolist(), EOS]
    assert padding == stats.padding_tokens
    assert all(count == 1 for count in seen.values())
    split = [d for d in documents if len(d.tokens) > length]
    assert stats.split_documents == len(split)
    for document in split:
        assert set(document.tokens[1:].tolist()) <= set(seen)
    whole = [d for d in documents if len(d.tokens) <= length]
    assert all(len(homes[d.ordinal]) == 1 for d in whole)


@pytest.mark.parametrize("pack", [concatenate, best_fit])
def test_documents_are_counted_once_where_they_end(pack: Callable[..., Iterator[Row]]) -> None:
    documents = _numbered([(0, n) for n in (3, 40, 1, 7, 8, 9, 15, 16, 17, 31, 5, 2)])
    rows = list(pack(documents, 8, EOS))
    ended = sum(len(document_ends(row, EOS)) for row in rows)
    whole = sum(1 for row in rows for t in row.tokens[1:].tolist() if t == EOS)
    padding = sum(8 + 1 - int(row.docs[-1, 0]) for row in rows if row.docs[-1, 1] == -1)
    assert ended == whole - padding
    if pack is best_fit:
        assert ended == len(documents)


def test_best_fit_takes_the_tightest_row() -> None:
    rows = list(best_fit(_numbered([(0, 5), (0, 3), (0, 2), (0, 4)]), 9, EOS))
    contents = [row.docs[row.docs[:, 1] >= 0, 2].tolist() for row in rows]
    assert contents == [[0, 1], [2, 3]]


def test_best_fit_keeps_the_order_to_within_its_open_rows() -> None:
    documents = _numbered([(0, 6)] * (3 * OPEN_ROWS))
    rows = list(best_fit(documents, 9, EOS))
    assert [int(row.docs[0, 2]) for row in rows] == list(range(3 * OPEN_ROWS))


def test_d06_an_end_id_inside_a_document_is_refused() -> None:
    document = TokenizedDocument(0, 4, 0, np.array([9, EOS], np.uint32))
    with pytest.raises(ValueError, match=r"document 4 of source 0 already holds the end-of-document id 7"):
        list(concatenate([document], 4, EOS))


def test_an_empty_document_is_refused() -> None:
    with pytest.raises(ValueError, match="leave out documents without tokens"):
        list(best_fit([TokenizedDocument(0, 0, 0, np.array([], np.uint32))], 4, EOS))


def test_ids_up_to_two_to_the_32_survive() -> None:
    high = np.array([2**32 - 1, 2**31], np.uint32)
    (row,) = concatenate([TokenizedDocument(0, 0, 0, high)], 2, EOS)
    assert row.tokens.tolist() == [2**32 - 1, 2**31, EOS]
