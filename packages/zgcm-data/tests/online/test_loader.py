"""The loader: which rows, in which order, with which masks and counts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zgcm_data import Batch, Loader, LoaderOptions, Row, ShardSet

pytestmark = pytest.mark.usefixtures("small_steps")


def rows_of(batches: list[Batch]) -> list[int]:
    return [int(row) for batch in batches for row in batch.rows]


def updates(shards: ShardSet, global_batch: int, dp_size: int, micro: int, start: int = 0) -> list[set[int]]:
    """Rows of each update, over all ranks."""
    loaders = [Loader(shards, global_batch, rank, dp_size, micro, start) for rank in range(dp_size)]
    ranks = [[[int(r) for r in batch.rows] for batch in loader] for loader in loaders]
    size = loaders[0].accumulation
    assert len({len(rank) for rank in ranks}) == 1
    found = []
    for first in range(0, len(ranks[0]), size):
        seen = [row for rank in ranks for micro_rows in rank[first : first + size] for row in micro_rows]
        assert len(seen) == len(set(seen)) == global_batch
        found.append(set(seen))
    return found


@given(
    start=st.integers(0, 25),
    dp_size=st.integers(1, 4),
    micro=st.integers(1, 3),
    accumulation=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_update_k_covers_the_same_rows_for_every_number_of_ranks(
    shards25: ShardSet, start: int, dp_size: int, micro: int, accumulation: int
) -> None:
    batch = dp_size * micro * accumulation
    found = updates(shards25, batch, dp_size, micro, start)
    assert found == [
        set(range(start + k * batch, start + (k + 1) * batch)) for k in range((25 - start) // batch)
    ]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("workers", [0, 2, 5])
def test_the_order_is_the_manifests_for_any_ranks_and_workers(
    shards25: ShardSet, dp_size: int, workers: int
) -> None:
    options = LoaderOptions(workers=workers, epochs=2, prefetch=2)
    loaders = [Loader(shards25, dp_size, rank, dp_size, options=options) for rank in range(dp_size)]
    merged = [int(b.rows[0]) for step in zip(*loaders, strict=True) for b in step]
    assert merged == list(range(50 // dp_size * dp_size))


def test_epochs_repeat_the_rows_in_the_manifests_order(shards25: ShardSet) -> None:
    batches = list(Loader(shards25, 5, micro_batch=5, options=LoaderOptions(epochs=2)))
    assert rows_of(batches) == list(range(50))
    assert torch.equal(batches[0].tokens, batches[5].tokens)


def test_tokens_are_those_of_the_rows(shards25: ShardSet) -> None:
    for batch in Loader(shards25, 4, micro_batch=2):
        assert (batch.tokens.dtype, tuple(batch.tokens.shape)) == (torch.int64, (2, 33))
        for i, row in enumerate(batch.rows.tolist()):
            assert batch.tokens[i].tolist() == shards25[row].tokens.tolist()


def reference(row: Row, eos: int, *, isolate: bool) -> dict[str, Any]:
    """What a row's batch fields must be, position by position."""
    width = len(row.tokens)
    bounds = [*row.docs[:, 0].tolist(), width]
    owner = [k for k in range(len(row.docs)) for _ in range(bounds[k], bounds[k + 1])]
    source = row.docs[:, 1].tolist()
    real = [source[k] >= 0 for k in owner]
    first = [p in bounds[1:-1] for p in range(width)]
    mask = [real[p] and not (isolate and first[p]) for p in range(1, width)]
    tokens, loss, ended = (dict.fromkeys(range(3), 0) for _ in range(3))
    for p in range(1, width):
        if not real[p]:
            continue
        whose = source[owner[p]]
        tokens[whose] += 1
        loss[whose] += mask[p - 1]
        ended[whose] += int(row.tokens[p]) == eos
    return {
        "loss_mask": mask,
        "document_ids": [k if real[p] else -1 for p, k in enumerate(owner[:-1])],
        "source_tokens": list(tokens.values()),
        "source_loss_tokens": list(loss.values()),
        "source_documents": list(ended.values()),
        "source_rows": [int(v > 0) for v in tokens.values()],
    }


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("longest", [6, 25, 150])
def test_masks_ids_and_counts_equal_a_count_by_hand(
    tmp_path: Path, shard_set: Callable[..., ShardSet], isolate: bool, packing: str, longest: int
) -> None:
    shards = shard_set(tmp_path, 23, packing=packing, longest=longest)
    loader = Loader(shards, 3, micro_batch=3, options=LoaderOptions(isolate_documents=isolate))
    for batch in loader:
        wanted = [reference(shards[r], shards.manifest.eos_id, isolate=isolate) for r in batch.rows.tolist()]
        assert batch.loss_mask.tolist() == [w["loss_mask"] for w in wanted]
        assert batch.document_ids.tolist() == [w["document_ids"] for w in wanted]
        for name in ("source_tokens", "source_loss_tokens", "source_documents", "source_rows"):
            total = np.sum([w[name] for w in wanted], axis=0).tolist()
            assert getattr(batch, name).tolist() == total, name
        assert int(batch.source_loss_tokens.sum()) == int(batch.loss_mask.sum())


