"""The DALI index beside each shard, version 1.2, with lines of equal length.

After the header ``v1.2 ROWS`` each line lists both members of one row: suffix, offset of the data, size and
name. All numbers have a fixed number of digits, so a whole index is decoded as one array; DALI skips leading
zeros.
Source: the index format of DALI's ``wds2idx``.
"""

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zgcm_data.rows import Integers
from zgcm_data.shards.manifest import ShardError
from zgcm_data.shards.tar import DOCS_SUFFIX, KEY_DIGITS, TOKENS_SUFFIX

VERSION = "v1.2"
Lines = npt.NDArray[np.uint8]
_OFFSET_DIGITS = 15
_SIZE_DIGITS = 12


def _column(suffix: str) -> int:
    return len(suffix) + 1 + _OFFSET_DIGITS + 1 + _SIZE_DIGITS + 1 + KEY_DIGITS + 1 + len(suffix) + 1


LINE = _column(TOKENS_SUFFIX) + _column(DOCS_SUFFIX)
"""Bytes of a line, its end included."""


def line(row_key: str, tokens: tuple[int, int], docs: tuple[int, int]) -> bytes:
    """Return the index line of a row.

    Args:
        row_key: the row's key.
        tokens: offset of the data and size in bytes of the tokens member.
        docs: the same of the docs member.
    """
    parts = [
        f"{suffix} {offset:0{_OFFSET_DIGITS}d} {size:0{_SIZE_DIGITS}d} {row_key}.{suffix}"
        for suffix, (offset, size) in ((TOKENS_SUFFIX, tokens), (DOCS_SUFFIX, docs))
    ]
    return f"{parts[0]} {parts[1]}\n".encode()


def header(rows: int) -> bytes:
    """Return the first line of an index of ``rows`` rows."""
    return f"{VERSION} {rows}\n".encode()


def index_path(shard: Path) -> Path:
    """Return the path of the index beside a shard."""
    return shard.with_suffix(".idx")


def decimal(digits: npt.NDArray[np.uint8]) -> Integers:
    """Return the numbers that rows of ASCII digits spell, int64 ``[n]`` from ``[n, digits]``."""
    powers = 10 ** np.arange(digits.shape[1] - 1, -1, -1, dtype=np.int64)
    return np.asarray((digits.astype(np.int64) - ord("0")) @ powers)


def _digits(lines: Lines, first: int, count: int) -> Integers:
    return decimal(lines[:, first : first + count])


def parse(data: bytes, origin: str) -> Lines:
    """Return the lines of an index as an array of characters, uint8 ``[rows, LINE]``.

    Args:
        data: the index file.
        origin: its path, for messages.

    Raises:
        ShardError: the index is not laid out as this module writes it.
    """
    end = data.find(b"\n") + 1
    rows, rest = divmod(len(data) - end, LINE)
    if not end or rest or data[:end] != header(rows):
        raise ShardError(f"{origin} is not a whole index of a ZGCM shard; write the set again")
    return np.frombuffer(data, np.uint8, offset=end).reshape(rows, LINE)


def offsets(lines: Lines) -> tuple[Integers, Integers, Integers]:
    """Return data offsets of tokens, data offsets of docs, and sizes of docs, one entry per row."""
    tokens = len(TOKENS_SUFFIX) + 1
    docs = _column(TOKENS_SUFFIX) + len(DOCS_SUFFIX) + 1
    return (
        _digits(lines, tokens, _OFFSET_DIGITS),
        _digits(lines, docs, _OFFSET_DIGITS),
        _digits(lines, docs + _OFFSET_DIGITS + 1, _SIZE_DIGITS),
    )


def of_tokens(lines: Lines, rows: Integers) -> bytes:
    """Return an index that lists only the tokens of some rows, in their order.

    Args:
        lines: of the whole index.
        rows: int64 ``[n]``, lines to list.
    """
    chosen = lines[rows, : _column(TOKENS_SUFFIX)]
    chosen[:, -1] = ord("\n")
    return header(len(rows)) + chosen.tobytes()


def load(shard: Path, sha256: str) -> Lines:
    """Read the index beside a shard and refuse one that does not belong to it.

    Args:
        shard: path of the shard.
        sha256: digest that the manifest has for the index.

    Raises:
        ShardError: the index is missing, stale or damaged.
    """
    path = index_path(shard)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ShardError(f"{path} is missing; restore it or write the set again") from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ShardError(
            f"{path} is stale: its SHA-256 is {found}, the manifest says {sha256}; "
            "restore it or write the set again"
        )
    return parse(data, str(path))
