"""The whole line on a tiny run: two stages, hand-over, interruption, records."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from zgcm_data import open_shards, read_ledger
from zgcm_testing.tiny_runs import tiny_recipe
from zgcm_train import Hook, Recipe, Trainer, run_recipe, verify_run
from zgcm_train.errors import CheckpointError, ConfigurationError, DivergedError, InterruptedRunError
from zgcm_train.files import read_json_lines
from zgcm_train.step import StepResult


def losses(folder: Path) -> list[tuple[int, float, float]]:
    return [
        (r["step"], r["loss"], r["learning_rate"])
        for r in read_json_lines(folder / "metrics.jsonl")
        if r["kind"] == "train"
    ]


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [r for r in read_json_lines(folder / "metrics.jsonl") if r["kind"] == "eval"]


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_recipe(tiny_recipe(data), folder)
    return folder


class StopAt(Hook):
    """Asks for a stop after an update, as a signal would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def step_start(self, trainer: Trainer) -> None:
        trainer.stop_requested = trainer.progress.step + 1 == self.step


class ReadRows(Hook):
    """Collects the stage and the rows of every update."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []

    def batches_read(self, trainer: Trainer, batches: Any) -> None:
        self.rows += [(trainer.progress.stage, int(row)) for batch in batches for row in batch.rows]


def test_learns_in_both_stages(finished: Path) -> None:
    measured = [sum(d["loss"] for d in r["domains"].values()) for r in evaluations(finished)]
    assert [r["event"] for r in evaluations(finished)] == ["start", "switch", "end"]
    assert measured[0] > measured[1] > measured[2]


def test_stage_two_starts_at_its_own_row_zero_and_counters_go_on(data: Path, tmp_path: Path) -> None:
    reader = ReadRows()
    progress = run_recipe(tiny_recipe(data), tmp_path, hooks=[reader])
    assert reader.rows == [(0, r) for r in range(48)] + [(1, r) for r in range(48)]
    assert (progress.step, progress.rows, progress.tokens) == (12, 96, 96 * 32)
    assert progress.next_row == 48


def test_same_recipe_gives_the_same_losses_to_the_last_digit(
    data: Path, finished: Path, tmp_path: Path
) -> None:
    run_recipe(tiny_recipe(data), tmp_path)
    assert losses(tmp_path) == losses(finished)
    assert evaluations(tmp_path) == evaluations(finished)


@pytest.mark.parametrize("stop", [1, 3, 6, 7, 11])
def test_r15_interrupted_run_equals_uninterrupted(
    data: Path, finished: Path, tmp_path: Path, stop: int
) -> None:
    recipe = tiny_recipe(data)
    if stop == 6:  # the end of stage 1: nothing is left to interrupt there
        run_recipe(recipe.model_copy(update={"stage": recipe.stage[:1]}), tmp_path)
        (tmp_path / "recipe.toml").unlink()
        strip_evaluation(tmp_path, "end")
    else:
        with pytest.raises(InterruptedRunError, match=f"after update {stop}"):
            run_recipe(recipe, tmp_path, hooks=[StopAt(stop)])
    run_recipe(recipe, tmp_path)
    assert losses(tmp_path) == losses(finished)
    assert evaluations(tmp_path) == evaluations(finished)
    assert ledger_sums(tmp_path) == ledger_sums(finished)


def strip_evaluation(folder: Path, event: str) -> None:
    path = folder / "metrics.jsonl"
    kept = [r for r in read_json_lines(path) if r.get("event") != event]
    path.write_text("".join(json.dumps(r) + "\n" for r in kept))


def ledger_sums(folder: Path) -> dict[tuple[str, str], tuple[int, int, int]]:
    sums: dict[tuple[str, str], tuple[int, int, int]] = {}
    for record in read_ledger(folder / "ledger.jsonl"):
        for source in record.get("sources", ()):
            key = (record["stage"], source["name"])
            old = sums.get(key, (0, 0, 0))
            new = (source["tokens"], source["loss_tokens"], source["documents"])
            sums[key] = (old[0] + new[0], old[1] + new[1], old[2] + new[2])
    return sums


def test_t22_a_run_that_is_done_makes_no_further_update(data: Path, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    reader = ReadRows()
    progress = run_recipe(tiny_recipe(data), folder, hooks=[reader])
    assert progress.step == 12
    assert reader.rows == []
    assert losses(folder) == losses(finished)
    assert len(evaluations(folder)) == 3


def test_ledger_books_every_token_once(data: Path, finished: Path) -> None:
    sums = ledger_sums(finished)
    assert sum(tokens for tokens, _, _ in sums.values()) == 96 * 32
    manifest = open_shards(data / "stage1").manifest
    assert {s.name for s in manifest.sources} == {name for stage, name in sums if stage == "first"}
    assert all(check.passed for check in verify_run(finished)), verify_run(finished)


def test_r9_switch_is_an_event(finished: Path) -> None:
    (switch,) = [r for r in read_ledger(finished / "ledger.jsonl") if r["kind"] == "switch"]
    assert (switch["step"], switch["global_tokens"]) == (6, 48 * 32)
    assert (switch["ended"], switch["stage"]) == ("first", "second")
    assert (switch["learning_rate_changed"], switch["length_changed"]) == (False, False)
    for shares in (switch["old"], switch["new"]):
        assert sum(source["observed_share"] for source in shares) == pytest.approx(1.0)
    assert set(switch["cumulative_epochs"]) == {"prose", "code", "sums"}
    assert set(switch["heldout_before"]) == {"prose", "code", "sums"}
    (after,) = [r for r in read_ledger(finished / "ledger.jsonl") if r["kind"] == "after_switch"]
    assert (after["switch_step"], after["measured_at"]) == (6, 12)
    assert after["heldout_after"] == evaluations(finished)[-1]["domains"]
    assert after["heldout_after"] != switch["heldout_before"]


def test_old_checkpoints_go_but_the_ends_of_stages_stay(finished: Path) -> None:
    names = sorted(p.name for p in (finished / "checkpoints").iterdir())
    assert names == ["step-000000006", "step-000000010", "step-000000012"]


def test_evaluation_does_not_disturb_training(data: Path, finished: Path, tmp_path: Path) -> None:
    quiet = tiny_recipe(data).model_dump(mode="json", exclude_none=True)
    del quiet["eval"]
    run_recipe(Recipe.model_validate(quiet), tmp_path / "without")
    run_recipe(tiny_recipe(data, eval={"interval": 1}), tmp_path / "every")
    assert losses(tmp_path / "without") == losses(tmp_path / "every") == losses(finished)
    assert len(evaluations(tmp_path / "every")) == 3 + 10


def test_t7_logged_loss_does_not_depend_on_accumulation(data: Path, finished: Path, tmp_path: Path) -> None:
    run_recipe(tiny_recipe(data, data={"micro_batch": 1}), tmp_path)
    for (step, loss, _), (other, reference, _) in zip(losses(tmp_path), losses(finished), strict=True):
        assert step == other
        assert loss == pytest.approx(reference, abs=1e-4)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_changes_no_digit(data: Path, finished: Path, tmp_path: Path, mode: str) -> None:
    run_recipe(tiny_recipe(data, parallel={"recompute": mode}), tmp_path)
    assert losses(tmp_path) == losses(finished)


class SpoilWeights(Hook):
    """Puts an infinity into a weight's gradient by way of one row of the embedding, for chosen updates."""

    def __init__(self, steps: set[int]) -> None:
        self.steps, self.kept = steps, None

    def step_start(self, trainer: Trainer) -> None:
        weight = trainer.parts.decoder.norm.weight
        if trainer.progress.step + 1 in self.steps:
            self.kept = weight.detach().clone()
            weight.data.fill_(float("inf"))

    def step_end(self, trainer: Trainer, result: StepResult) -> None:
        if self.kept is not None:
            trainer.parts.decoder.norm.weight.data.copy_(self.kept)
            self.kept = None


