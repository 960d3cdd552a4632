"""Whole runs under several layouts leave the records of one process; test_layouts.py compares updates under all."""

from pathlib import Path

import pytest
import torch

from zgcm_data import read_ledger
from zgcm_testing import run_ranks
from zgcm_testing.tiny_runs import tiny_recipe
from zgcm_train import Recipe, run_recipe, verify_run
from zgcm_train.assembly import build_decoder
from zgcm_train.checkpoint import load_checkpoint, newest_complete
from zgcm_train.errors import ConfigurationError
from zgcm_train.files import read_json_lines
from zgcm_train.mesh import Layout, build_layout

LAYOUTS = [
    pytest.param({"dp_shard": 3}, 3, id="fsdp3"),
    pytest.param({"dp_replicate": 2, "dp_shard": 2, "gradient_sync": "every"}, 4, id="hsdp2x2"),
    pytest.param({"tp": 2, "cp": 2, "recompute": "full"}, 4, id="tp2xcp2-recompute"),
    pytest.param({"pp": 2, "dp_shard": 2, "pipeline_schedule": "gpipe"}, 4, id="pp2xfsdp2-gpipe"),
    pytest.param({"pp": 2, "tp": 2}, 4, id="pp2xtp2"),
]


def recipe_for(data: Path, parallel: dict[str, int]) -> Recipe:
    # Two or three micro-batches per update; a pipeline needs as many as it has stages.
    replicas = parallel.get("dp_replicate", 1) * parallel.get("dp_shard", 1)
    micro_batch = 1 if replicas == 4 else {1: 4, 2: 3, 3: 2}[replicas]
    shapes = {"global_batch": 12, "micro_batch": micro_batch, "cross_document_attention": False}
    stage = [
        {"name": s, "data": str(data / d), "updates": 3}
        for s, d in (("first", "stage1"), ("second", "stage2"))
    ]
    values = tiny_recipe(data, data=shapes, parallel=parallel).model_dump(mode="json", exclude_none=True)
    return Recipe.model_validate(values | {"stage": stage})


def train(rank: int, world: int, recipe: Recipe, folder: Path) -> None:
    run_recipe(recipe, folder)


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in read_json_lines(folder / "metrics.jsonl") if r["kind"] == "train"]


def weights(folder: Path, recipe: Recipe) -> dict[str, torch.Tensor]:
    checkpoint, _ = newest_complete(folder / "checkpoints")
    assert checkpoint is not None
    decoder = build_decoder(recipe, torch.device("cpu"), Layout())
    load_checkpoint(checkpoint, decoder, None)
    return {name: p.detach() for name, p in decoder.named_parameters()}


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run_recipe(recipe_for(data, {}), folder)
    return folder


@pytest.mark.parametrize(("parallel", "world"), LAYOUTS)
def test_sharded_run_equals_one_process(
    data: Path, alone: Path, tmp_path: Path, parallel: dict[str, int], world: int
) -> None:
    recipe = recipe_for(data, parallel)
    run_ranks(train, world, recipe, tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(alone), abs=1e-4)
    reference = weights(alone, recipe_for(data, {}))
    for name, weight in weights(tmp_path, recipe_for(data, {})).items():
        torch.testing.assert_close(weight, reference[name], atol=1e-4, rtol=0, msg=name)
    assert all(check.passed for check in verify_run(tmp_path))
    assert booked(tmp_path) == booked(alone)


def booked(folder: Path) -> list[tuple[int, int, int, list[int]]]:
    return [
        (r["step"], r["tokens"], r["loss_tokens"], [s["loss_tokens"] for s in r["sources"]])
        for r in read_ledger(folder / "ledger.jsonl")
        if r["kind"] == "interval"
    ]


def test_a_run_goes_on_under_another_layout(data: Path, alone: Path, tmp_path: Path) -> None:
    first = recipe_for(data, {"dp_shard": 2})
    run_ranks(
        train, 2, first.model_copy(update={"stage": first.stage[:1], "eval": type(first.eval)()}), tmp_path
    )
    (tmp_path / "recipe.toml").unlink()
    run_ranks(train, 3, recipe_for(data, {"dp_shard": 3}), tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(alone), abs=1e-4)


def initial_weights(rank: int, world: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    layout = build_layout(recipe, torch.device("cpu"))
    decoder = build_decoder(recipe, torch.device("cpu"), layout)
    return {name: p.full_tensor().detach() for name, p in decoder.named_parameters()}


def test_initial_weights_do_not_depend_on_the_layout(data: Path) -> None:
    reference = build_decoder(recipe_for(data, {}), torch.device("cpu"), Layout())
    (first, *_) = run_ranks(initial_weights, 3, recipe_for(data, {"dp_shard": 3}))
    for name, parameter in reference.named_parameters():
        assert torch.equal(first[name], parameter.detach()), name


def test_a_mesh_that_does_not_fit_is_refused(data: Path) -> None:
    with pytest.raises(ConfigurationError, match="asks for 2 devices and 1 run"):
        build_layout(recipe_for(data, {"dp_shard": 2}), torch.device("cpu"))
