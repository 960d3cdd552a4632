"""Train straight from a Megatron prefix: its token stream, cut into rows as ``concatenate`` does.

Row i holds tokens i*T to i*T + T of the stream. Nothing is copied or rewritten, and nothing is held in memory
but the map of the two files.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from zgcm_data.megatron import IndexedDataset, Prefix, index_digest, read_indexed
from zgcm_data.rows import Integers, Row
from zgcm_data.runs import RunReader, even_runs
from zgcm_data.shards.manifest import Manifest, ManifestHeader, ShardError, ShardInfo


class IndexedRows:
    """The rows of an indexed dataset; a source for ``Loader`` like a ``ShardSet``.

    Args:
        dataset: the opened files.
        manifest: what the rows are.
    """

    def __init__(self, dataset: IndexedDataset, manifest: Manifest) -> None:
        self.dataset, self.manifest = dataset, manifest
        self._file = dataset.data.open("rb")
        self._starts = _document_starts(dataset)

    def __len__(self) -> int:
        return self.manifest.rows

    def __getitem__(self, row: int) -> Row:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is not among the {len(self)} rows of {self.dataset.data}")
        block = self.block(np.array([row], np.int64))
        tokens = np.empty((1, self.manifest.sequence_length + 1), np.int64)
        block.read_tokens(0, tokens)
        return Row(tokens[0].astype(np.uint32), block.docs)

    def __iter__(self) -> Iterator[Row]:
        return (self[row] for row in range(len(self)))

    def block(self, rows: Integers) -> "_IndexedBlock":
        """Look up rows by global index, at least one."""
        length, size = self.manifest.sequence_length, self.dataset.dtype.itemsize
        first = rows * length
        reader = RunReader(list(even_runs(first * size, 0, self._copy)))
        return _IndexedBlock(*_tables(self._starts, size, first, length, len(self.dataset.map)), reader)

    def _copy(self, place: int, stride: int, out: npt.NDArray[np.int64]) -> None:
        size, found = len(self.dataset.map), os.fstat(self._file.fileno()).st_size
        if found != size:
            raise ShardError(
                f"{self.dataset.data} has {found} bytes, had {size} when opened; it was truncated"
            )
        strides = (stride, self.dataset.dtype.itemsize)
        np.copyto(out, np.ndarray(out.shape, self.dataset.dtype, self.dataset.map, place, strides))


@dataclasses.dataclass(frozen=True, slots=True)
class _IndexedBlock:
    docs: Integers
    per_row: Integers
    ended: npt.NDArray[np.bool_]
    reader: RunReader

    def read_tokens(self, first: int, out: npt.NDArray[np.int64]) -> None:
        self.reader.read(first, out)


def _document_starts(dataset: IndexedDataset) -> Integers:
    """Return the byte at which each document starts, straight from the mapped index where it can be."""
    if len(dataset.borders) == len(dataset) + 1:
        return dataset.pointers
    return np.asarray(dataset.pointers[dataset.borders[:-1]])


def _tables(
    starts: Integers, size: int, first: Integers, length: int, total: int
) -> tuple[Integers, Integers, npt.NDArray[np.bool_]]:
    """Return docs tables, entries of each, and whether a document ends with the row's last token.

    Args:
        starts: byte at which each document starts, ascending.
        size: bytes of a token.
        first: position in the stream of each row's first token.
        length: T.
        total: bytes of the stream.
    """
    low = np.searchsorted(starts, first * size, side="right") - 1
    high = np.searchsorted(starts, (first + length) * size, side="right")
    per_row = high - low
    after = np.cumsum(per_row)
    documents = np.repeat(low - (after - per_row), per_row) + np.arange(after[-1])
    begin = starts[documents] // size - np.repeat(first, per_row)
    docs = np.zeros((len(documents), 4), np.int64)
    docs[:, 0], docs[:, 2] = np.maximum(begin, 0), documents
    edge = (first + length + 1) * size
    place = np.searchsorted(starts, edge)
    following = np.where(place < len(starts), starts[np.minimum(place, len(starts) - 1)], total)
    return docs, per_row, following == edge


def open_indexed(prefix: Prefix, header: ManifestHeader, *, checksum: bool = False) -> IndexedRows:
    """Open an indexed dataset as rows to train on.

    Args:
        prefix: path without ``.bin`` and ``.idx``.
        header: what the rows are; packing ``concatenate`` and one source, which is the dataset. A document
            counts where its last token is a target, whether or not that is an end-of-document id.
        checksum: also bind the bytes of ``.bin`` into the digest, which reads the whole file once; without it
            the digest binds the index and the size of ``.bin``.

    Raises:
        ShardError: a file is missing or not whole.
        ValueError: the header does not describe such rows, or there is less than one row.
    """
    if header.packing != "concatenate" or len(header.sources) != 1:
        raise ValueError(
            f"an indexed dataset is one source packed as 'concatenate', not {len(header.sources)} sources packed "
            f"as {header.packing!r}; use from_megatron for anything else"
        )
    dataset = read_indexed(prefix)
    tokens = len(dataset.map) // dataset.dtype.itemsize
    rows = (tokens - 1) // header.sequence_length
    if rows < 1:
        raise ValueError(
            f"{dataset.data} holds {tokens} tokens, less than a row of {header.sequence_length + 1}"
        )
    last = rows * header.sequence_length
    source = dataclasses.replace(header.sources[0], documents=_documents_ended(dataset, last), tokens=last)
    return IndexedRows(dataset, Manifest.build(header, (source,), (_info(dataset, rows, checksum),)))


def _documents_ended(dataset: IndexedDataset, last: int) -> int:
    """Count documents whose last token is at position 1 to ``last`` of the stream."""
    size, starts = dataset.dtype.itemsize, _document_starts(dataset)
    ends_at_most = int(np.searchsorted(starts[1:], (last + 1) * size, side="right"))
    ends_at_most += len(dataset.map) == (last + 1) * size
    return ends_at_most - int(np.searchsorted(starts[1:], size, side="right"))


def _info(dataset: IndexedDataset, rows: int, checksum: bool) -> ShardInfo:
    found = ""
    if checksum:
        with dataset.data.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    return ShardInfo(dataset.data.name, rows, len(dataset.map), found, index_digest(dataset))
