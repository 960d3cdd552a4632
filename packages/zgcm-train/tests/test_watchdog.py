"""A rank that hangs is noticed in time, named, and started again."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zgcm_testing import run_ranks
from zgcm_testing.tiny_runs import tiny_recipe
from zgcm_train import Hook, Recipe, Trainer, dump_recipe, load_recipe, run_recipe, verify_run
from zgcm_train.files import read_json_lines
from zgcm_train.hooks.watchdog import Sign, find_hung

ALIVE = Sign(0, "a", 1, step=4, phase=2, stands=9.0, waiting=True, place="step.py:1 in f", time=100.0)


def signs(**of_rank_1: object) -> list[Sign]:
    return [dataclasses.replace(ALIVE, rank=r, **(of_rank_1 if r == 1 else {})) for r in range(4)]


def test_a_silent_rank_is_named() -> None:
    assert list(find_hung(signs(time=80.0), 101.0, 10.0)) == [1]


def test_a_rank_that_is_behind_is_named_with_its_place() -> None:
    found = find_hung(signs(phase=1, place="loader.py:7 in read", waiting=False), 101.0, 10.0)
    assert found == {1: "has stood for 9 s reading data (update 5, loader.py:7 in read)"}


def test_of_ranks_in_one_place_the_one_that_does_not_wait_is_named() -> None:
    assert list(find_hung(signs(waiting=False), 101.0, 10.0)) == [1]


def test_without_a_difference_all_are_named() -> None:
    assert list(find_hung(signs(), 101.0, 10.0)) == [0, 1, 2, 3]


class StuckOnRankOne(Hook):
    """Never comes back from reading the fourth update's data."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def batches_read(self, trainer: Trainer, batches: object) -> None:
        if self.rank == 1 and trainer.progress.step == 3:
            read_for_ever()


def read_for_ever() -> None:
    time.sleep(3600)


def train(rank: int, world: int, recipe: Recipe, folder: Path) -> None:
    run_recipe(recipe, folder, hooks=[StuckOnRankOne(rank)] if "stuck" in folder.name else [])


def watched(data: Path, timeout: float) -> Recipe:
    return tiny_recipe(
        data,
        data={"global_batch": 2, "micro_batch": 1},
        parallel={"dp_shard": 2, "hang_timeout": timeout},
    )


def test_a_rank_that_never_comes_back_ends_the_run_and_is_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):  # the ranks die, of the watchdog or of the other's end
        run_ranks(train, 2, watched(data, 10.0), tmp_path / "stuck")
    first, *_ = read_json_lines(tmp_path / "stuck" / "logs" / "hangs.jsonl")
    assert first["ranks"] == [1]
    assert "in read_for_ever" in first["message"]
    assert "update 4" in first["message"]


def alive(folder: Path) -> dict[int, int]:
    """Return the process of each rank that has given a sign of life."""
    found = {}
    for path in (folder / "logs" / "alive").glob("rank-*.json"):
        (record,) = read_json_lines(path)
        found[record["rank"]] = record["pid"]
    return found


@pytest.mark.slow
def test_a_stopped_rank_is_killed_and_the_run_goes_on_as_undisturbed(data: Path, tmp_path: Path) -> None:
    stages = [{"name": "only", "data": str(data / "stage1"), "updates": 40}]
    values = watched(data, 25.0).model_dump(mode="json", exclude_none=True) | {"stage": stages}
    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(dump_recipe(Recipe.model_validate(values)))
    command = [sys.executable, "-m", "zgcm_train", "launch", str(recipe), "--out", str(run)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    while process.poll() is None and not (
        list((run / "checkpoints").glob("step-*")) and len(alive(run)) == 2
    ):
        time.sleep(0.01)
    os.kill(alive(run)[1], signal.SIGSTOP)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "rank 1 gave no sign of life" in errors
    run_ranks(train, 2, load_recipe(recipe, ["parallel.hang_timeout=0"]), tmp_path / "undisturbed")
    losses = [
        [(r["step"], r["loss"]) for r in read_json_lines(folder / "metrics.jsonl") if r["kind"] == "train"]
        for folder in (run, tmp_path / "undisturbed")
    ]
    assert losses[0] == losses[1]
    assert all(check.passed for check in verify_run(run))