def test_t6_an_update_that_is_not_finite_is_left_out_and_booked(data: Path, tmp_path: Path) -> None:
    progress = run_recipe(tiny_recipe(data), tmp_path, hooks=[SpoilWeights({5})])
    assert progress.skipped == 1
    assert progress.rows == 96
    assert progress.loss_tokens == (96 - 8) * 32
    (event,) = [r for r in read_ledger(tmp_path / "ledger.jsonl") if r["kind"] == "skipped"]
    assert (event["step"], event["loss_tokens_not_learned"]) == (5, 8 * 32)
    assert all(check.passed for check in verify_run(tmp_path)), verify_run(tmp_path)


def test_divergence_stops_the_run(data: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(data, optimizer={"lr": 0.01, "dtype": "float32", "max_skipped": 1})
    with pytest.raises(DivergedError, match="2 updates in a row") as caught:
        run_recipe(recipe, tmp_path, hooks=[SpoilWeights({3, 4, 5})])
    assert caught.value.exit_code == 5


def test_another_recipe_in_the_same_folder_is_refused(data: Path, finished: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"optimizer\.lr 0\.01 -> 0\.02"):
        run_recipe(tiny_recipe(data, optimizer={"lr": 0.02, "dtype": "float32"}), finished)


def test_r6_other_data_is_refused_with_both_digests(data: Path, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    recipe = tiny_recipe(data)
    stages = [s.model_dump() for s in recipe.stage]
    stages[0]["data"], stages[1]["data"] = stages[1]["data"], stages[0]["data"]
    swapped = Recipe.model_validate(recipe.model_dump(mode="json", exclude_none=True) | {"stage": stages})
    with pytest.raises(CheckpointError, match="other data in stage first: digest") as caught:
        run_recipe(swapped, folder)
    assert caught.value.exit_code == 4
