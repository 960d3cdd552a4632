"""Train straight from a Megatron prefix: its token stream, cut into rows as ``concatenate`` does.

Row i holds tokens i*T to i*T + T of the stream. Nothing is copied or rewritten, and nothing is held in memory
but the map of the two files.
"""

import dataclasses
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from zgcm_data.megatron import IndexedDataset, read_indexed
from zgcm_data.megatron_facts import Prefix, Sidecar, check_header, file_sha256, read_documents
from zgcm_data.rows import Integers, Row
from zgcm_data.runs import RunReader, even_runs
from zgcm_data.shards.manifest import Manifest, ManifestHeader, ShardError, ShardInfo, SourceInfo

AT_ONCE = 1 << 20


class IndexedRows:
    """The rows of an indexed dataset; a source for ``Loader`` like a ``ShardSet``.

    Args:
        dataset: the opened files.
        manifest: what the rows are.
        names: int64 ``[documents, 3]``, source, ordinal and epoch of each document; None where all are of
            source 0, numbered as they come.
    """

    def __init__(self, dataset: IndexedDataset, manifest: Manifest, names: Integers | None = None) -> None:
        self.dataset, self.manifest, self._names = dataset, manifest, names
        self._file = dataset.data.open("rb")
        self._starts = _document_starts(dataset)
        self._total = len(dataset.map) + cut_off(dataset, manifest.eos_id, names)

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
        docs, per_row, ended = _tables(self._starts, size, first, length, self._total)
        if self._names is not None:
            docs[:, 1:] = self._names[docs[:, 2]]
        return _IndexedBlock(docs, per_row, ended, reader)

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


def cut_off(dataset: IndexedDataset, eos_id: int, names: Integers | None) -> bool:
    """Whether the last document is one that a shard set had cut off, so that its end is not there."""
    return names is not None and int(dataset[len(dataset) - 1][-1]) != eos_id


def _document_starts(dataset: IndexedDataset) -> Integers:
    """Return the byte at which each document starts, straight from the mapped index where it can be."""
    if len(dataset.borders) == len(dataset) + 1:
        return dataset.pointers
    return np.asarray(dataset.pointers[dataset.borders[:-1]])


def _tables(
    starts: Integers, size: int, first: Integers, length: int, total: int
) -> tuple[Integers, Integers, npt.NDArray[np.bool_]]:
    """Return docs tables of one source, entries of each, and whether a document ends with the row's last token.

    Args:
        starts: byte at which each document starts, ascending.
        size: bytes of a token.
        first: position in the stream of each row's first token.
        length: T.
        total: bytes of the stream, one more if it cuts its last document off.
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


def open_indexed(
    prefix: Prefix, header: ManifestHeader, *, checksum: bool = False, sidecar: Sidecar | None = None
) -> IndexedRows:
    """Open an indexed dataset as rows to train on.

    Args:
        prefix: path without ``.bin`` and ``.idx``.
        header: what the rows are; packing ``concatenate``, and one source unless the sidecar knows whose each
            document is. A document counts where its last token is a target, whether or not that is an
            end-of-document id.
        checksum: also read all bytes of ``.bin`` and bind them into the digest, or compare them with the
            sidecar; without it the digest binds the index and the size of ``.bin``.
        sidecar: of the dataset, if it has one.

    Raises:
        ShardError: a file is missing or not whole.
        ValueError: the header does not describe such rows, or there is less than one row.
    """
    named = sidecar is not None and bool(sidecar.documents_sha256)
    check_header(header, named=named)
    dataset = read_indexed(prefix)
    tokens = len(dataset.map) // dataset.dtype.itemsize
    rows = (tokens - 1) // header.sequence_length
    if rows < 1:
        raise ValueError(
            f"{dataset.data} holds {tokens} tokens, less than a row of {header.sequence_length + 1}"
        )
    names = read_documents(prefix, len(dataset.borders) - 1) if named else None
    data = _data_digest(dataset, checksum, sidecar)
    index = file_sha256(dataset.index) if sidecar is None else sidecar.index_sha256
    shard = ShardInfo(dataset.data.name, rows, len(dataset.map), data, index)
    sources = counted_sources(dataset, header, rows * header.sequence_length, names)
    return IndexedRows(dataset, Manifest.build(header, sources, (shard,)), names)


def counted_sources(
    dataset: IndexedDataset, header: ManifestHeader, last: int, names: Integers | None
) -> tuple[SourceInfo, ...]:
    """Return sources with their documents and tokens among the targets, which are positions 1 to ``last``.

    Documents are looked at a million at a time, so memory does not grow with the dataset.
    """
    sources, total = header.sources, len(dataset.map) // dataset.dtype.itemsize
    if names is None:
        return (dataclasses.replace(sources[0], documents=_documents_ended(dataset, last), tokens=last),)
    size, starts = dataset.dtype.itemsize, _document_starts(dataset)
    counts = np.zeros((2, len(sources)), np.int64)
    for first in range(0, len(starts), AT_ONCE):
        begin = starts[first : first + AT_ONCE] // size
        following = starts[first + 1 : first + AT_ONCE + 1] // size
        end = np.append(following, total)[: len(begin)]
        source = np.asarray(names[first : first + AT_ONCE, 0])
        if int(source.min()) < 0 or int(source.max()) >= len(sources):
            raise ShardError(
                f"{dataset.data}: documents name sources outside 0..{len(sources) - 1}; write the dataset again"
            )
        held = np.maximum(np.minimum(end, last + 1) - np.maximum(begin, 1), 0)
        ended = (end > 1) & (end <= last + 1)
        ended[-1] &= first + AT_ONCE < len(starts) or not cut_off(dataset, header.eos_id, names)
        counts[0] += np.bincount(source[ended], minlength=len(sources))
        counts[1] += np.bincount(source, held, len(sources)).astype(np.int64)
    return tuple(
        dataclasses.replace(source, documents=documents, tokens=tokens)
        for source, documents, tokens in zip(sources, *counts.tolist(), strict=True)
    )


def _documents_ended(dataset: IndexedDataset, last: int) -> int:
    """Count documents whose last token is at position 1 to ``last`` of the stream."""
    size, starts = dataset.dtype.itemsize, _document_starts(dataset)
    ends_at_most = int(np.searchsorted(starts[1:], (last + 1) * size, side="right"))
    ends_at_most += len(dataset.map) == (last + 1) * size
    return ends_at_most - int(np.searchsorted(starts[1:], size, side="right"))


def _data_digest(dataset: IndexedDataset, checksum: bool, sidecar: Sidecar | None) -> str:
    """Return the digest of ``.bin`` if it is known or asked for."""
    known = "" if sidecar is None else sidecar.data_sha256
    if not checksum:
        return known
    found = file_sha256(dataset.data)
    if known and found != known:
        raise ShardError(
            f"{dataset.data} has SHA-256 {found}, its sidecar says {known}; it was altered, restore it or write "
            "the dataset again"
        )
    return found
