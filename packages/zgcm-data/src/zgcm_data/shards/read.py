"""Open a shard set and read any row of it without scanning.

A shard is mapped into memory when one of its rows is read first; its index gives every offset at once. At
most ``OPEN_SHARDS`` shards stay mapped, so memory does not grow with the set.
"""

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zgcm_data.order import RowOrder
from zgcm_data.rows import Integers, Row
from zgcm_data.runs import Run, RunReader, even_runs
from zgcm_data.shards import index, tar
from zgcm_data.shards.manifest import Manifest, ShardError, ShardInfo, load_manifest

OPEN_SHARDS = 4
_ENTRY = 32


class _Shard:
    """One mapped shard with its offsets."""

    def __init__(self, path: Path, info: ShardInfo, width: int) -> None:
        self.path, self._info, self._width = path, info, width
        self.lines = index.load(path, info.index_sha256)
        self._tokens, self._docs, self._docs_bytes = index.offsets(self.lines)
        try:
            self._file = path.open("rb")
        except FileNotFoundError as error:
            raise ShardError(f"{path} is missing; restore it or write the set again") from error
        self.check_size()
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._words = np.frombuffer(self._map, "<u4")
        self._entries = np.frombuffer(self._map, "<i8").reshape(-1, 4)

    def check_size(self) -> None:
        """Refuse a shard that was cut, before touching pages of the map that no longer exist."""
        size = os.fstat(self._file.fileno()).st_size
        if size != self._info.bytes:
            raise ShardError(
                f"{self.path} has {size} bytes, the manifest says {self._info.bytes}; it is truncated or "
                "altered, restore it or write the set again"
            )

    def check_keys(self, offsets: Integers, rows: Integers) -> None:
        """Refuse rows whose member does not carry their key: the shard is not the one that was indexed."""
        words = self._words[(self._tokens[offsets] // 4 - tar.BLOCK // 4)[:, None] + np.arange(3)]
        found = index.decimal(np.ascontiguousarray(words).view(np.uint8))
        wrong = np.flatnonzero(found != rows)
        if len(wrong):
            raise ShardError(
                f"{self.path}: the member of row {int(rows[wrong[0]])} has another key; the shard was "
                "altered, restore it or write the set again"
            )

    def runs(self, offsets: Integers, first: int) -> Iterator[Run]:
        """Plan how to read rows, given by their offset in the shard; ``first`` is their place in the block."""
        return even_runs(self._tokens[offsets], first, self._copy)

    def _copy(self, place: int, stride: int, out: npt.NDArray[np.int64]) -> None:
        """Copy the tokens of evenly spaced rows into ``out`` ``[n, T+1]``."""
        self.check_size()
        np.copyto(out, np.ndarray(out.shape, "<u4", self._map, place, (stride, 4)))

    def last_tokens(self, offsets: Integers) -> Integers:
        """Return the last token of each row."""
        return self._words[self._tokens[offsets] // 4 + self._width - 1].astype(np.int64)

    def read_docs(self, offsets: Integers) -> tuple[Integers, Integers]:
        """Return the docs tables of rows, joined, and the entries of each."""
        per_row = self._docs_bytes[offsets] // _ENTRY
        after = np.cumsum(per_row)
        place = np.repeat(self._docs[offsets] // _ENTRY - (after - per_row), per_row)
        place += np.arange(after[-1])
        return self._entries.take(place, axis=0), per_row


class ShardRows:
    """Some rows of a shard set: their docs tables at once, their tokens on demand.

    Attributes:
        docs: int64 ``[K, 4]``, the docs tables of the rows, joined.
        per_row: int64 ``[n]``, entries of each row.
        ended: bool ``[n]``, whether the last token of each row ends its document.
    """

    def __init__(self, parts: list[tuple[_Shard, slice, Integers]], eos_id: int) -> None:
        tables = [shard.read_docs(offsets) for shard, _, offsets in parts]
        self.docs = _joined([table for table, _ in tables])
        self.per_row = _joined([entries for _, entries in tables])
        self.ended = _joined([shard.last_tokens(offsets) for shard, _, offsets in parts]) == eos_id
        self._reader = RunReader(
            [run for shard, place, offsets in parts for run in shard.runs(offsets, place.start)]
        )

    def read_tokens(self, first: int, out: npt.NDArray[np.int64]) -> None:
        """Fill ``out`` ``[m, T+1]`` with the tokens of rows ``first`` to ``first + m - 1`` of the block."""
        self._reader.read(first, out)


def _joined(arrays: list[Integers]) -> Integers:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class ShardSet:
    """A shard set, open for random access; a sequence of rows.

    Args:
        folder: where the set lies.
        manifest: its manifest.

    Attributes:
        manifest: what the set holds.
        order: maps rows to shards.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.order = RowOrder([shard.rows for shard in manifest.shards])
        self._width = manifest.sequence_length + 1
        self._open: OrderedDict[int, _Shard] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.manifest.rows

    def __getitem__(self, row: int) -> Row:
        self.order.locate(row)
        block = self.block(np.array([row], np.int64))
        tokens = np.empty((1, self._width), np.int64)
        block.read_tokens(0, tokens)
        return Row(tokens[0].astype(np.uint32), block.docs.astype(np.int64))

    def __iter__(self) -> Iterator[Row]:
        return (self[row] for row in range(len(self)))

    def block(self, rows: Integers) -> ShardRows:
        """Look up many rows at once, without Python work per row.

        Args:
            rows: int64 ``[n]``, n >= 1, global row indices inside the set.

        Raises:
            ShardError: a shard or an index is missing, cut, altered or stale.
        """
        parts = []
        for number, place, offsets in self.order.split(rows):
            shard = self._shard(number)
            shard.check_size()
            shard.check_keys(offsets[[0, -1]], rows[place][[0, -1]])
            parts.append((shard, place, offsets))
        return ShardRows(parts, self.manifest.eos_id)

    def indexes(self, rows: Integers) -> Iterator[tuple[Path, bytes]]:
        """Yield shards and DALI indexes that together list the tokens of the rows, in their order.

        Args:
            rows: int64 ``[n]``, global row indices inside the set.

        Raises:
            ShardError: a shard or an index is missing, cut or stale.
        """
        for number, _, offsets in self.order.split(rows):
            shard = self._shard(number)
            yield shard.path, index.of_tokens(shard.lines, offsets)

    def _shard(self, number: int) -> _Shard:
        with self._lock:
            shard = self._open.get(number)
            if shard is None:
                info = self.manifest.shards[number]
                shard = self._open[number] = _Shard(self.folder / info.name, info, self._width)
                while len(self._open) > OPEN_SHARDS:
                    self._open.popitem(last=False)
            self._open.move_to_end(number)
            return shard


def open_shards(folder: str | os.PathLike[str]) -> ShardSet:
    """Open a shard set.

    Reads the manifest and the list of files, nothing else; a shard is opened when a row of it is read. Every
    read compares the shard's size, its index's checksum and the keys at both ends of what is read; run
    ``verify_shards`` to check every byte.

    Args:
        folder: the folder of the set.

    Returns:
        The set; ``len(set)`` rows, ``set[i]`` is row i.

    Raises:
        ShardError: the manifest or a shard is missing, or the manifest is damaged.
    """
    manifest = load_manifest(folder)
    present = set(os.listdir(folder))
    for shard in manifest.shards:
        for name in (shard.name, index.index_path(Path(shard.name)).name):
            if name not in present:
                raise ShardError(f"{Path(folder) / name} is missing; restore it or write the set again")
    return ShardSet(Path(folder), manifest)
