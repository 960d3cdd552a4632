"""What is stored, ordered and counted: rows of token ids, and the documents they are cut from."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]
Integers = npt.NDArray[np.int64]

PADDING_SOURCE = -1
"""Source id of a padded stretch in a row's docs table; such positions belong to no document."""

START, SOURCE, ORDINAL, EPOCH = range(4)
"""Columns of a docs table."""


class Row(NamedTuple):
    """T + 1 consecutive token ids and the documents they belong to.

    Attributes:
        tokens: uint32 ``[T+1]``; inputs are ``tokens[:-1]``, targets ``tokens[1:]``.
        docs: int64 ``[n, 4]``: first position in this row, source id, document ordinal, epoch of the
            document. Starts ascend from 0; a document that began in an earlier row has start 0 here and
            the same ordinal. A stretch of padding has source id -1.
    """

    tokens: Tokens
    docs: Integers


class TokenizedDocument(NamedTuple):
    """One document as token ids, without an end-of-document id.

    Attributes:
        source: id of its source, a position in the manifest's list of sources.
        ordinal: number of the document within its source.
        epoch: how many times the document was used before, 0 the first time.
        tokens: uint32 ``[n]``, at least one token.
    """

    source: int
    ordinal: int
    epoch: int
    tokens: Tokens


def describe_row_fault(row: Row, width: int, vocab_size: int, sources: int) -> str | None:
    """Say what is wrong with a row, or return None.

    Args:
        row: the row to check.
        width: tokens a row must hold, T + 1.
        vocab_size: ids must be below this.
        sources: source ids must be below this, or -1 for padding.
    """
    tokens, docs = row
    if tokens.dtype != np.uint32 or tokens.shape != (width,):
        return f"tokens are {tokens.dtype} {list(tokens.shape)}, expected uint32 [{width}]"
    if docs.dtype != np.int64 or docs.ndim != 2 or docs.shape[1] != 4 or not len(docs):
        return f"docs are {docs.dtype} {list(docs.shape)}, expected int64 [n, 4] with n >= 1"
    starts = docs[:, START]
    if starts[0] != 0 or starts[-1] >= width or bool((starts[1:] <= starts[:-1]).any()):
        return f"document starts {starts.tolist()} do not ascend from 0 to below {width}"
    if int(tokens.max()) >= vocab_size:
        return f"token id {int(tokens.max())} is not below the vocabulary size {vocab_size}"
    source = docs[:, SOURCE]
    if int(source.min()) < PADDING_SOURCE or int(source.max()) >= sources:
        return f"source ids {sorted(set(source.tolist()))} are not all among the {sources} declared sources"
    return None
