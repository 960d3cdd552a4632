"""Exact resume: the position is one integer and a digest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zgcm_data import Loader, LoaderOptions, ShardSet, row_in_stage

pytestmark = pytest.mark.usefixtures("small_steps")


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_chain_of_saves_restores_and_topologies_reads_every_row_once(
    shards25: ShardSet, data: st.DataObject
) -> None:
    """At each stop, go on with another number of ranks, micro batch and global batch."""
    options = LoaderOptions(epochs=3, workers=data.draw(st.integers(0, 2)), prefetch=1)
    state, read = {"next_row": 0, "digest": shards25.manifest.digest}, []
    for _ in range(data.draw(st.integers(1, 6))):
        dp, micro, accumulation = (data.draw(st.integers(1, 3)) for _ in range(3))
        loaders = [
            Loader(shards25, dp * micro * accumulation, rank, dp, micro, options=options)
            for rank in range(dp)
        ]
        for loader in loaders:
            loader.load_state_dict(state)
        streams = [iter(loader) for loader in loaders]
        for _ in range(data.draw(st.integers(0, 4))):
            step = [next(stream, None) for stream in streams]
            read += [row for batch in step if batch is not None for row in batch.rows.tolist()]
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert read == list(range(len(read)))
    assert state["next_row"] == len(read)


@pytest.mark.parametrize("stop", [0, 1, 5, 6, 7, 12])
def test_d26_restore_at_the_first_a_middle_and_the_last_batch(shards25: ShardSet, stop: int) -> None:
    options = LoaderOptions(epochs=2)
    whole = [batch.rows.tolist() for batch in Loader(shards25, 4, micro_batch=4, options=options)]
    first = Loader(shards25, 4, micro_batch=4, options=options)
    stream = iter(first)
    before = [next(stream).rows.tolist() for _ in range(stop)]
    second = Loader(shards25, 4, micro_batch=4, options=options)
    second.load_state_dict(first.state_dict())
    assert before + [batch.rows.tolist() for batch in second] == whole
    assert len(whole) == 12


def test_d14_after_the_last_batch_a_new_epoch_starts_at_its_first_row(shards25: ShardSet) -> None:
    """N = 25, batch 4: the sixth update ends at row 24; an epoch edge is nothing special."""
    ended = Loader(shards25, 4, micro_batch=4)
    assert len(list(ended)) == 6
    state = ended.state_dict()
    assert state["next_row"] == 24
    longer = Loader(shards25, 4, micro_batch=4, options=LoaderOptions(epochs=2))
    longer.load_state_dict(state)
    batches = list(longer)
    assert [b.rows.tolist() for b in batches][:2] == [[24, 25, 26, 27], [28, 29, 30, 31]]
    assert batches[0].tokens[1].tolist() == shards25[0].tokens.tolist()
    fresh = Loader(shards25, 4, micro_batch=4)
    assert next(iter(fresh)).rows.tolist() == [0, 1, 2, 3]


def test_the_padded_end_is_a_position_too(shards25: ShardSet) -> None:
    loader = Loader(shards25, 4, micro_batch=2, options=LoaderOptions(remainder="pad"))
    assert len(loader) == 7
    list(loader)
    assert loader.state_dict()["next_row"] == 25
    assert len(loader) == 0


def test_a_state_of_other_data_is_refused_with_both_digests(
    tmp_path: Path, shard_set: Callable[..., ShardSet], shards25: ShardSet
) -> None:
    other = shard_set(tmp_path, 25, seed=9)
    state = Loader(other, 5).state_dict()
    with pytest.raises(ValueError, match=r"loader state belongs") as error:
        Loader(shards25, 5).load_state_dict(state)
    assert other.manifest.digest in str(error.value)
    assert shards25.manifest.digest in str(error.value)


def test_the_same_rows_in_another_order_or_with_another_seed_have_another_digest(
    tmp_path: Path, shard_set: Callable[..., ShardSet], header: Callable[..., Any]
) -> None:
    from zgcm_data import write_shards

    rows = list(shard_set(tmp_path / "a", 6))
    digests = [
        write_shards(tmp_path / "b", rows, header(32, seed=0)).digest,
        write_shards(tmp_path / "c", rows[::-1], header(32, seed=0)).digest,
        write_shards(tmp_path / "d", rows, header(32, seed=1)).digest,
    ]
    assert len(set(digests)) == 3


def test_a_state_that_is_not_one_is_refused(shards25: ShardSet) -> None:
    loader = Loader(shards25, 5)
    with pytest.raises(ValueError, match=r"lacks \['next_row'\]"):
        loader.load_state_dict({"digest": "x"})
    with pytest.raises(ValueError, match="start row 99 is outside"):
        loader.load_state_dict({"next_row": 99, "digest": shards25.manifest.digest})


def test_a_stage_hand_over_keeps_global_counters_and_starts_at_row_0() -> None:
    stage_1, stage_2 = 61_035_264, 195_313_152
    assert row_in_stage(stage_1, stage_1, stage_2) == 0
    assert row_in_stage(stage_1 + 768, stage_1, stage_2) == 768
    with pytest.raises(ValueError, match=r"resume the stage before it"):
        row_in_stage(stage_1 - 768, stage_1, stage_2)
    with pytest.raises(ValueError, match=r"past the 195313152 rows"):
        row_in_stage(stage_1 + stage_2 + 1, stage_1, stage_2)
