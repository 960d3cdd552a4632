"""Megatron's indexed datasets: ``PREFIX.bin`` holds the tokens, ``PREFIX.idx`` says where sequences lie.

The index is a magic word, a version, the code of the token type, the numbers of sequences and of document
borders, then lengths (int32), byte offsets (int64) and document borders (int64, as numbers of sequences).
Tokens are uint16 for vocabularies below 65,500 and int32 above. A set of rows turned into an indexed dataset
and opened again with the same T gives the same rows.

Source: the format of ``megatron.core.datasets.indexed_dataset`` (megatron-core 0.16).
"""

import mmap
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from zgcm_data.megatron_facts import Prefix, beside, header_of, write_sidecar
from zgcm_data.packing import best_fit, concatenate
from zgcm_data.rows import PADDING_SOURCE, Row, TokenizedDocument, Tokens
from zgcm_data.shards.manifest import Manifest, ManifestHeader, ShardError
from zgcm_data.shards.write import ROWS_PER_SHARD, write_shards

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
UINT16_BELOW = 65_500
_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_HEADER = struct.Struct("<9sQBQQ")
_NAME = struct.Struct("<3q")
Name = tuple[int, int, int]
"""Source, ordinal and epoch of a document."""


def token_type(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Return the type in which Megatron stores ids of a vocabulary.

    Raises:
        ValueError: the vocabulary does not fit the format.
    """
    if vocab_size > 2**31:
        raise ValueError(
            f"vocab_size {vocab_size} does not fit an indexed dataset, which holds ids below 2^31"
        )
    return np.uint16 if vocab_size < UINT16_BELOW else np.int32


def _paths(prefix: Prefix) -> tuple[Path, Path]:
    return beside(prefix, "bin"), beside(prefix, "idx")


def write_indexed(prefix: Prefix, documents: Iterable[npt.NDArray[np.integer]], *, vocab_size: int) -> int:
    """Write documents as an indexed dataset, one sequence each; both files appear only when whole.

    Args:
        prefix: path without ``.bin`` and ``.idx``.
        documents: token ids of each document, end-of-document id included.
        vocab_size: decides the token type.

    Returns:
        The number of documents.

    Raises:
        ValueError: a document is empty or holds an id outside the vocabulary.
    """
    kind, lengths = token_type(vocab_size), list[int]()
    data, index = _paths(prefix)
    data.parent.mkdir(parents=True, exist_ok=True)
    temporary = [path.with_name(path.name + ".tmp") for path in (data, index)]
    try:
        with temporary[0].open("wb") as file:
            for number, tokens in enumerate(documents):
                if not len(tokens) or int(tokens.max()) >= vocab_size or int(tokens.min()) < 0:
                    raise ValueError(f"document {number} is empty or holds an id outside 0..{vocab_size - 1}")
                file.write(tokens.astype(kind).tobytes())
                lengths.append(len(tokens))
        if not lengths:
            raise ValueError(f"no documents to write to {data}")
        temporary[1].write_bytes(_index(np.array(lengths, np.int32), np.dtype(kind)))
        for written, path in zip(temporary, (data, index), strict=True):
            written.replace(path)
    finally:
        for leftover in temporary:
            leftover.unlink(missing_ok=True)
    return len(lengths)


def _index(lengths: npt.NDArray[np.int32], dtype: np.dtype[np.integer]) -> bytes:
    """Return the index of sequences that lie one after the other, each a document."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    code = next(code for code, known in _TYPES.items() if known is dtype.type)
    head = _HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1)
    borders = np.arange(len(lengths) + 1, dtype=np.int64)
    return head + lengths.tobytes() + (starts * dtype.itemsize).tobytes() + borders.tobytes()


