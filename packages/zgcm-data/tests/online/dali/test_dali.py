"""The dali backend equals the python backend, and plain DALI reads the shards.

Runs where ``zgcm-data[dali]`` is installed; no GPU is needed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zgcm_data import Batch, Loader, LoaderOptions, ShardError, ShardSet, open_shards
from zgcm_data.loader import dali as backend

dali = pytest.importorskip("nvidia.dali", reason="zgcm-data[dali] is not installed")

pytestmark = pytest.mark.usefixtures("small_steps")


def assert_same(found: list[Batch], wanted: list[Batch]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        for name in Batch.__slots__:
            assert torch.equal(getattr(one, name), getattr(other, name)), name


def both(shards: ShardSet, **settings_: Any) -> None:
    found, wanted = (list(Loader(shards, backend=name, **settings_)) for name in ("dali", "python"))
    assert_same(found, wanted)


@given(
    start=st.integers(0, 60),
    dp_size=st.integers(1, 4),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 2),
    isolate=st.booleans(),
    remainder=st.sampled_from(["drop", "pad"]),
)
@settings(max_examples=25, deadline=None)
def test_output_is_identical(
    shards25: ShardSet, start: int, dp_size: int, micro: int, accumulation: int, isolate: bool, remainder: Any
) -> None:
    options = LoaderOptions(epochs=3, isolate_documents=isolate, remainder=remainder)
    size = dp_size * micro * accumulation
    for rank in range(dp_size):
        both(
            shards25,
            global_batch=size,
            dp_rank=rank,
            dp_size=dp_size,
            micro_batch=micro,
            start_row=start,
            options=options,
        )


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize(("stretch", "read"), [(1, 32), (3, 64), (5, 1000), (50, 100)])
def test_stretches_and_reads_of_any_length_join_without_a_seam(
    tmp_path: Path,
    shard_set: Callable[..., ShardSet],
    monkeypatch: pytest.MonkeyPatch,
    packing: str,
    stretch: int,
    read: int,
) -> None:
    monkeypatch.setattr("zgcm_data.loader.fields.BLOCK_ROWS", 2)
    monkeypatch.setattr(backend, "STRETCH_BLOCKS", stretch)
    monkeypatch.setattr(backend, "READ_TOKENS", read)
    both(shard_set(tmp_path, 40, packing=packing, longest=20), global_batch=2, micro_batch=2)


@pytest.mark.parametrize("workers", [0, 2, 5])
def test_the_order_is_the_manifests_for_any_number_of_threads(shards25: ShardSet, workers: int) -> None:
    options = LoaderOptions(workers=workers, epochs=2)
    ranks = [Loader(shards25, 2, rank, 2, backend="dali", options=options) for rank in range(2)]
    assert [int(b.rows[0]) for step in zip(*ranks, strict=True) for b in step] == list(range(50))


@pytest.mark.parametrize("stop", [0, 1, 5, 6, 12])
def test_d26_restore_at_the_first_a_middle_and_the_last_batch(shards25: ShardSet, stop: int) -> None:
    options = LoaderOptions(epochs=2)
    first = Loader(shards25, 4, micro_batch=4, backend="dali", options=options)
    stream = iter(first)
    before = [next(stream) for _ in range(stop)]
    second = Loader(shards25, 4, micro_batch=4, backend="dali", options=options)
    second.load_state_dict(first.state_dict())
    assert_same(before + list(second), list(Loader(shards25, 4, micro_batch=4, options=options)))


def test_d12_a_pass_ends_after_its_last_row(shards25: ShardSet) -> None:
    loader = Loader(shards25, 5, micro_batch=5, backend="dali")
    assert [row for b in loader for row in b.rows.tolist()] == list(range(25))
    assert list(loader) == []


def test_d11_ten_rows_on_four_ranks_count_ten(tmp_path: Path, shard_set: Callable[..., ShardSet]) -> None:
    shards = shard_set(tmp_path, 10)
    options = LoaderOptions(remainder="pad")
    ranks = [list(Loader(shards, 12, rank, 4, 3, backend="dali", options=options)) for rank in range(4)]
    rows = [row for rank in ranks for b in rank for row in b.rows.tolist() if row >= 0]
    assert sorted(rows) == list(range(10))
    assert sum(int(b.source_tokens.sum()) for rank in ranks for b in rank) == 320


def test_d25_a_stale_index_or_a_cut_shard_is_named(
    tmp_path: Path, shard_set: Callable[..., ShardSet]
) -> None:
    shard_set(tmp_path / "a", 21)
    with (tmp_path / "a" / "shard-000001.tar").open("r+b") as file:
        file.truncate(2048)
    with pytest.raises(ShardError, match=r"shard-000001\.tar has 2048 bytes"):
        list(Loader(open_shards(tmp_path / "a"), 1, backend="dali"))
    shard_set(tmp_path / "b", 21)
    index = tmp_path / "b" / "shard-000002.idx"
    index.write_bytes(index.read_bytes().replace(b"512 ", b"513 ", 1))
    with pytest.raises(ShardError, match=r"shard-000002\.idx is stale"):
        list(Loader(open_shards(tmp_path / "b"), 1, backend="dali"))


def test_only_shard_sets_are_read(shards25: ShardSet) -> None:
    class Rows:
        manifest = shards25.manifest

        def __len__(self) -> int:
            return 25

        def block(self, rows: Any) -> Any:
            return shards25.block(rows)

    with pytest.raises(ValueError, match="reads shard sets, not Rows"):
        list(Loader(Rows(), 5, backend="dali"))


def test_plain_dali_reads_the_shards(shards25: ShardSet) -> None:
    """Nothing of this package is used to read: paths, indexes and suffixes are enough."""
    from nvidia.dali import Pipeline, fn, types

    paths = [str(shards25.folder / shard.name) for shard in shards25.manifest.shards]
    pipeline = Pipeline(batch_size=5, num_threads=1, device_id=None)
    with pipeline:
        outputs = fn.readers.webdataset(
            paths=paths,
            index_paths=[path.replace(".tar", ".idx") for path in paths],
            ext=["tokens.bin", "docs.bin"],
            dtypes=[types.UINT32, types.INT64],
            missing_component_behavior="error",
            name="rows",
        )
        pipeline.set_outputs(*outputs)
    pipeline.build()
    assert pipeline.epoch_size("rows") == 25
    for first in range(0, 25, 5):
        tokens, docs = pipeline.run()
        for place in range(5):
            row = shards25[first + place]
            assert np.array_equal(np.asarray(tokens[place]), row.tokens)
            assert np.array_equal(np.asarray(docs[place]).reshape(-1, 4), row.docs)


@pytest.mark.gpu
def test_batches_are_delivered_on_the_gpu(shards25: ShardSet) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    options = LoaderOptions(device="cuda:0")
    found = list(Loader(shards25, 5, micro_batch=5, backend="dali", options=options))
    assert all(batch.tokens.is_cuda and batch.document_ids.is_cuda for batch in found)
    assert_same([batch.to("cpu") for batch in found], list(Loader(shards25, 5, micro_batch=5)))
