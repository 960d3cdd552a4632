"""The ledger: exact, append-only, and true after a crash."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from zgcm_data import Ledger, Loader, LoaderOptions, ShardSet, read_ledger

pytestmark = pytest.mark.usefixtures("small_steps")


def run(path: Path, shards: ShardSet, updates: range, *, rows: int = 0, batch: int = 5) -> None:
    """Train on some updates (1-based) and write one record after each."""
    loader = Loader(shards, batch, micro_batch=batch, start_row=(updates.start - 1) * batch)
    ledger = Ledger(path, stage="one", manifest=shards.manifest)
    for step, micro in zip(updates, loader, strict=False):
        ledger.add(micro)
        done = rows + step * batch
        ledger.write(step=step, global_rows=done, global_tokens=done * 32)


def test_an_interval_holds_exact_counts(tmp_path: Path, shards25: ShardSet) -> None:
    path = tmp_path / "ledger.jsonl"
    run(path, shards25, range(1, 6))
    records = read_ledger(path)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5]
    assert [(r["rows"], r["tokens"], r["loss_tokens"]) for r in records] == [(5, 160, 160)] * 5
    assert records[-1]["global_rows"] == 25
    assert records[-1]["digest"] == shards25.manifest.digest
    for source in shards25.manifest.sources:
        mine = [r["sources"][source.id] for r in records]
        assert sum(m["tokens"] for m in mine) == source.tokens
        assert sum(m["documents"] for m in mine) == source.documents
        assert mine[-1]["epochs"] == 1.0
        assert mine[0]["nominal_share"] == pytest.approx(1 / 3)
    for record in records:
        assert sum(s["observed_share"] for s in record["sources"]) == pytest.approx(1.0)


def test_d22_repeated_exposure_is_on_record(tmp_path: Path, shards25: ShardSet) -> None:
    """A set of 25 rows read for 62 of them: 2.5 times, to within what the rows hold."""
    loader = Loader(shards25, 31, micro_batch=31, options=LoaderOptions(epochs=3))
    ledger = Ledger(tmp_path / "ledger.jsonl", stage="one", manifest=shards25.manifest)
    for step, batch in enumerate(loader, 1):
        ledger.add(batch)
        ledger.write(step=step, global_rows=31 * step, global_tokens=31 * 32 * step)
    second = read_ledger(tmp_path / "ledger.jsonl")[1]
    tokens = [source.tokens for source in shards25.manifest.sources]
    exposure = sum(s["epochs"] * n for s, n in zip(second["sources"], tokens, strict=True)) / sum(tokens)
    assert exposure == pytest.approx(62 / 25)


def test_a_resumed_run_counts_nothing_twice(tmp_path: Path, shards25: ShardSet) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    run(whole, shards25, range(1, 6))
    run(broken, shards25, range(1, 5))
    assert Ledger.rewind(broken, 2) == 2
    run(broken, shards25, range(3, 6))
    assert broken.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("torn", [1, 40, -2, -1])
def test_a_torn_last_line_is_repaired(tmp_path: Path, shards25: ShardSet, torn: int) -> None:
    """A crash may leave any part of the last line; only its end, a line break, may be missing without loss."""
    path = tmp_path / "ledger.jsonl"
    run(path, shards25, range(1, 4))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:torn])
    left = 3 if torn == -1 else 2
    assert len(read_ledger(path)) == left
    Ledger.rewind(path, 3)
    assert path.read_bytes() == b"".join(lines[:left])
    run(path, shards25, range(left + 1, 6))
    assert [r["step"] for r in read_ledger(path)] == [1, 2, 3, 4, 5]


def test_a_ledger_opened_after_a_crash_repairs_itself(tmp_path: Path, shards25: ShardSet) -> None:
    path = tmp_path / "ledger.jsonl"
    run(path, shards25, range(1, 3))
    with path.open("ab") as file:
        file.write(b'{"kind": "interval", "st')
    run(path, shards25, range(3, 4))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_damage_in_the_middle_is_named(tmp_path: Path, shards25: ShardSet) -> None:
    path = tmp_path / "ledger.jsonl"
    run(path, shards25, range(1, 4))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:30] + b"\n" + lines[2])
    with pytest.raises(ValueError, match="line 2 is damaged"):
        read_ledger(path)


def test_a_step_that_is_already_there_is_refused(tmp_path: Path, shards25: ShardSet) -> None:
    path = tmp_path / "ledger.jsonl"
    run(path, shards25, range(1, 4))
    with pytest.raises(ValueError, match="already reaches step 3, so step 2 would count twice"):
        run(path, shards25, range(2, 4))


def test_events_keep_their_place_and_are_rewound_too(tmp_path: Path, shards25: ShardSet) -> None:
    path = tmp_path / "ledger.jsonl"
    run(path, shards25, range(1, 3))
    ledger = Ledger(path, stage="two", manifest=shards25.manifest)
    ledger.event("stage_switch", step=2, global_tokens=320, learning_rate_changed=False)
    ledger.event("learning_rate", step=3, new=1e-4)
    assert [r["kind"] for r in read_ledger(path)] == ["interval", "interval", "stage_switch", "learning_rate"]
    assert Ledger.rewind(path, 2) == 1
    assert read_ledger(path)[-1]["global_tokens"] == 320
    with pytest.raises(ValueError, match="use write"):
        ledger.event("interval", step=4)


def test_a_missing_ledger_has_no_records(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / "none.jsonl") == []
    assert Ledger.rewind(tmp_path / "none.jsonl", 3) == 0


@pytest.mark.parametrize("world", [2, 3, 4])
def test_counts_are_summed_over_ranks(tmp_path: Path, shards25: ShardSet, world: int) -> None:
    import torch.distributed as dist

    from zgcm_testing import run_ranks

    def rank_run(rank: int, size: int) -> None:
        path = tmp_path / "ledger.jsonl" if rank == 0 else None
        ledger = Ledger(path, stage="one", manifest=shards25.manifest, group=dist.group.WORLD)
        for step, batch in enumerate(Loader(shards25, size, rank, size), 1):
            ledger.add(batch)
            ledger.write(step=step, global_rows=step * size, global_tokens=step * size * 32)

    run_ranks(rank_run, world)
    single = tmp_path / "single.jsonl"
    run(single, shards25, range(1, 25 // world + 1), batch=world)
    assert (tmp_path / "ledger.jsonl").read_bytes() == single.read_bytes()


def test_a_switch_of_stage_says_what_changed(
    tmp_path: Path, shards25: ShardSet, shard_set: Callable[..., ShardSet]
) -> None:
    """Rule R9: old and new shares, repeats so far, and what else changed at the same moment."""
    path = tmp_path / "ledger.jsonl"
    run(path, shards25, range(1, 6))
    new = shard_set(tmp_path / "new", 10, sequence_length=16)
    ledger = Ledger(path, stage="two", manifest=new.manifest)
    ledger.switch(
        shards25.manifest, step=5, global_tokens=800, learning_rate_changed=False, heldout={"code": 2.5}
    )
    record = read_ledger(path)[-1]
    assert (record["kind"], record["stage"], record["ended"]) == ("switch", "two", "one")
    assert (record["global_tokens"], record["length_changed"], record["learning_rate_changed"]) == (
        800,
        True,
        False,
    )
    assert [s["tokens"] for s in record["old"]] == [s.tokens for s in shards25.manifest.sources]
    assert sum(s["observed_share"] for s in record["new"]) == pytest.approx(1.0)
    assert record["cumulative_epochs"] == {"source-0": 1.0, "source-1": 1.0, "source-2": 1.0}
    assert record["heldout_before"] == {"code": 2.5}
