"""Loss spikes follow the recipe's policy, and are on record."""

from pathlib import Path
from typing import Any

import pytest

from zgcm_data import read_ledger
from zgcm_testing.tiny_runs import tiny_recipe
from zgcm_train import Hook, Recipe, Trainer, run_recipe, verify_run
from zgcm_train.errors import DivergedError, InterruptedRunError
from zgcm_train.files import read_json_lines
from zgcm_train.spikes import SpikePolicy
from zgcm_train.step import StepResult


def test_a_spike_is_far_above_the_median_of_a_full_window() -> None:
    policy = SpikePolicy(factor=2.0, window=3)
    assert not policy.is_spike(9.0, [1.0, 1.0])
    assert policy.is_spike(2.1, [1.0, 1.0, 5.0])
    assert not policy.is_spike(2.0, [1.0, 1.0, 5.0])
    assert not policy.is_spike(float("nan"), [1.0, 1.0, 1.0])  # the check for finite values has this one
    assert not SpikePolicy().is_spike(1e9, [1.0] * 64)


def test_only_the_window_is_remembered() -> None:
    recent: list[float] = []
    for loss in range(5):
        SpikePolicy(2.0, 3).remember(float(loss), recent)
    assert recent == [2.0, 3.0, 4.0]
    SpikePolicy().remember(1.0, recent)
    assert recent == [2.0, 3.0, 4.0]


class Spike(Hook):
    """Multiplies the last norm's weight, and with it the logits, during chosen updates."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def step_start(self, trainer: Trainer) -> None:
        if trainer.progress.step + 1 in self.steps:
            trainer.parts.decoder.norm.weight.data.mul_(500)

    def step_end(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.progress.step in self.steps:
            trainer.parts.decoder.norm.weight.data.div_(500)


def watchful(data: Path, action: str, **more: Any) -> Recipe:
    policy = {"spike_factor": 2.0, "spike_window": 3, "spike_action": action}
    return tiny_recipe(data, optimizer={"lr": 0.01, "dtype": "float32"} | policy | more)


def events(folder: Path) -> list[tuple[str, int]]:
    return [
        (r["event"], r["step"]) for r in read_json_lines(folder / "metrics.jsonl") if r["kind"] == "event"
    ]


def test_record_makes_the_update_and_books_the_event(data: Path, tmp_path: Path) -> None:
    progress = run_recipe(watchful(data, "record"), tmp_path, hooks=[Spike(5)])
    assert events(tmp_path) == [("loss_spike", 5)]
    assert progress.skipped == 0
    assert len(progress.recent_losses) == 3


def test_skip_leaves_the_update_out_while_the_data_advance(data: Path, tmp_path: Path) -> None:
    progress = run_recipe(watchful(data, "skip"), tmp_path, hooks=[Spike(5)])
    assert events(tmp_path) == [("loss_spike", 5)]
    assert (progress.skipped, progress.rows) == (1, 96)
    assert progress.loss_tokens == (96 - 8) * 32
    (skipped,) = [r for r in read_ledger(tmp_path / "ledger.jsonl") if r["kind"] == "skipped"]
    assert skipped["step"] == 5
    assert all(check.passed for check in verify_run(tmp_path))


def test_stop_ends_the_run_before_the_update(data: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DivergedError, match=r"Update 5 has a loss of more than optimizer\.spike_factor"
    ) as caught:
        run_recipe(watchful(data, "stop"), tmp_path, hooks=[Spike(5)])
    assert caught.value.exit_code == 5
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step-000000002",
        "step-000000004",
    ]


def test_spikes_in_a_row_end_the_run_as_updates_that_are_not_finite_do(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="2 updates in a row"):
        run_recipe(watchful(data, "skip", max_skipped=1), tmp_path, hooks=[Spike(5, 6, 7)])


class StopAt(Hook):
    def step_start(self, trainer: Trainer) -> None:
        trainer.stop_requested |= trainer.progress.step == 3


def test_the_recent_losses_survive_a_restart(data: Path, tmp_path: Path) -> None:
    recipe = watchful(data, "skip")
    with pytest.raises(InterruptedRunError):
        run_recipe(recipe, tmp_path, hooks=[StopAt()])
    assert run_recipe(recipe, tmp_path, hooks=[Spike(5)]).skipped == 1


def test_a_factor_that_is_no_spike_is_refused(data: Path) -> None:
    with pytest.raises(ValueError, match=r"optimizer\.spike_factor 0\.5"):
        watchful(data, "skip", spike_factor=0.5)


def test_an_update_that_is_not_finite_is_an_event(data: Path, tmp_path: Path) -> None:
    class Infinite(Spike):
        def step_start(self, trainer: Trainer) -> None:
            if trainer.progress.step + 1 in self.steps:
                self.kept = trainer.parts.decoder.norm.weight.detach().clone()
                trainer.parts.decoder.norm.weight.data.fill_(float("inf"))

        def step_end(self, trainer: Trainer, result: StepResult) -> None:
            if trainer.progress.step in self.steps:
                trainer.parts.decoder.norm.weight.data.copy_(self.kept)

    run_recipe(tiny_recipe(data), tmp_path, hooks=[Infinite(5)])
    assert events(tmp_path) == [("not_finite", 5)]
