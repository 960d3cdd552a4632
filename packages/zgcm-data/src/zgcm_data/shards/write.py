"""Write a shard set: shard by shard under a temporary name, the manifest last.

A shard that exists and already holds the very bytes to be written is kept, so an interrupted writer that is
run again with the same rows goes on where it stopped.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from zgcm_data.masks import count_row
from zgcm_data.rows import Row, describe_row_fault
from zgcm_data.shards import index, tar
from zgcm_data.shards.manifest import FILE_NAME, Manifest, ManifestHeader, ShardInfo, save_manifest

ROWS_PER_SHARD = 4096


class _ResumableFile:
    """Writes a file, or finds that it already holds the same bytes and leaves it alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.hash = hashlib.sha256()
        self._temporary = path.with_name(path.name + ".tmp")
        self._present: IO[bytes] | None = path.open("rb") if path.exists() else None
        self._file: IO[bytes] | None = None if self._present else self._temporary.open("wb")

    def write(self, data: bytes) -> None:
        if self._present is not None and self._present.read(len(data)) != data:
            self._diverge()
        if self._file is not None:
            with self._explained():
                self._file.write(data)
        self.hash.update(data)
        self.size += len(data)

    def _diverge(self) -> None:
        """Start the temporary file with what was equal so far, and give up the set that was there."""
        assert self._present is not None
        (self.path.parent / FILE_NAME).unlink(missing_ok=True)
        self._file = self._temporary.open("wb")
        self._present.seek(0)
        left = self.size
        while left:
            piece = self._present.read(min(left, 1 << 20))
            self._file.write(piece)
            left -= len(piece)
        self._present.close()
        self._present = None

    def finish(self) -> None:
        if self._present is not None and self._present.read(1):
            self._diverge()
        if self._file is not None:
            with self._explained():
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                self._temporary.replace(self.path)
        self.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say which file could not be written, and that nothing finished is lost."""
        try:
            yield
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}; make room and run again, shards before it are kept",
                str(self.path),
            ) from error

    def close(self) -> None:
        for file in (self._present, self._file):
            if file is not None:
                file.close()


class _ShardWriter:
    """One shard and the index beside it."""

    def __init__(self, folder: Path, number: int) -> None:
        self._file = _ResumableFile(folder / f"shard-{number:06d}.tar")
        self._lines: list[bytes] = []

    @property
    def rows(self) -> int:
        return len(self._lines)

    def add(self, number: int, row: Row) -> None:
        key = tar.key(number)
        tokens, docs = row.tokens.astype("<u4").tobytes(), row.docs.astype("<i8").tobytes()
        first = tar.member(key, tar.TOKENS_SUFFIX, tokens)
        start = self._file.size + tar.BLOCK
        self._lines.append(index.line(key, (start, len(tokens)), (start + len(first), len(docs))))
        self._file.write(first + tar.member(key, tar.DOCS_SUFFIX, docs))

    def finish(self) -> ShardInfo:
        self._file.write(tar.END_OF_ARCHIVE)
        self._file.finish()
        beside = _ResumableFile(index.index_path(self._file.path))
        beside.write(index.header(self.rows) + b"".join(self._lines))
        beside.finish()
        return ShardInfo(
            name=self._file.path.name,
            rows=self.rows,
            bytes=self._file.size,
            sha256=self._file.hash.hexdigest(),
            index_sha256=beside.hash.hexdigest(),
        )

    def close(self) -> None:
        self._file.close()


def write_shards(
    folder: str | os.PathLike[str],
    rows: Iterable[Row],
    header: ManifestHeader,
    *,
    rows_per_shard: int = ROWS_PER_SHARD,
) -> Manifest:
    """Write rows as a shard set; the same rows and header give the same bytes and digest.

    Documents and tokens of each source are counted here, exactly: tokens are targets, so that over a set of
    ``concatenate`` rows they add up to rows times T; a document counts where its end is a target.

    Args:
        folder: made if need be; holds nothing but this set.
        rows: in the order in which they are to be learned.
        header: what the set is.
        rows_per_shard: rows of every shard but the last.

    Returns:
        The manifest, which was also written.

    Raises:
        ValueError: there are no rows, or a row does not fit the header.
        OSError: the folder cannot be written; finished shards stay and are kept by the next run.
    """
    if rows_per_shard < 1:
        raise ValueError(f"rows_per_shard is {rows_per_shard}; use 1 or more")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    counts = np.zeros((2, len(header.sources)), np.int64)
    shards = _write_all(target, rows, header, rows_per_shard, counts)
    if not shards:
        raise ValueError(f"no rows to write to {target}: the documents hold less than one row of tokens")
    sources = tuple(
        dataclasses.replace(source, documents=int(counts[0, source.id]), tokens=int(counts[1, source.id]))
        for source in header.sources
    )
    manifest = Manifest.build(header, sources, tuple(shards))
    _remove_leftovers(target, len(shards))
    save_manifest(target, manifest)
    return manifest


def _write_all(
    folder: Path, rows: Iterable[Row], header: ManifestHeader, rows_per_shard: int, counts: np.ndarray
) -> list[ShardInfo]:
    shards: list[ShardInfo] = []
    writer: _ShardWriter | None = None
    try:
        for number, row in enumerate(rows):
            fault = describe_row_fault(
                row, header.sequence_length + 1, header.vocab_size, len(header.sources)
            )
            if fault is not None:
                raise ValueError(f"row {number} cannot be written: {fault}")
            writer = writer or _ShardWriter(folder, len(shards))
            writer.add(number, row)
            count_row(row, header.eos_id, counts)
            if writer.rows == rows_per_shard:
                shards.append(writer.finish())
                writer = None
        if writer is not None:
            shards.append(writer.finish())
    finally:
        if writer is not None:
            writer.close()
    return shards


def _remove_leftovers(folder: Path, shards: int) -> None:
    """Remove shards of an earlier, longer set, and temporary files of an interrupted one."""
    for path in sorted(folder.glob("shard-*")):
        number = path.name.removeprefix("shard-").split(".")[0]
        if path.name.endswith(".tmp") or (number.isdecimal() and int(number) >= shards):
            (folder / FILE_NAME).unlink(missing_ok=True)
            path.unlink()
