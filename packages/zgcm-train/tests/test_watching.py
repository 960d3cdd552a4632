"""What can be watched on request: traces, numerics, Weights & Biases, and the penalty on outliers."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from zgcm_testing import run_ranks
from zgcm_testing.tiny_runs import tiny_recipe
from zgcm_train import Recipe, run_recipe, write_report
from zgcm_train.errors import MissingSettingError
from zgcm_train.files import read_json_lines

FP8 = {"compute": "bfloat16", "fp8": "hybrid", "amax_history_len": 4, "backend": "reference"}


def watching(data: Path, /, **changes: Any) -> Recipe:
    return tiny_recipe(data, **({"log": {"interval": 1, "tensorboard": False}} | changes))


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in read_json_lines(folder / "metrics.jsonl") if r["kind"] == "train"]


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    run_recipe(watching(data), folder)
    return folder


def test_a_trace_holds_the_updates_asked_for_and_changes_nothing(
    data: Path, plain: Path, tmp_path: Path
) -> None:
    run_recipe(watching(data, log={"interval": 1, "tensorboard": False, "profile": [2, 3]}), tmp_path)
    trace = json.loads((tmp_path / "logs" / "trace-updates-2-3.json").read_text())
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names
    assert losses(tmp_path) == losses(plain)


def test_a_trace_ends_with_its_stage(data: Path, tmp_path: Path) -> None:
    run_recipe(watching(data, log={"interval": 1, "tensorboard": False, "profile": [6, 9]}), tmp_path)
    traces = sorted(p.name for p in (tmp_path / "logs").glob("trace-*"))
    assert traces == ["trace-updates-6-6.json", "trace-updates-6-9.json"]


def test_a_trace_must_end_after_it_begins(data: Path) -> None:
    with pytest.raises(ValueError, match=r"log\.profile \[3, 2\] ends before it begins"):
        watching(data, log={"profile": [3, 2]})


def test_numerics_are_sampled_and_change_nothing(data: Path, tmp_path: Path) -> None:
    log = {"interval": 1, "tensorboard": True, "numerics_interval": 5}
    run_recipe(watching(data, precision=FP8, log=log), tmp_path / "watched")
    run_recipe(watching(data, precision=FP8), tmp_path / "plain")
    assert losses(tmp_path / "watched") == losses(tmp_path / "plain")
    records = list(read_json_lines(tmp_path / "watched" / "numerics.jsonl"))
    assert {r["step"] for r in records} == {5, 10}
    kinds = [r["kind"] for r in records if r["step"] == 5]
    assert kinds.count("block") == 6
    assert kinds.count("fp8") > 6 * 8
    board = EventAccumulator(str(tmp_path / "watched" / "tensorboard")).Reload()
    assert any(tag.startswith("kurtosis/") for tag in board.Tags()["scalars"])
    assert any(tag.startswith("saturated/") for tag in board.Tags()["scalars"])


def test_saturation_is_an_event_in_the_report_and_on_the_console(data: Path, tmp_path: Path) -> None:
    log = {"interval": 1, "tensorboard": False, "numerics_interval": 1, "saturation_threshold": 0.0}
    # The most recent amax alone, of weights that grow fast, saturates.
    hasty = FP8 | {"amax_compute": "most_recent", "amax_history_len": 1}
    told: list[str] = []

    def observe(kind: str, value: Any) -> None:
        told.extend([value] if kind == "warning" else [])

    recipe = watching(data, precision=hasty, log=log, optimizer={"lr": 0.05})
    run_recipe(recipe, tmp_path, observe=observe)
    found = [r for r in read_json_lines(tmp_path / "metrics.jsonl") if r["kind"] == "event"]
    lines = [line for line in told if "past the largest" in line]
    assert len(lines) == len({r["step"] for r in found})  # one for each sample, with the worst tensor
    worst = max((r for r in found if r["step"] == found[0]["step"]), key=lambda r: r["saturated"])
    assert lines[0].startswith(f"update {worst['step']}: {worst['message']}")
    assert {r["event"] for r in found} == {"fp8_saturation"}
    assert "FP8 saturation" in write_report(tmp_path).read_text()


def train(rank: int, world: int, recipe: Recipe, folder: Path) -> None:
    run_recipe(recipe, folder)


def test_ranks_count_the_numerics_of_the_whole(data: Path, tmp_path: Path) -> None:
    log = {"interval": 1, "tensorboard": False, "numerics_interval": 1}
    for name, parallel in (("one", {}), ("two", {"dp_shard": 2})):
        recipe = watching(data, parallel=parallel, log=log)
        run_ranks(train, 2, recipe, tmp_path / name) if parallel else run_recipe(recipe, tmp_path / name)
    one, two = (list(read_json_lines(tmp_path / name / "numerics.jsonl"))[:6] for name in ("one", "two"))
    for ours, theirs in zip(two, one, strict=True):
        assert ours["elements"] == theirs["elements"]
        assert ours["kurtosis"] == pytest.approx(theirs["kurtosis"], rel=1e-3)


@pytest.mark.parametrize("name", ["log.numerics_interval", "precision.tweo_weight"])
def test_what_needs_all_layers_is_refused_where_they_are_not(data: Path, name: str) -> None:
    section, key = name.split(".")
    for other in (
        {"parallel": {"pp": 2}},
        {"model": tiny_recipe(data).model.model_dump() | {"compile": True}},
    ):
        with pytest.raises(ValueError, match=name):
            tiny_recipe(data, **({section: {key: 1}} | other))


def test_the_penalty_on_outliers_is_learned_from_but_not_shown(
    data: Path, plain: Path, tmp_path: Path
) -> None:
    run_recipe(watching(data, precision={"tweo_weight": 10.0, "tweo_tau": 0.05}), tmp_path / "penalty")
    run_recipe(watching(data, precision={"tweo_weight": 10.0, "tweo_tau": 1e6}), tmp_path / "far")
    assert losses(tmp_path / "penalty")[0] == losses(plain)[0]
    assert losses(tmp_path / "penalty")[-1] > losses(plain)[-1]
    assert losses(tmp_path / "far") == pytest.approx(losses(plain), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"tp": 2, "sequence_parallel": False}]
)
def test_the_penalty_is_the_same_on_many_ranks(data: Path, tmp_path: Path, parallel: dict[str, Any]) -> None:
    precision = {"tweo_weight": 1.0, "tweo_tau": 0.1}
    run_ranks(train, 2, watching(data, precision=precision, parallel=parallel), tmp_path / "two")
    run_recipe(watching(data, precision=precision, data={"micro_batch": 2}), tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)


class StandInRun:
    """Stands in for a run of wandb: it only remembers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.logged, self.finished = settings, list[tuple[int, dict[str, Any]]](), False

    def log(self, figures: dict[str, Any], step: int) -> None:
        self.logged.append((step, figures))

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_every_record_under_one_id(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[StandInRun] = []
    stand_in = types.ModuleType("wandb")
    stand_in.init = lambda **settings: runs.append(StandInRun(settings)) or runs[-1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    run_recipe(watching(data, log={"interval": 1, "tensorboard": False, "wandb": "project"}), tmp_path)
    assert len({run.settings["id"] for run in runs}) == 1
    assert all(run.finished for run in runs)
    steps = [step for run in runs for step, figures in run.logged if "train/loss" in figures]
    assert steps == list(range(1, 13))
    assert [s for run in runs for s, figures in run.logged if "heldout/code" in figures] == [0, 6, 12]


def test_a_missing_wandb_names_the_extra(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingSettingError, match=r"zgcm-train\[wandb\]"):
        run_recipe(watching(data, log={"wandb": "project"}), tmp_path)
