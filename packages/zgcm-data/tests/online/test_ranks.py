"""Real ranks: together they read every row once, and agree on counts and position."""

import pytest
import torch
import torch.distributed as dist

from zgcm_data import Loader, LoaderOptions, ShardSet
from zgcm_testing import run_ranks

pytestmark = pytest.mark.usefixtures("small_steps")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_read_each_row_once_and_agree_on_the_position(shards25: ShardSet, world: int) -> None:
    def rank_run(rank: int, size: int) -> tuple[list[int], list[int], dict[str, object]]:
        loader = Loader(shards25, 2 * size, rank, size, options=LoaderOptions(epochs=2))
        rows, tokens = [], torch.zeros(3, dtype=torch.int64)
        for batch in loader:
            rows += batch.rows.tolist()
            tokens += batch.source_loss_tokens
        dist.all_reduce(tokens)
        return rows, tokens.tolist(), loader.state_dict()

    results = run_ranks(rank_run, world)
    used = 50 // (2 * world) * 2 * world
    assert sorted(row for rows, _, _ in results for row in rows) == list(range(used))
    assert len({len(rows) for rows, _, _ in results}) == 1
    whole = torch.zeros(3, dtype=torch.int64)
    for batch in Loader(shards25, used, micro_batch=used, options=LoaderOptions(epochs=2)):
        whole += batch.source_loss_tokens
    assert all(tokens == whole.tolist() for _, tokens, _ in results)
    assert all(state == {"next_row": used, "digest": shards25.manifest.digest} for _, _, state in results)


def test_a_run_goes_on_under_another_number_of_ranks(shards25: ShardSet) -> None:
    def rank_run(
        rank: int, size: int, state: dict[str, object] | None
    ) -> tuple[list[int], dict[str, object]]:
        loader = Loader(shards25, 12, rank, size, options=LoaderOptions(epochs=2))
        if state is not None:
            loader.load_state_dict(state)
        stream, rows = iter(loader), list[int]()
        for _ in range(loader.accumulation):
            rows += next(stream).rows.tolist()
        return rows, loader.state_dict()

    state, seen = None, list[int]()
    for world in (2, 4, 3, 1):
        results = run_ranks(rank_run, world, state)
        state = results[0][1]
        seen += sorted(row for rows, _ in results for row in rows)
    assert seen == list(range(48))