def test_isolation_leaves_out_exactly_the_first_target_of_each_document(shards25: ShardSet) -> None:
    """Rule R4: what is learned is apart from what is seen; a first token has nothing of its own to see."""
    open_, isolated = (
        next(iter(Loader(shards25, 25, micro_batch=25, options=LoaderOptions(isolate_documents=on))))
        for on in (False, True)
    )
    assert bool(open_.loss_mask.all())
    begins = sum(len(row.docs) - 1 for row in shards25)
    assert int((~isolated.loss_mask).sum()) == begins > 0


def test_d08_keys_hold_no_dot_and_every_row_is_found(shards25: ShardSet) -> None:
    import tarfile

    names = []
    for shard in shards25.manifest.shards:
        with tarfile.open(shards25.folder / shard.name) as archive:
            names += archive.getnames()
    assert names == [f"{row:012d}.{suffix}" for row in range(25) for suffix in ("tokens.bin", "docs.bin")]


def test_d10_more_workers_and_ranks_than_shards(tmp_path: Path, shard_set: Callable[..., ShardSet]) -> None:
    shards = shard_set(tmp_path, 12, rows_per_shard=4)
    assert len(shards.manifest.shards) == 3
    options = LoaderOptions(workers=8)
    ranks = [rows_of(list(Loader(shards, 2, rank, 2, options=options))) for rank in range(2)]
    assert [len(rank) for rank in ranks] == [6, 6]
    assert sorted(ranks[0] + ranks[1]) == list(range(12))


def test_d11_padding_of_the_last_batch_counts_nothing(
    tmp_path: Path, shard_set: Callable[..., ShardSet]
) -> None:
    shards = shard_set(tmp_path, 10)
    options = LoaderOptions(remainder="pad")
    ranks = [list(Loader(shards, 12, rank, 4, 3, options=options)) for rank in range(4)]
    assert sorted(row for rank in ranks for row in rows_of(rank) if row >= 0) == list(range(10))
    assert sum(int(b.source_tokens.sum()) for rank in ranks for b in rank) == 10 * 32
    for batch in (b for rank in ranks for b in rank):
        filler = batch.rows < 0
        assert not bool(batch.loss_mask[filler].any())
        assert bool(batch.loss_mask[~filler].all())
        assert bool((batch.document_ids[filler] == -1).all())
    exact = [Loader(shards, 12, rank, 4, 3) for rank in range(4)]
    assert [len(list(loader)) for loader in exact] == [0] * 4
    assert [loader.dropped_rows for loader in exact] == [10] * 4


def test_d12_a_pass_ends_after_its_last_row(shards25: ShardSet) -> None:
    loader = Loader(shards25, 5)
    assert rows_of(list(loader)) == list(range(25))
    assert list(loader) == []
    assert len(loader) == 0


def test_d16_ranks_of_one_replica_read_the_same_rows_and_count_once(shards25: ShardSet) -> None:
    """TP 2 x CP 2 x DP 1: four processes, all with data-parallel rank 0 of 1."""
    loaders = [Loader(shards25, 4, dp_rank=0, dp_size=1, micro_batch=4) for _ in range(4)]
    first = [next(iter(loader)) for loader in loaders]
    assert all(batch.rows.tolist() == [0, 1, 2, 3] for batch in first)
    assert [loader.state_dict()["next_row"] for loader in loaders] == [4] * 4


def test_d17_another_batch_size_goes_on_with_the_next_row(shards25: ShardSet) -> None:
    loader = Loader(shards25, 4, micro_batch=4)
    stream = iter(loader)
    assert rows_of([next(stream) for _ in range(3)]) == list(range(12))
    wider = Loader(shards25, 6, micro_batch=6)
    wider.load_state_dict(loader.state_dict())
    assert next(iter(wider)).rows.tolist() == [12, 13, 14, 15, 16, 17]


