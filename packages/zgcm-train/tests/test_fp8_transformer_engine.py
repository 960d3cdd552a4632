"""A run with ``precision.backend = "transformer_engine"`` against a stand-in, which is not Transformer Engine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from zgcm_testing import run_ranks, te_stand_in
from zgcm_testing.tiny_runs import tiny_recipe
from zgcm_train import Hook, Recipe, Trainer, run_recipe
from zgcm_train.assembly import build_decoder
from zgcm_train.checkpoint import load_checkpoint, newest_complete
from zgcm_train.errors import InterruptedRunError
from zgcm_train.files import read_json_lines
from zgcm_train.mesh import Layout

FP8 = {"compute": "bfloat16", "fp8": "hybrid", "amax_history_len": 4}


def recipe_for(data: Path, backend: str, parallel: dict[str, Any] | None = None) -> Recipe:
    shapes = {"global_batch": 6, "micro_batch": 1}
    wide = tiny_recipe(data).model.model_dump(exclude_none=True) | {"intermediate_size": 32, "num_layers": 3}
    formats = FP8 | {"backend": backend}
    tiny = tiny_recipe(data, model=wide, data=shapes, precision=formats, parallel=parallel or {})
    stage = [{"name": "only", "data": str(data / "stage1"), "updates": 4}]
    return Recipe.model_validate(
        tiny.model_dump(mode="json", exclude_none=True) | {"stage": stage, "eval": {}}
    )


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in read_json_lines(folder / "metrics.jsonl") if r["kind"] == "train"]


def final_state(folder: Path, recipe: Recipe) -> dict[str, torch.Tensor]:
    checkpoint, _ = newest_complete(folder / "checkpoints")
    assert checkpoint is not None
    decoder = build_decoder(recipe, torch.device("cpu"), Layout())
    load_checkpoint(checkpoint, decoder, None)
    return {name: value.clone() for name, value in decoder.state_dict().items()}


class StopAfter(Hook):
    """Asks for a stop during an update."""

    def __init__(self, step: int) -> None:
        self.step = step

    def step_start(self, trainer: Trainer) -> None:
        trainer.stop_requested |= trainer.progress.step + 1 == self.step


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_t9_a_run_that_stops_and_resumes_is_the_reference_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute: str
) -> None:
    te_stand_in.install(monkeypatch)
    wanted = recipe_for(data, "reference")
    run_recipe(wanted, tmp_path / "reference")
    recipe = recipe_for(data, "transformer_engine", {"recompute": recompute})
    with pytest.raises(InterruptedRunError):
        run_recipe(recipe, tmp_path / "te", hooks=[StopAfter(2)])
    run_recipe(recipe, tmp_path / "te")
    assert losses(tmp_path / "te") == losses(tmp_path / "reference")
    found, expected = final_state(tmp_path / "te", recipe), final_state(tmp_path / "reference", wanted)
    assert any(name.startswith("scaling.") for name in expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def train(rank: int, world: int, recipe: Recipe, folder: Path) -> None:
    run_recipe(recipe, folder)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"pp": 2}, {"dp_shard": 2}], ids=str)
def test_ranks_train_as_under_reference(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: dict[str, int]
) -> None:
    te_stand_in.install(monkeypatch)
    states = []
    for backend in ("reference", "transformer_engine"):
        run_ranks(train, 2, recipe_for(data, backend, parallel), tmp_path / backend)
        states.append(final_state(tmp_path / backend, recipe_for(data, backend)))
    assert losses(tmp_path / "transformer_engine") == losses(tmp_path / "reference")
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name
