"""Every layout trains as one process does: first gradients, losses, norms and weights over ten updates.

Gradients are compared too, because Muon and Adam hardly react to a gradient that is wrong by a factor. The layouts of
one world size share their processes.

Resharding: each layout saves once, after five updates. All 15 x 15 pairs of a saved and a loading layout are then
loaded and compared bitwise with what one process reads from the same checkpoint, weights and optimizer state. Whole
updates are made for a ring of pairs (each layout goes on from the one before it in the list) and for each layout from
its own.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # once here, or every forked rank imports it again
from torch import Tensor

from zgcm_testing import run_ranks
from zgcm_testing.layouts import (
    SAVED,
    UPDATES,
    Trace,
    load_differences,
    read_whole,
    resume_layout,
    toy_recipe,
    train_layout,
)
from zgcm_train.checkpoint import Checkpoint
from zgcm_train.checkpoint.folder import open_checkpoint

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "dp2": {"dp_replicate": 2},
    "fsdp2": {"dp_shard": 2},
    "tp2": {"tp": 2, "sequence_parallel": False},
    "tp2+sp": {"tp": 2},
    "cp2": {"cp": 2},
    "pp2": {"pp": 2},
    "dp4": {"dp_replicate": 4},
    "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
    "tp2xcp2": {"tp": 2, "cp": 2},
    "fsdp2xtp2": {"dp_shard": 2, "tp": 2},
    "fsdp2xcp2": {"dp_shard": 2, "cp": 2},
    "pp2xfsdp2": {"pp": 2, "dp_shard": 2},
    "tp2xcp2xdp2": {"tp": 2, "cp": 2, "dp_replicate": 2},
    "pp2xtp2xcp2": {"pp": 2, "tp": 2, "cp": 2},
}
NAMES = list(LAYOUTS)


def world(name: str) -> int:
    sizes = [size for axis, size in LAYOUTS[name].items() if axis != "sequence_parallel"]
    return int(torch.tensor(sizes or [1]).prod())


def by_world() -> dict[int, list[str]]:
    return {size: [n for n in NAMES if world(n) == size] for size in (1, 2, 4, 8)}


def train_all(rank: int, size: int, data: Path, folder: Path) -> dict[tuple[str, bool], Trace]:
    found = {}
    for name in by_world()[size]:
        for isolated in (False, True):
            recipe = toy_recipe(data, LAYOUTS[name], isolated=isolated)
            found[name, isolated] = train_layout(recipe, folder / name if isolated else None)
    return found if rank == 0 else {}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for name in NAMES:
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="module")
def traces(data: Path, saved: Path) -> dict[tuple[str, bool], Trace]:
    found = train_all(0, 1, data, saved)
    for size in (2, 4, 8):
        found |= run_ranks(train_all, size, data, saved, timeout=400)[0]
    return found


def assert_near(mine: dict[str, Tensor], theirs: dict[str, Tensor], limit: float) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], atol=limit, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("isolated", [False, True], ids=["crossing", "isolated"])
@pytest.mark.parametrize("name", NAMES[1:])
def test_a_layout_equals_one_process(
    traces: dict[tuple[str, bool], Trace], name: str, isolated: bool
) -> None:
    mine, alone = traces[name, isolated], traces["alone", isolated]
    assert mine.initial.keys() == alone.initial.keys()
    assert all(torch.equal(mine.initial[n], alone.initial[n]) for n in alone.initial)
    assert mine.counts == alone.counts
    largest = max(float(g.abs().max()) for g in alone.gradients.values())
    assert_near(mine.gradients, alone.gradients, 1e-5 * largest)
    assert mine.losses == pytest.approx(alone.losses, abs=1e-4)
    assert mine.norms == pytest.approx(alone.norms, rel=1e-3)
    assert_near(mine.weights[UPDATES], alone.weights[UPDATES], 1e-4)


def test_the_comparison_has_something_to_see(traces: dict[tuple[str, bool], Trace]) -> None:
    crossing, isolated = traces["alone", False], traces["alone", True]
    assert abs(crossing.losses[0] - isolated.losses[0]) > 1e-3
    assert len(set(isolated.counts)) > 1
    assert isolated.losses[-1] < isolated.losses[0] - 0.1


@pytest.mark.parametrize("name", NAMES[1:])
def test_t23_copies_of_weights_agree_at_the_start_and_after_ten_updates(
    traces: dict[tuple[str, bool], Trace], name: str
) -> None:
    assert traces[name, True].differing == []


@pytest.fixture(scope="module")
def opened(saved: Path, traces: dict[tuple[str, bool], Trace]) -> dict[str, Checkpoint]:
    return {name: open_checkpoint(saved / name / f"step-{SAVED:09d}") for name in NAMES}


def load_all(
    rank: int, size: int, data: Path, opened: dict[str, Checkpoint], whole: list[dict[str, Tensor]]
) -> dict[str, list[str]]:
    return {
        name: load_differences(toy_recipe(data, LAYOUTS[name], isolated=True), list(opened.values()), whole)
        for name in by_world()[size]
    }


def test_every_layout_reads_the_checkpoint_of_every_layout(data: Path, opened: dict[str, Checkpoint]) -> None:
    recipe = toy_recipe(data, {}, isolated=True)
    whole = [read_whole(recipe, checkpoint) for checkpoint in opened.values()]
    for size in (1, 2, 4, 8):
        for found in run_ranks(load_all, size, data, opened, whole, timeout=400):
            assert found == {name: [] for name in by_world()[size]}


def resume_all(
    rank: int, size: int, data: Path, opened: dict[str, Checkpoint]
) -> dict[tuple[str, str], Trace]:
    found = {}
    for name in by_world()[size]:
        recipe = toy_recipe(data, LAYOUTS[name], isolated=True)
        for source in (name, NAMES[NAMES.index(name) - 1]):
            found[name, source] = resume_layout(recipe, opened[source])
    return found if rank == 0 else {}


@pytest.fixture(scope="module")
def resumed(data: Path, opened: dict[str, Checkpoint]) -> dict[tuple[str, str], Trace]:
    found = {}
    for size in (1, 2, 4, 8):
        found |= run_ranks(resume_all, size, data, opened, timeout=400)[0]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_first_update_after_a_resume_is_bitwise_the_one_without_it(
    traces: dict[tuple[str, bool], Trace], resumed: dict[tuple[str, str], Trace], name: str
) -> None:
    once, again = traces[name, True], resumed[name, name]
    assert (again.losses[0], again.norms[0]) == (once.losses[SAVED], once.norms[SAVED])
    for parameter, weight in again.weights[SAVED + 1].items():
        assert torch.equal(weight, once.weights[SAVED + 1][parameter]), parameter


@pytest.mark.parametrize("name", NAMES)
def test_the_first_update_after_a_change_of_layout_is_the_one_without_it(
    traces: dict[tuple[str, bool], Trace], resumed: dict[tuple[str, str], Trace], name: str
) -> None:
    source = NAMES[NAMES.index(name) - 1]
    once, again = traces[source, True], resumed[name, source]
    assert again.losses[0] == pytest.approx(once.losses[SAVED], abs=1e-6)
    assert again.norms[0] == pytest.approx(once.norms[SAVED], rel=1e-6)
    assert_near(again.weights[SAVED + 1], once.weights[SAVED + 1], 1e-6)