class IndexedDataset:
    """An indexed dataset, mapped into memory; a sequence of token arrays.

    Args:
        prefix: path without ``.bin`` and ``.idx``.

    Attributes:
        data: path of the tokens.
        index: path of the index.
        dtype: token type.
        lengths: int32 ``[n]``, tokens of each sequence.
        pointers: int64 ``[n]``, byte at which each sequence starts.
        borders: int64 ``[d + 1]``, number of the first sequence of each document, and n.

    Raises:
        ShardError: a file is missing or not whole.
    """

    def __init__(self, prefix: Prefix) -> None:
        self.data, self.index = _paths(prefix)
        for path in (self.data, self.index):
            if not path.is_file():
                raise ShardError(f"{path} is missing; an indexed dataset is PREFIX.bin and PREFIX.idx")
        with self.index.open("rb") as file:
            head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or head[: len(MAGIC)] != MAGIC:
            raise ShardError(f"{self.index} is not the index of a Megatron indexed dataset")
        _, version, code, sequences, borders = _HEADER.unpack(head)
        if version != VERSION or code not in _TYPES:
            raise ShardError(
                f"{self.index} has version {version} and token type {code}; known are 1 and {[*_TYPES]}"
            )
        self.dtype = np.dtype(_TYPES[code])
        self._map_index(sequences, borders)
        self._open_data()

    def _map_index(self, sequences: int, borders: int) -> None:
        arrays = (("<i4", sequences), ("<i8", sequences), ("<i8", borders))
        if self.index.stat().st_size < _HEADER.size + sum(np.dtype(k).itemsize * n for k, n in arrays):
            raise ShardError(f"{self.index} is truncated; write the dataset again")
        with self.index.open("rb") as file:
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        place, found = _HEADER.size, []
        for kind, count in arrays:
            found.append(np.frombuffer(whole, kind, count, place))
            place += found[-1].nbytes
        self.lengths, self.pointers, self.borders = found

    def _open_data(self) -> None:
        end = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if len(self) else 0
        size = self.data.stat().st_size
        if size != end or not size:
            raise ShardError(
                f"{self.data} has {size} bytes, its index says {end}; one of them is truncated or stale"
            )
        with self.data.open("rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Tokens:
        if not 0 <= number < len(self):
            raise IndexError(f"sequence {number} is not among the {len(self)} of {self.data}")
        tokens = np.frombuffer(self.map, self.dtype, int(self.lengths[number]), int(self.pointers[number]))
        return tokens.astype(np.uint32)

    def documents(self) -> Iterator[Tokens]:
        """Yield the tokens of each document, its sequences joined."""
        for first, stop in zip(self.borders[:-1].tolist(), self.borders[1:].tolist(), strict=True):
            if stop > first:
                yield np.concatenate([self[number] for number in range(first, stop)])


def read_indexed(prefix: Prefix) -> IndexedDataset:
    """Open an indexed dataset.

    Args:
        prefix: path without ``.bin`` and ``.idx``.

    Raises:
        ShardError: a file is missing or not whole.
    """
    return IndexedDataset(prefix)


def documents_of_rows(rows: Iterable[Row], eos_id: int, *, overlap: bool) -> Iterator[tuple[Name, Tokens]]:
    """Put documents together again from packed rows.

    Args:
        rows: all rows of a set, in order.
        eos_id: the end-of-document id.
        overlap: whether a row starts with the last token of the row before (``concatenate``).

    Yields:
        Source, ordinal and epoch of each document, and its tokens with the end-of-document id, in the order in
        which documents end; last, without the id, those that the set cuts off.
    """
    parts: dict[Name, list[Tokens]] = {}
    for number, (tokens, docs) in enumerate(rows):
        stops = [*docs[1:, 0].tolist(), len(tokens)]
        for (start, source, ordinal, epoch), stop in zip(docs.tolist(), stops, strict=True):
            name = (source, ordinal, epoch)
            repeated = start == 0 and (number > 0 if overlap else name in parts)
            piece = tokens[start + repeated : stop]
            if source == PADDING_SOURCE or not len(piece):
                continue
            parts.setdefault(name, []).append(piece)
            if piece[-1] == eos_id:
                yield name, np.concatenate(parts.pop(name))
    yield from ((name, np.concatenate(pieces)) for name, pieces in parts.items())


def to_megatron(rows: Iterable[Row], manifest: Manifest, prefix: Prefix) -> int:
    """Write the documents of a shard set as an indexed dataset that can be trained on.

    Beside ``.bin`` and ``.idx`` lie ``.zgcm.docs`` and ``.zgcm.json``, which Megatron does not need.

    Args:
        rows: the opened set.
        manifest: its manifest.
        prefix: path without ``.bin`` and ``.idx``.

    Returns:
        The number of documents, those that the set cuts off included.
    """
    named = documents_of_rows(rows, manifest.eos_id, overlap=manifest.packing == "concatenate")
    path = beside(prefix, "zgcm.docs")
    temporary = path.with_name(path.name + ".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside(prefix, "zgcm.json").unlink(missing_ok=True)
    try:
        with temporary.open("wb") as file:
            count = write_indexed(prefix, _noted(named, file), vocab_size=manifest.vocab_size)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    write_sidecar(prefix, header_of(manifest))
    return count


def _noted(documents: Iterable[tuple[Name, Tokens]], file: BinaryIO) -> Iterator[Tokens]:
    """Pass documents on and write down whose each is."""
    for name, tokens in documents:
        file.write(_NAME.pack(*name))
        yield tokens


def indexed_documents(prefix: Prefix, eos_id: int, *, source: int = 0) -> Iterator[TokenizedDocument]:
    """Yield the documents of an indexed dataset without their end-of-document ids, ready to be packed.

    Args:
        prefix: path without ``.bin`` and ``.idx``.
        eos_id: the end-of-document id; a document may end with it or not.
        source: source id to give them.
    """
    for ordinal, tokens in enumerate(read_indexed(prefix).documents()):
        yield TokenizedDocument(source, ordinal, 0, tokens[:-1] if tokens[-1] == eos_id else tokens)


def from_megatron(
    prefix: Prefix, folder: Prefix, header: ManifestHeader, *, rows_per_shard: int = ROWS_PER_SHARD
) -> Manifest:
    """Pack the documents of an indexed dataset and write them as a shard set.

    Args:
        prefix: path without ``.bin`` and ``.idx``.
        folder: of the new set.
        header: what the set is; its first source is the dataset.
        rows_per_shard: rows of every shard but the last.
    """
    pack = concatenate if header.packing == "concatenate" else best_fit
    documents = indexed_documents(prefix, header.eos_id)
    rows = pack(documents, header.sequence_length, header.eos_id)
    return write_shards(folder, rows, header, rows_per_shard=rows_per_shard)