def test_d19_a_mask_never_leaks_into_another_batch(
    tmp_path: Path, shard_set: Callable[..., ShardSet]
) -> None:
    shards = shard_set(tmp_path, 8, packing="best_fit")
    padded, *others = list(Loader(shards, 1))
    before = [batch.loss_mask.clone() for batch in others]
    padded.loss_mask.fill_(False)
    padded.tokens.fill_(0)
    assert all(torch.equal(batch.loss_mask, was) for batch, was in zip(others, before, strict=True))
    again = list(Loader(shards, 1))[1:]
    assert all(torch.equal(batch.loss_mask, was) for batch, was in zip(again, before, strict=True))


def test_d24_same_seed_same_order_and_disjoint_ranks(shards25: ShardSet) -> None:
    runs = [[rows_of(list(Loader(shards25, 4, rank, 4))) for rank in range(4)] for _ in range(2)]
    assert runs[0] == runs[1]
    every = [row for rank in runs[0] for row in rank]
    assert len(every) == len(set(every)) == 24


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch": 0}, "global_batch is 0"),
        (
            {"global_batch": 6, "dp_size": 4},
            "global_batch 6 is not a multiple of micro_batch 1 times dp_size 4",
        ),
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank 2 is not below dp_size 2"),
        ({"micro_batch": -1}, "micro_batch is -1"),
        ({"start_row": 26}, "start row 26 is outside the 25 rows"),
        ({"start_row": -1}, "start row -1 is outside"),
        ({"start_row": 1.5}, "start row is 1.5; use an integer"),
        ({"backend": "daly"}, "backend is 'daly'; choose"),
    ],
)
def test_wrong_numbers_are_refused_by_name(shards25: ShardSet, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(shards25, **{"global_batch": 4, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"workers": -1}, "workers is -1"),
        ({"prefetch": 0}, "prefetch is 0"),
        ({"remainder": "keep"}, "choose 'drop' or 'pad'"),
        ({"timeout": 0}, "seconds above 0"),
    ],
)
def test_wrong_options_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoaderOptions(**changes)


def test_a_run_can_say_what_it_reads_and_how_documents_are_treated(shards25: ShardSet) -> None:
    published = Loader(shards25, 4).describe()
    assert published["cross_document_attention"] is True
    assert (published["digest"], published["rows"]) == (shards25.manifest.digest, 25)
    assert (published["accumulation"], published["dropped_rows"], published["next_row"]) == (4, 1, 0)
    isolated = Loader(shards25, 4, options=LoaderOptions(isolate_documents=True)).describe()
    assert isolated["cross_document_attention"] is False


@pytest.mark.parametrize(("cores", "threads"), [(1, 0), (2, 1), (64, 1)])
def test_a_reading_thread_is_used_where_there_is_a_core_for_it(
    monkeypatch: pytest.MonkeyPatch, shards25: ShardSet, cores: int, threads: int
) -> None:
    monkeypatch.setattr("zgcm_data.loader.options.usable_cores", lambda: cores)
    assert LoaderOptions().threads == threads
    assert LoaderOptions(workers=3).threads == 3
    assert [batch.rows.tolist() for batch in Loader(shards25, 5)] == [[row] for row in range(25)]


def test_a_batch_moves_what_the_model_reads(shards25: ShardSet) -> None:
    batch = next(iter(Loader(shards25, 5, micro_batch=5)))
    moved = batch.to("meta")
    assert {moved.tokens.device.type, moved.loss_mask.device.type, moved.document_ids.device.type} == {"meta"}
    assert moved.rows.tolist() == [0, 1, 2, 3, 4]
    on_device = next(iter(Loader(shards25, 5, micro_batch=5, options=LoaderOptions(device="meta"))))
    assert on_device.tokens.is_meta


@pytest.mark.parametrize("dp_size", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_many_short_documents_are_read_right(
    tmp_path: Path, shard_set: Callable[..., ShardSet], dp_size: int, workers: int
) -> None:
    """More than 16 documents need a second block, so the members of such a set are spaced unevenly."""
    shards = shard_set(tmp_path, 60, sequence_length=96, longest=10, rows_per_shard=11)
    sizes = [-(-len(row.docs) * 32 // 512) for row in shards]
    assert len(set(sizes)) > 1
    ranks = [
        Loader(shards, 2 * dp_size, rank, dp_size, 2, options=LoaderOptions(workers=workers))
        for rank in range(dp_size)
    ]
    read = []
    for batch in (batch for loader in ranks for batch in loader):
        for tokens, documents, row in zip(batch.tokens, batch.document_ids, batch.rows.tolist(), strict=True):
            wanted = reference(shards[row], shards.manifest.eos_id, isolate=False)
            assert tokens.tolist() == shards[row].tokens.tolist()
            assert documents.tolist() == wanted["document_ids"]
            read.append(row)
    assert sorted(read) == list(range(60))
