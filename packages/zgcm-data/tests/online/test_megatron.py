"""Megatron's indexed datasets: written, read, converted both ways, and trained on."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zgcm_data import (
    Loader,
    LoaderOptions,
    ManifestHeader,
    ShardError,
    ShardSet,
    TokenizedDocument,
    open_shards,
)
from zgcm_data.megatron import (
    from_megatron,
    indexed_documents,
    read_indexed,
    to_megatron,
    token_type,
    write_indexed,
)
from zgcm_data.megatron_rows import IndexedRows, open_indexed

EOS = 7

pytestmark = pytest.mark.usefixtures("small_steps")


def write(prefix: Path, documents: list[TokenizedDocument], vocab_size: int = 1000) -> list[np.ndarray]:
    ended = [np.append(d.tokens, np.uint32(EOS)) for d in documents]
    write_indexed(prefix, ended, vocab_size=vocab_size)
    return ended


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1000, "uint16"), (65_499, "uint16"), (65_500, "int32"), (154_880, "int32")]
)
def test_the_token_type_follows_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    tokens = np.array([1, vocab_size - 1, 0], np.uint32)
    write_indexed(tmp_path / "a", [tokens], vocab_size=vocab_size)
    dataset = read_indexed(tmp_path / "a")
    assert dataset.dtype == dtype
    assert dataset[0].tolist() == tokens.tolist()


def test_the_files_are_laid_out_as_the_format_says(tmp_path: Path) -> None:
    write_indexed(tmp_path / "a", [np.array([5, 6, 7]), np.array([8, 7])], vocab_size=100)
    assert (tmp_path / "a.bin").read_bytes() == np.array([5, 6, 7, 8, 7], "<u2").tobytes()
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3)
    expected += struct.pack("<2i2q3q", 3, 2, 0, 6, 0, 1, 2)
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_documents_of_several_sequences_are_kept_together(tmp_path: Path) -> None:
    """Sentence-split datasets have more sequences than documents."""
    (tmp_path / "a.bin").write_bytes(np.arange(10, 19, dtype="<u2").tobytes())
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 3)
    (tmp_path / "a.idx").write_bytes(head + struct.pack("<4i4q3q", 2, 3, 1, 3, 0, 4, 10, 12, 0, 2, 4))
    found = [d.tolist() for d in read_indexed(tmp_path / "a").documents()]
    assert found == [[10, 11, 12, 13, 14], [15, 16, 17, 18]]


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("longest", [10, 60, 200])
def test_a_set_becomes_an_indexed_dataset_with_its_documents(
    tmp_path: Path,
    shard_set: Callable[..., ShardSet],
    documents: Callable[..., list[TokenizedDocument]],
    packing: str,
    longest: int,
) -> None:
    shards = shard_set(tmp_path / "set", 30, packing=packing, longest=longest)
    count = to_megatron(shards, shards.manifest, tmp_path / "a")
    found = [d.tolist() for d in read_indexed(tmp_path / "a").documents()]
    assert len(found) == count
    source = {(*d.tokens.tolist(), EOS) for d in documents(30 * 32, longest=longest)}
    whole = [d for d in found if d[-1] == EOS]
    assert len(whole) == sum(s.documents for s in shards.manifest.sources)
    assert all(tuple(d) in source for d in whole)
    if packing == "concatenate":
        stream = [t for d in found for t in d]
        rows = [row.tokens.tolist() for row in shards]
        assert stream == rows[0][:1] + [t for row in rows for t in row[1:]]


def test_there_and_back_gives_the_same_rows(
    tmp_path: Path, header: Callable[..., ManifestHeader], documents: Any
) -> None:
    written = write(tmp_path / "a", documents(60, sources=1))
    one = header(32, sources=1)
    manifest = from_megatron(tmp_path / "a", tmp_path / "set", one, rows_per_shard=7)
    shards = open_shards(tmp_path / "set")
    to_megatron(shards, manifest, tmp_path / "b")
    back = list(read_indexed(tmp_path / "b").documents())
    whole = [d for d in back if d[-1] == EOS]
    assert [d.tolist() for d in whole] == [d.tolist() for d in written[: len(whole)]]
    again = from_megatron(tmp_path / "b", tmp_path / "again", one, rows_per_shard=7)
    direct = open_indexed(tmp_path / "a", one)
    for i, row in enumerate(shards):
        assert row.tokens.tolist() == direct[i].tokens.tolist()
        assert row.docs.tolist() == direct[i].docs.tolist()
    assert again.rows in (manifest.rows, manifest.rows - 1)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=3, max_size=40),
    length=st.integers(1, 24),
    micro=st.integers(1, 3),
    start=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_training_from_a_prefix_equals_training_from_shards(
    tmp_path_factory: pytest.TempPathFactory,
    header: Callable[..., ManifestHeader],
    lengths: list[int],
    length: int,
    micro: int,
    start: int,
) -> None:
    folder = tmp_path_factory.mktemp("prefix")
    rng = np.random.default_rng(0)
    made = [
        TokenizedDocument(0, i, 0, rng.integers(8, 1000, n).astype(np.uint32)) for i, n in enumerate(lengths)
    ]
    write(folder / "a", made)
    one = header(length, sources=1)
    if sum(lengths) + len(lengths) <= length:
        with pytest.raises(ValueError, match="less than a row"):
            open_indexed(folder / "a", one)
        return
    shards_manifest = from_megatron(folder / "a", folder / "set", one, rows_per_shard=5)
    direct = open_indexed(folder / "a", one)
    assert direct.manifest.sources == shards_manifest.sources
    assert len(direct) == shards_manifest.rows
    start = min(start, len(direct))
    options = LoaderOptions(isolate_documents=True, remainder="pad")
    sets: list[Any] = [direct, open_shards(folder / "set")]
    loaders = [Loader(rows, micro, micro_batch=micro, start_row=start, options=options) for rows in sets]
    for found, wanted in zip(*loaders, strict=True):
        for name in type(found).__slots__:
            assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name


def test_a_position_is_bound_to_the_dataset(
    tmp_path: Path, header: Callable[..., ManifestHeader], documents: Any
) -> None:
    one = header(16, sources=1)
    write(tmp_path / "a", documents(40, sources=1))
    write(tmp_path / "b", documents(40, sources=1, seed=3))
    state = Loader(open_indexed(tmp_path / "a", one), 2).state_dict()
    with pytest.raises(ValueError, match="belongs to a data set with digest"):
        Loader(open_indexed(tmp_path / "b", one), 2).load_state_dict(state)
    (tmp_path / "c.idx").write_bytes((tmp_path / "a.idx").read_bytes())
    changed = bytearray((tmp_path / "a.bin").read_bytes())
    changed[5] ^= 1
    (tmp_path / "c.bin").write_bytes(changed)
    (tmp_path / "d").mkdir()
    for name in ("bin", "idx"):
        os.replace(tmp_path / f"c.{name}", tmp_path / "d" / f"a.{name}")
    digests = [open_indexed(tmp_path / p, one, checksum=True).manifest.digest for p in ("a", "d/a")]
    assert digests[0] != digests[1]


def test_documents_get_exactly_one_end(tmp_path: Path) -> None:
    write_indexed(tmp_path / "a", [np.array([9, 10, EOS]), np.array([11, 12])], vocab_size=100)
    assert [d.tokens.tolist() for d in indexed_documents(tmp_path / "a", EOS)] == [[9, 10], [11, 12]]


def test_faults_are_named(tmp_path: Path, documents: Any) -> None:
    with pytest.raises(ShardError, match=r"a\.bin is missing"):
        read_indexed(tmp_path / "a")
    write(tmp_path / "a", documents(10))
    data = (tmp_path / "a.idx").read_bytes()
    os.truncate(tmp_path / "a.bin", 10)
    with pytest.raises(ShardError, match="has 10 bytes, its index says"):
        read_indexed(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(data[:60])
    with pytest.raises(ShardError, match="is truncated"):
        read_indexed(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(b"TNTIDX\0\0" + data[8:])
    with pytest.raises(ShardError, match="is not the index"):
        read_indexed(tmp_path / "a")


def test_a_file_cut_while_it_is_open_is_an_error_not_a_crash(
    tmp_path: Path, header: Callable[..., ManifestHeader], documents: Any
) -> None:
    write(tmp_path / "a", documents(40, sources=1))
    rows: IndexedRows = open_indexed(tmp_path / "a", header(16, sources=1))
    os.truncate(tmp_path / "a.bin", 10)
    with pytest.raises(ShardError, match="it was truncated"):
        rows[0]


@pytest.mark.parametrize(
    ("documents_", "message"),
    [
        ([], "no documents"),
        ([np.array([], np.int64)], "document 0 is empty"),
        ([np.array([100])], "outside 0..99"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(
    tmp_path: Path, documents_: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_indexed(tmp_path / "a", documents_, vocab_size=100)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="holds ids below 2"):
        token_type(2**32)


def test_a_prefix_is_one_concatenated_source(tmp_path: Path, header: Callable[..., ManifestHeader]) -> None:
    with pytest.raises(ValueError, match="not 3 sources packed as 'concatenate'"):
        open_indexed(tmp_path / "a", header(16))
    with pytest.raises(ValueError, match="packed as 'best_fit'"):
        open_indexed(tmp_path / "a", header(16, sources=1, packing="best_fit"))
