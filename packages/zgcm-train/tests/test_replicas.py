"""T23: copies of the same weights on different ranks are compared, and a difference ends the run with its name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from zgcm_testing import run_ranks
from zgcm_testing.layouts import toy_recipe
from zgcm_testing.tiny_runs import tiny_recipe
from zgcm_train import Hook, Recipe, Trainer, run_recipe
from zgcm_train.assembly import build_parts
from zgcm_train.checkpoint import checkpoints
from zgcm_train.errors import VerificationError
from zgcm_train.replicas import checksum, differing_replicas
from zgcm_train.step import StepResult


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_a_checksum_sees_every_bit_and_the_order(dtype: torch.dtype) -> None:
    values = torch.arange(1, 12).to(dtype).view(11, 1)
    again = values.clone()
    assert checksum(values) == checksum(again)
    assert checksum(values) != checksum(values.flip(0))
    again.view(-1).view(torch.uint8)[3] ^= 1
    assert checksum(values) != checksum(again)


def spoil(rank: int, world: int, recipe: Recipe) -> tuple[list[str], list[str]]:
    parts = build_parts(recipe, Path("unused"), None)
    clean = differing_replicas(parts.decoder)
    weight = dict(parts.decoder.named_parameters())["layers.1.attention_norm.weight"]
    assert isinstance(weight, DTensor)
    if rank == world - 1:
        # One step of the last bit: far below anything a loss shows.
        bits = weight.detach().to_local().view(torch.int32)
        bits[0] += 1
    return clean, differing_replicas(parts.decoder)


@pytest.mark.parametrize(
    ("parallel", "world", "axis"),
    [
        ({"dp_replicate": 2}, 2, "dp_replicate"),
        ({"dp_replicate": 2, "dp_shard": 2}, 4, "dp_replicate"),
        ({"tp": 2}, 2, "tp"),
        ({"dp_shard": 2, "tp": 2}, 4, "tp"),
    ],
    ids=["dp2", "hsdp2x2", "tp2", "fsdp2xtp2"],
)
def test_t23_one_bit_of_one_copy_is_found(
    data: Path, parallel: dict[str, Any], world: int, axis: str
) -> None:
    found = run_ranks(spoil, world, toy_recipe(data, parallel, isolated=True))
    assert all(clean == [] for clean, _ in found)
    assert found[-1][1] == [f"layers.1.attention_norm.weight over {axis}"]


class SpoilAfter(Hook):
    """Changes one copy of a weight after an update, as a faulty device would."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def step_end(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.progress.step == self.step and self.rank == 1:
            weight = trainer.parts.decoder.norm.weight
            assert isinstance(weight, DTensor)
            with torch.no_grad():
                weight.to_local()[:1] += 1e-3


def train_spoiled(rank: int, world: int, recipe: Recipe, folder: Path) -> str:
    try:
        run_recipe(recipe, folder, hooks=[SpoilAfter(rank, 3)])
    except VerificationError as error:
        return str(error)
    return "trained on"


def test_t23_a_run_whose_replicas_differ_ends_before_it_saves(data: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(data, parallel={"dp_replicate": 2}, eval={"heldout": None, "tokenizer": None})
    for message in run_ranks(train_spoiled, 2, recipe, tmp_path):
        assert message.startswith("After update 4, ")
        assert "norm.weight over dp_replicate" in message
    assert [p.name for p in checkpoints(tmp_path / "checkpoints")] == ["step-000000002"]
