"""What is divided by what: masks, cuts and empty batches never change a mean."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from zgcm_data import Batch
from zgcm_testing import run_ranks
from zgcm_testing.layouts import toy_recipe, whole
from zgcm_train import Recipe
from zgcm_train.assembly import build_parts
from zgcm_train.step import StepResult, read_batch, train_step


def masked(batch: Batch, keep: torch.Tensor) -> Batch:
    return replace(batch, loss_mask=batch.loss_mask & keep)


def heavy_on_the_first_half(batch: Batch) -> Batch:
    position = torch.arange(batch.loss_mask.shape[1])
    return masked(batch, (position < 16) | (position % 8 == 0))


def no_even_rows(batch: Batch) -> Batch:
    return masked(batch, batch.rows[:, None] % 2 == 1)


def no_first_rows(batch: Batch) -> Batch:
    return masked(batch, batch.rows[:, None] >= 4)


def nothing(batch: Batch) -> Batch:
    return masked(batch, torch.tensor(False))


MASKS = {m.__name__: m for m in (heavy_on_the_first_half, no_even_rows, no_first_rows, nothing)}


def one_update(
    rank: int, world: int, recipe: Recipe, mask: str
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    parts = build_parts(recipe, Path("unused"), None)
    batches = [MASKS[mask](batch) for batch in list(parts.loader)[: parts.loader.accumulation]]
    result = train_step(parts.decoder, parts.optimizer, batches, parts.settings)
    return result, whole(parts.decoder)


def compare(data: Path, parallel: dict[str, Any], mask: str) -> StepResult:
    alone, expected = run_ranks(one_update, 1, toy_recipe(data, {}, isolated=True), mask)[0]
    recipe = toy_recipe(data, parallel, isolated=True)
    for result, weights in run_ranks(one_update, recipe.parallel.devices, recipe, mask):
        assert result.loss_tokens == alone.loss_tokens
        assert result.loss_sum == pytest.approx(alone.loss_sum, rel=1e-5)
        assert result.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)
        assert result.applied
        for name, weight in weights.items():
            assert bool(weight.isfinite().all()), name
            torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0)
    return alone


@pytest.mark.parametrize("parallel", [{"cp": 2}, {"cp": 4}, {"cp": 2, "dp_shard": 2}], ids=str)
def test_t3_context_parallelism_is_in_no_denominator(data: Path, parallel: dict[str, Any]) -> None:
    alone = compare(data, parallel, "heavy_on_the_first_half")
    assert alone.loss_tokens > 0


def pairs(rank: int, world: int, recipe: Recipe) -> Counter[tuple[int, int, int, int]]:
    parts = build_parts(recipe, Path("unused"), None)
    found: Counter[tuple[int, int, int, int]] = Counter()
    for batch in parts.loader:
        read = read_batch(batch, parts.settings)
        length = read.inputs.shape[1]
        for row, place in read.mask.nonzero().tolist():
            ids = int(read.inputs[row, place]), int(read.targets[row, place])
            found[int(batch.rows[row]), rank * length + place, *ids] += 1
    return found


@pytest.mark.parametrize("isolated", [False, True], ids=["crossing", "isolated"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_t4_no_label_is_lost_or_moved_at_a_cut(data: Path, ranks: int, isolated: bool) -> None:
    whole_rows = run_ranks(pairs, 1, toy_recipe(data, {}, isolated=isolated))[0]
    parts = run_ranks(pairs, ranks, toy_recipe(data, {"cp": ranks}, isolated=isolated))
    assert sum(parts, Counter()) == whole_rows
    rows = {row for row, *_ in whole_rows}
    # Every token but the first of a row is a target, unless it starts a document that is kept apart.
    assert (len(whole_rows) == 32 * len(rows)) != isolated


@pytest.mark.parametrize("mask", ["no_even_rows", "no_first_rows", "nothing"])
@pytest.mark.parametrize(
    "parallel", [{"dp_shard": 2}, {"dp_replicate": 2}, {"pp": 2}, {"tp": 2}, {"cp": 2}], ids=str
)
def test_t5_a_rank_or_a_micro_batch_without_a_valid_token_counts_as_nothing(
    data: Path, parallel: dict[str, Any], mask: str
) -> None:
    alone = compare(data, parallel, mask)
    assert (alone.loss_tokens == 0) == (mask == "nothing")
    assert (alone.loss_sum == 0) == (mask == "nothing")


def logged(rank: int, world: int, recipe: Recipe) -> tuple[float, float]:
    parts = build_parts(recipe, Path("unused"), None)
    batches = list(parts.loader)[: parts.loader.accumulation]
    result = train_step(parts.decoder, parts.optimizer, batches, parts.settings)
    return result.loss_sum / result.loss_tokens, result.grad_norm


@pytest.mark.parametrize(
    "parallel", [{}, {"dp_shard": 2}, {"dp_shard": 2, "gradient_sync": "every"}, {"pp": 2}], ids=str
)
def test_t7_loss_and_norm_do_not_depend_on_accumulation(data: Path, parallel: dict[str, Any]) -> None:
    recipe = toy_recipe(data, parallel, isolated=True)
    values = recipe.model_dump(mode="json", exclude_none=True)
    values["data"]["micro_batch"] = 1
    split = Recipe.model_validate(values)
    assert split.accumulation > recipe.accumulation
    once, often = (run_ranks(logged, r.parallel.devices, r)[0] for r in (recipe, split))
    assert often == pytest.approx(once, rel=1e-5)
