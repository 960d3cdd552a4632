"""A run in FP8: learns as one in BF16, goes on bit by bit, spreads over ranks, and is never switched by accident."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from zgcm_model import precision
from zgcm_testing import run_ranks
from zgcm_testing.tiny_runs import tiny_recipe
from zgcm_train import Hook, Recipe, Trainer, run_recipe, verify_run
from zgcm_train.assembly import build_decoder
from zgcm_train.checkpoint import load_checkpoint, newest_complete
from zgcm_train.errors import CheckpointError, ConfigurationError, InterruptedRunError
from zgcm_train.files import read_json_lines
from zgcm_train.header import precision_lines
from zgcm_train.mesh import Layout

FP8 = {"compute": "bfloat16", "fp8": "hybrid", "amax_history_len": 4, "backend": "reference"}


def recipe_for(data: Path, formats: dict[str, Any], parallel: dict[str, int] | None = None) -> Recipe:
    shapes = {"global_batch": 8, "micro_batch": 1}
    return tiny_recipe(data, data=shapes, precision=formats, parallel=parallel or {})


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in read_json_lines(folder / "metrics.jsonl") if r["kind"] == "train"]


def final_state(folder: Path, recipe: Recipe) -> dict[str, torch.Tensor]:
    checkpoint, _ = newest_complete(folder / "checkpoints")
    assert checkpoint is not None
    decoder = build_decoder(recipe, torch.device("cpu"), Layout())
    load_checkpoint(checkpoint, decoder, None)
    return {name: value.clone() for name, value in decoder.state_dict().items()}


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    run_recipe(recipe_for(data, FP8), folder)
    return folder


def test_it_learns_as_bf16_does(data: Path, alone: Path, tmp_path: Path) -> None:
    run_recipe(recipe_for(data, {"compute": "bfloat16"}), tmp_path)
    wide, narrow = losses(tmp_path), losses(alone)
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=0.03)
    assert narrow[-1] < narrow[0] - 0.5
    assert all(check.passed for check in verify_run(alone))


class StopAfter(Hook):
    """Asks for a stop during an update."""

    def __init__(self, step: int) -> None:
        self.step = step

    def step_start(self, trainer: Trainer) -> None:
        trainer.stop_requested |= trainer.progress.step + 1 == self.step


@pytest.mark.parametrize("step", [1, 5])
def test_t9_interrupted_equals_uninterrupted_to_the_last_bit(
    data: Path, alone: Path, tmp_path: Path, step: int
) -> None:
    recipe = recipe_for(data, FP8)
    with pytest.raises(InterruptedRunError):
        run_recipe(recipe, tmp_path, hooks=[StopAfter(step)])
    run_recipe(recipe, tmp_path)
    assert losses(tmp_path) == losses(alone)
    expected = final_state(alone, recipe)
    found = final_state(tmp_path, recipe)
    assert any(name.startswith("scaling.") for name in expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def train(rank: int, world: int, recipe: Recipe, folder: Path) -> None:
    run_recipe(recipe, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"dp_replicate": 3}], ids=str
)
def test_ranks_agree_on_the_scales_and_train_as_one_process(
    data: Path, alone: Path, tmp_path: Path, parallel: dict[str, int]
) -> None:
    (world,) = parallel.values()
    batch = {"global_batch": 12, "micro_batch": 1}
    long = FP8 | {"compute": "float32", "amax_history_len": 16}
    stage = [{"name": "only", "data": str(data / "stage1"), "updates": 4}]
    single, spread = (
        Recipe.model_validate(
            tiny_recipe(data, data=batch, precision=long, parallel=axes).model_dump(
                mode="json", exclude_none=True
            )
            | {"stage": stage, "eval": {}}
        )
        for axes in ({}, parallel)
    )
    run_ranks(train, world, spread, tmp_path / "ranks")
    run_recipe(single, tmp_path / "one")
    # A value on the border of two FP8 numbers may round the other way after sums in another order.
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "one"), abs=5e-4)
    found, expected = (
        final_state(tmp_path / name, single)["scaling.amax_history"] for name in ("ranks", "one")
    )
    assert (expected[:4] > 0).all()
    torch.testing.assert_close(found[0], expected[0], atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(found[1:], expected[1:], atol=1e-6, rtol=0.3)


@pytest.mark.parametrize("first", [FP8, {"compute": "bfloat16"}], ids=["from-fp8", "to-fp8"])
def test_a_switch_of_precision_must_be_asked_for(data: Path, tmp_path: Path, first: dict[str, Any]) -> None:
    second = {"compute": "bfloat16"} if first is FP8 else FP8
    with pytest.raises(InterruptedRunError):
        run_recipe(recipe_for(data, first), tmp_path, hooks=[StopAfter(3)])
    with pytest.raises(ConfigurationError, match=r"precision\.fp8"):
        run_recipe(recipe_for(data, second), tmp_path)
    with pytest.raises(CheckpointError, match=r"set precision\.allow_switch"):
        run_recipe(recipe_for(data, second), tmp_path, accept_changes=True)
    progress = run_recipe(recipe_for(data, second | {"allow_switch": True}), tmp_path, accept_changes=True)
    assert progress.step == 12
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.5


def test_the_header_declares_what_is_computed_how(data: Path) -> None:
    kept = FP8 | {"high_precision": ("o",), "high_precision_layers": {"down": (-2, -1)}}
    text = "\n".join(precision_lines(recipe_for(data, kept)))
    assert "projections FP8 (E4M3 forward, E5M2 gradients), all else bfloat16" in text
    assert "delayed scaling over 4 updates (max, margin 0)" in text
    assert "precision of down, layers 0-3: FP8" in text
    assert "precision of down, layers 4-5: high precision" in text
    assert "precision of o, layers 0-5: high precision" in text
    assert "precision of attention core, layers all: high precision" in text


def test_t19_a_setting_without_effect_is_refused(data: Path) -> None:
    with pytest.raises(ValueError, match=r"precision\.margin has no effect when precision\.fp8 is"):
        recipe_for(data, {"margin": 1})


def test_weights_gathered_in_fp8_give_the_same_losses(data: Path, tmp_path: Path) -> None:
    for gather in ("float32", "fp8"):
        recipe = recipe_for(data, FP8 | {"gather": gather}, {"dp_shard": 2})
        run_ranks(train, 2, recipe, tmp_path / gather)
    assert losses(tmp_path / "fp8") == losses(tmp_path / "float32")
    assert all(check.passed for check in verify_run(tmp_path / "fp8"))


def test_compiled_layers_share_their_programs(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    deep = tiny_recipe(data).model.model_dump(exclude_none=True) | {"num_layers": 13, "kernel": "banded"}
    sums = []
    for compile_ in (False, True):
        recipe = tiny_recipe(data, model=deep | {"compile": compile_}, precision=FP8 | {"compute": "float32"})
        decoder = build_decoder(recipe, torch.device("cpu"), Layout())
        for _ in range(2):
            decoder(torch.arange(32)[None]).square().sum().backward()
            precision.update_scales(decoder)
        sums.append(precision.scaling_state(decoder).amax_history.sum().item())
    assert sums[1] == pytest.approx(sums[0], rel=1e-3)
    assert 2 <= counter.frame_count <= 4  # window layers and global ones, not one for each of thirteen
