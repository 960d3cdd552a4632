"""Under torchrun: a run of two processes, one of them killed, ends as an undisturbed one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from zgcm_testing import run_ranks
from zgcm_testing.tiny_runs import tiny_recipe
from zgcm_train import Recipe, dump_recipe, load_recipe, run_recipe, verify_run
from zgcm_train.assembly import build_decoder
from zgcm_train.checkpoint import load_checkpoint, newest_complete
from zgcm_train.errors import ConfigurationError
from zgcm_train.files import read_json_lines
from zgcm_train.launch import Machines, launch, torchrun_command
from zgcm_train.mesh import Layout


def weights(folder: Path, data: Path) -> list[torch.Tensor]:
    checkpoint, _ = newest_complete(folder / "checkpoints")
    assert checkpoint is not None
    decoder = build_decoder(tiny_recipe(data), torch.device("cpu"), Layout())
    load_checkpoint(checkpoint, decoder, None)
    return [parameter.detach() for parameter in decoder.parameters()]


def two_processes(data: Path) -> Recipe:
    stages = [
        {"name": n, "data": str(data / d), "updates": 15}
        for n, d in (("first", "stage1"), ("second", "stage2"))
    ]
    small = tiny_recipe(data, data={"global_batch": 2, "micro_batch": 1}, parallel={"dp_shard": 2})
    values = small.model_dump(mode="json", exclude_none=True)
    return Recipe.model_validate(values | {"stage": stages})


def undisturbed(rank: int, world: int, recipe: Recipe, folder: Path) -> None:
    run_recipe(recipe, folder)


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in read_json_lines(folder / "metrics.jsonl") if r["kind"] == "train"]


def workers(folder: Path) -> list[int]:
    """Return the process numbers of the ranks that train in ``folder``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(folder).encode() in words and b"torch.distributed.run" not in words:
            found.append(int(entry.parent.name))
    return found


def kill_the_last_rank(process: subprocess.Popen[str], folder: Path, sign: str, dead: set[int]) -> set[int]:
    """Kill a rank as soon as ranks that are none of the dead make a new checkpoint of this kind; return all ranks."""
    while process.poll() is None and len(set(workers(folder)) - dead) < 2:
        time.sleep(0.01)
    before = set((folder / "checkpoints").glob(sign))
    while process.poll() is None and not set((folder / "checkpoints").glob(sign)) - before:
        time.sleep(0.001)
    ranks = set(workers(folder)) - {process.pid}
    os.kill(max(ranks), signal.SIGKILL)
    return ranks


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks through /proc")
@pytest.mark.slow
def test_ranks_killed_while_training_and_while_saving_are_restarted_and_nothing_differs(
    data: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(dump_recipe(two_processes(data)))
    command = [sys.executable, "-m", "zgcm_train", "launch", str(recipe), "--out", str(tmp_path / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    first = kill_the_last_rank(process, tmp_path / "run", "step-*", {process.pid})
    second = kill_the_last_rank(process, tmp_path / "run", ".step-*.tmp", first | {process.pid})
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "passed over" not in errors
    assert len(first) == len(second) == 2
    assert not first & second
    run_ranks(undisturbed, 2, load_recipe(recipe), tmp_path / "undisturbed")
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")
    for ours, theirs in zip(*(weights(tmp_path / f, data) for f in ("run", "undisturbed")), strict=True):
        assert torch.equal(ours, theirs)
    assert all(check.passed for check in verify_run(tmp_path / "run"))


@pytest.mark.slow
def test_the_exit_code_of_the_run_comes_through(data: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(dump_recipe(tiny_recipe(data)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text(dump_recipe(tiny_recipe(data, optimizer={"lr": 0.5})))
    (tmp_path / "run" / "logs").mkdir()
    assert launch(str(recipe), tmp_path / "run", [], Machines(max_restarts=0)) == 2


def test_the_command_of_torchrun(data: Path) -> None:
    recipe = load_recipe("zgcm-1")
    command = torchrun_command(recipe, Machines(24, "first:29500"), ["run", "zgcm-1"])
    assert command[3:] == [
        "--nnodes=24",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=first:29500",
        "--nproc-per-node=8",
        "--max-restarts=3",
        "-m",
        "zgcm_train",
        "run",
        "zgcm-1",
    ]
    with pytest.raises(ConfigurationError, match="do not divide over 7 nodes"):
        torchrun_command(recipe, Machines(7, "first:29500"), [])
    with pytest.raises(ConfigurationError, match="needs --endpoint"):
        torchrun_command(recipe, Machines(24), [])
