"""A large set costs no more to open, to enter far inside, or to hold than a small one."""

import gc
import hashlib
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zgcm_data import Loader, Manifest, ManifestHeader, Row, RowOrder, ShardSet, open_shards
from zgcm_data.shards import index, tar
from zgcm_data.shards.manifest import ShardInfo, save_manifest
from zgcm_data.shards.read import OPEN_SHARDS, _Shard

FAR = 61_035_264
PER_SHARD = 4096


def _shard(folder: Path, number: int, first: int, header: ManifestHeader) -> ShardInfo:
    """Write one shard of a larger set."""
    data, lines = [], []
    rng, size = np.random.default_rng(number), 0
    for row in range(first, first + PER_SHARD):
        tokens = rng.integers(8, 1000, header.sequence_length + 1).astype("<u4").tobytes()
        docs = np.array([[0, 0, row, 0]], "<i8").tobytes()
        members = [tar.member(tar.key(row), s, d) for s, d in (("tokens.bin", tokens), ("docs.bin", docs))]
        start = size + 512
        lines.append(index.line(tar.key(row), (start, len(tokens)), (start + len(members[0]), 32)))
        data += members
        size += sum(map(len, members))
    whole = b"".join([*data, tar.END_OF_ARCHIVE])
    listing = index.header(PER_SHARD) + b"".join(lines)
    (folder / f"shard-{number:06d}.tar").write_bytes(whole)
    (folder / f"shard-{number:06d}.idx").write_bytes(listing)
    digests = [hashlib.sha256(part).hexdigest() for part in (whole, listing)]
    return ShardInfo(f"shard-{number:06d}.tar", PER_SHARD, len(whole), *digests)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, header: Callable[..., ManifestHeader]) -> Path:
    """61 million rows in 14,902 shards, of which only the first and the last hold data of their own."""
    folder = tmp_path_factory.mktemp("large")
    count = FAR // PER_SHARD + 1
    plain = header(32, sources=1)
    first, last = _shard(folder, 0, 0, plain), _shard(folder, count - 1, (count - 1) * PER_SHARD, plain)
    shards = [first]
    for number in range(1, count - 1):
        for suffix in ("tar", "idx"):
            os.link(folder / f"shard-000000.{suffix}", folder / f"shard-{number:06d}.{suffix}")
        shards.append(
            ShardInfo(f"shard-{number:06d}.tar", PER_SHARD, first.bytes, first.sha256, first.index_sha256)
        )
    save_manifest(folder, Manifest.build(plain, plain.sources, (*shards, last)))
    return folder


def _first_batch(folder: Path, row: int) -> tuple[float, list[int]]:
    """Open the set and read one batch; CPU seconds of all threads, so that a busy machine does not matter."""
    started = time.process_time()
    loader = Loader(open_shards(folder), 8, micro_batch=8, start_row=row)
    rows = next(iter(loader)).rows.tolist()
    return time.process_time() - started, rows


def test_opening_at_row_61_035_264_takes_as_long_as_at_row_0(large: Path) -> None:
    far_row = FAR - FAR % PER_SHARD + 100
    times: dict[int, list[float]] = {0: [], far_row: []}
    for row in (0, far_row) * 4:
        seconds, rows = _first_batch(large, row)
        times[row].append(seconds)
        assert rows == list(range(row, row + 8))
    assert min(times[far_row]) < min(times[0]) + 0.2


def test_a_row_is_located_without_scanning() -> None:
    order = RowOrder([PER_SHARD] * 15_000)
    assert order.locate(FAR) == (FAR // PER_SHARD, FAR % PER_SHARD)
    uneven = RowOrder([3, 1, 5])
    assert [uneven.locate(row) for row in range(9)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4),
    ]  # fmt: skip
    with pytest.raises(IndexError, match="row 9 is not among the 9"):
        uneven.locate(9)


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> "weakref.WeakSet[_Shard]":
    """The shards that this process holds open and mapped now."""
    alive: weakref.WeakSet[_Shard] = weakref.WeakSet()
    opened = _Shard.__init__

    def open_and_note(self: _Shard, *arguments: Any) -> None:
        opened(self, *arguments)
        alive.add(self)

    monkeypatch.setattr(_Shard, "__init__", open_and_note)
    return alive


def test_memory_does_not_grow_with_the_set(
    tmp_path: Path,
    shard_set: Callable[..., ShardSet],
    mapped: "weakref.WeakSet[_Shard]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many shards go by, only a few are mapped: those kept open and those of rows ready to go."""
    monkeypatch.setattr("zgcm_data.loader.fields.BLOCK_ROWS", 2)
    most = []
    for name, rows in (("small", 40), ("large", 400)):
        shards = shard_set(tmp_path / name, rows, rows_per_shard=4)
        most.append(max(len(mapped) for _ in Loader(shards, 2, micro_batch=2)))
        del shards
        gc.collect()
    assert most[0] >= OPEN_SHARDS
    assert most[1] <= most[0] + 1 <= OPEN_SHARDS + 6


def test_one_row_is_like_any_other(large: Path) -> None:
    row: Row = open_shards(large)[FAR - FAR % PER_SHARD]
    assert row.docs.tolist() == [[0, 0, FAR - FAR % PER_SHARD, 0]]
