"""Indexed datasets against the reader and the builder of megatron-core, in an environment that holds it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from zgcm_data import Loader, ManifestHeader, ShardSet, TokenizedDocument
from zgcm_data.megatron import read_indexed, to_megatron, token_type, write_indexed
from zgcm_data.megatron_rows import open_indexed

indexed = pytest.importorskip(
    "megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed"
)


@pytest.mark.parametrize("vocab_size", [1000, 65_499, 65_500, 154_880])
def test_megatron_reads_what_we_write(
    tmp_path: Path, documents: Callable[..., list[TokenizedDocument]], vocab_size: int
) -> None:
    written = [d.tokens for d in documents(50)]
    write_indexed(tmp_path / "a", written, vocab_size=vocab_size)
    theirs = indexed.IndexedDataset(str(tmp_path / "a"))
    assert theirs.index.dtype == token_type(vocab_size) == indexed.DType.optimal_dtype(vocab_size)
    assert len(theirs) == 50
    assert theirs.document_indices.tolist() == list(range(51))
    for found, wanted in zip((theirs[i] for i in range(50)), written, strict=True):
        assert found.tolist() == wanted.tolist()
    assert theirs.get(3, offset=1).tolist() == written[3][1:].tolist()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_we_read_what_megatron_writes(
    tmp_path: Path, documents: Callable[..., list[TokenizedDocument]], dtype: type
) -> None:
    made = documents(30)
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=dtype)
    for document in made:
        half = len(document.tokens) // 2
        for part in (document.tokens[:half], document.tokens[half:]):
            builder.add_item(torch.from_numpy(part.astype(np.int64)))
        builder.end_document()
    builder.finalize(str(tmp_path / "a.idx"))
    ours = read_indexed(tmp_path / "a")
    assert ours.dtype == dtype
    assert len(ours) == 60
    for found, wanted in zip(ours.documents(), made, strict=True):
        assert found.tolist() == wanted.tokens.tolist()


def test_our_file_is_theirs_to_the_byte(
    tmp_path: Path, documents: Callable[..., list[TokenizedDocument]]
) -> None:
    made = documents(30)
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    for document in made:
        builder.add_document(torch.from_numpy(document.tokens.astype(np.int64)), [len(document.tokens)])
    builder.finalize(str(tmp_path / "a.idx"))
    write_indexed(tmp_path / "b", [d.tokens for d in made], vocab_size=1000)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


def test_rows_are_the_stream_that_megatron_reads(
    tmp_path: Path, shard_set: Callable[..., ShardSet], header: Callable[..., ManifestHeader]
) -> None:
    shards = shard_set(tmp_path / "set", 30)
    to_megatron(shards, shards.manifest, tmp_path / "a")
    theirs = indexed.IndexedDataset(str(tmp_path / "a"))
    stream = np.concatenate([theirs[i] for i in range(len(theirs))]).tolist()
    for batch in Loader(open_indexed(tmp_path / "a", header(32, sources=1)), 3, micro_batch=3):
        for tokens, row in zip(batch.tokens, batch.rows.tolist(), strict=True):
            assert tokens.tolist() == stream[row * 32 : row * 32 + 33]
