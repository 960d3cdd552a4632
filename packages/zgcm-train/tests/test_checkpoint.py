"""Checkpoints: whole or passed over."""

import multiprocessing
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zgcm_model import Decoder
from zgcm_testing import run_ranks
from zgcm_testing.tiny_runs import tiny_recipe
from zgcm_train import Hook, Recipe, Trainer, run_recipe, verify_run
from zgcm_train.assembly import build_decoder, build_optimizer
from zgcm_train.checkpoint import (
    checkpoints,
    folder,
    load_checkpoint,
    newest_complete,
    prune,
    save_checkpoint,
    tensors,
)
from zgcm_train.checkpoint.folder import open_checkpoint
from zgcm_train.checkpoint.progress import Identity, Progress, parse_state
from zgcm_train.errors import CheckpointError, PathError, ZgcmError
from zgcm_train.files import read_json_lines
from zgcm_train.mesh import Layout
from zgcm_train.sections import CheckpointSection

IDENTITY = Identity(model={}, data={}, tokenizer="t", recipe="r", code="c", world=1)


@pytest.fixture
def saved(data: Path, tmp_path: Path) -> Path:
    recipe = tiny_recipe(data)
    decoder = build_decoder(recipe, torch.device("cpu"), Layout())
    optimizer = build_optimizer(recipe, decoder)
    for step in (1, 2, 3):
        loss = decoder(torch.arange(8)[None]).square().sum()
        loss.backward()
        optimizer.step()
        save_checkpoint(tmp_path, decoder, optimizer, Progress(step=step), IDENTITY)
    return tmp_path


def test_round_trip_is_exact(data: Path, saved: Path) -> None:
    recipe = tiny_recipe(data, run={"seed": 1})
    decoder = build_decoder(recipe, torch.device("cpu"), Layout())
    optimizer = build_optimizer(recipe, decoder)
    newest, passed_over = newest_complete(saved)
    assert newest is not None
    assert newest.progress.step == 3
    assert not passed_over
    load_checkpoint(newest, decoder, optimizer)
    again = saved / "again"
    again.mkdir()
    save_checkpoint(again, decoder, optimizer, newest.progress, IDENTITY)
    first, second = (p / "step-000000003" / "tensors" / "__0_0.distcp" for p in (saved, again))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("damage", ["truncate", "alter", "remove", "unmark", "unfinished"])
def test_a_torn_checkpoint_is_named_and_passed_over(saved: Path, damage: str) -> None:
    newest = saved / "step-000000003"
    file = newest / "tensors" / "__0_0.distcp"
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:-10])
    elif damage == "alter":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(bytes(content))
    elif damage == "remove":
        file.unlink()
    elif damage == "unmark":
        (newest / "COMPLETE").unlink()
    else:
        newest.rename(saved / ".step-000000003.tmp")
    found, passed_over = newest_complete(saved)
    assert found is not None
    assert found.progress.step == 2
    assert len(passed_over) == (damage != "unfinished")
    assert all("step-000000003" in fault for fault in passed_over)


def test_nothing_is_unpickled_before_its_digest_is_known(saved: Path) -> None:
    metadata = saved / "step-000000003" / "tensors" / ".metadata"
    marker = saved / "was-run"
    metadata.write_bytes(b"cposix\nsystem\n(S'touch %s'\ntR." % str(marker).encode())
    with pytest.raises(CheckpointError, match="cannot be used"):
        open_checkpoint(saved / "step-000000003")
    assert not marker.exists()


def test_prune_keeps_the_newest_whole_ones_and_the_protected(saved: Path) -> None:
    (saved / "step-000000003" / "COMPLETE").unlink()
    prune(saved, keep=1, protected={1})
    left = [p.name for p in checkpoints(saved)]
    assert left == ["step-000000001", "step-000000002", "step-000000003"]
    prune(saved, keep=1, protected=set())
    assert [p.name for p in checkpoints(saved)] == ["step-000000002", "step-000000003"]


def test_t13_missing_and_unexpected_tensors_are_listed(data: Path, saved: Path) -> None:
    deeper = tiny_recipe(
        data, model=tiny_recipe(data).model.model_dump(exclude_none=True) | {"num_layers": 7}
    )
    decoder = build_decoder(deeper, torch.device("cpu"), Layout())
    checkpoint = open_checkpoint(saved / "step-000000003")
    with pytest.raises(CheckpointError, match=r"missing \['model\.layers\.6"):
        load_checkpoint(checkpoint, decoder, None)
    shallow = tiny_recipe(
        data, model=tiny_recipe(data).model.model_dump(exclude_none=True) | {"num_layers": 5}
    )
    with pytest.raises(CheckpointError, match=r"unexpected \['model\.layers\.5"):
        load_checkpoint(checkpoint, build_decoder(shallow, torch.device("cpu"), Layout()), None)


def test_another_shape_is_named(data: Path, saved: Path) -> None:
    wider = tiny_recipe(
        data, model=tiny_recipe(data).model.model_dump(exclude_none=True) | {"vocab_size": 300}
    )
    decoder: Decoder = build_decoder(wider, torch.device("cpu"), Layout())
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight has shape \(264, 16\)"):
        load_checkpoint(open_checkpoint(saved / "step-000000003"), decoder, None)


def test_t21_another_format_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"format 'zgcm-checkpoint/0'; this version reads"):
        parse_state('{"format": "zgcm-checkpoint/0"}', "here")


def forked(work: Callable[[], object]) -> int | None:
    """Run ``work`` in a forked process, where it may be killed, and return the exit code; negative for a signal."""

    def body() -> None:
        try:
            work()
        except ZgcmError as error:
            sys.exit(error.exit_code)

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(120)
    return process.exitcode


def limit_file_size(bytes_: int = 65536) -> None:
    """Let the system itself refuse long writes, as a full disk refuses them; short records still fit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, resource.RLIM_INFINITY))


class At(Hook):
    """Does something once, when an update's batches are read."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.step, self.action = step, action

    def batches_read(self, trainer: Trainer, batches: object) -> None:
        if trainer.progress.step + 1 == self.step:
            self.action()


class SavesAreOver(Hook):
    """Waits, before every update, for the save behind training, so that a test knows what it meets."""

    def step_start(self, trainer: Trainer) -> None:
        while trainer.saver.busy:
            time.sleep(0.01)


BOTH_WAYS = pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "background"])


def saving(data: Path, asynchronous: bool) -> Recipe:
    return tiny_recipe(data, checkpoint={"interval": 2, "keep": 2, "asynchronous": asynchronous})


@BOTH_WAYS
def test_a_full_disk_leaves_the_previous_checkpoint(data: Path, tmp_path: Path, asynchronous: bool) -> None:
    recipe = saving(data, asynchronous)
    code = forked(
        lambda: run_recipe(recipe, tmp_path / "run", hooks=[SavesAreOver(), At(4, limit_file_size)])
    )
    assert code == PathError.exit_code
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000002"]
    assert_goes_on_as_undisturbed(recipe, tmp_path)


@BOTH_WAYS
def test_a_disk_that_is_full_for_a_while_leaves_a_running_job(
    data: Path, tmp_path: Path, asynchronous: bool
) -> None:
    recipe, run = saving(data, asynchronous), tmp_path / "run"
    disk = [
        SavesAreOver(),
        At(4, limit_file_size),
        At(6, lambda: limit_file_size(resource.RLIM_INFINITY)),
    ]
    assert forked(lambda: run_recipe(recipe, run, hooks=disk)) == 0
    (failed,) = [r for r in read_json_lines(run / "metrics.jsonl") if r["kind"] == "event"]
    assert failed["event"] == "save_failed"
    assert "step-000000004" in failed["message"]
    assert (run / "checkpoints" / "step-000000006").is_dir()
    assert not (run / "checkpoints" / "step-000000004").exists()
    assert_goes_on_as_undisturbed(recipe, tmp_path)


def test_records_that_do_not_fit_end_the_run_with_the_reason(data: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(data)
    code = forked(lambda: run_recipe(recipe, tmp_path / "run", hooks=[At(4, lambda: limit_file_size(100))]))
    assert code == PathError.exit_code
    assert_goes_on_as_undisturbed(recipe, tmp_path)


def test_a_save_behind_training_holds_the_weights_of_its_own_step(data: Path, tmp_path: Path) -> None:
    class Late(Hook):
        """Lets the thread wait until two more updates have changed the weights."""

        def step_end(self, trainer: Trainer, result: object) -> None:
            if trainer.progress.step == 6:
                go_on.set()

    go_on = threading.Event()
    original = tensors.save

    def waiting_save(*args: Any, **kwargs: Any) -> object:
        if "step-000000004" in str(kwargs["checkpoint_id"]):
            assert go_on.wait(60)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "save", waiting_save)
        run_recipe(
            saving(data, True).model_copy(update={"checkpoint": kept(True)}), tmp_path / "run", hooks=[Late()]
        )
    run_recipe(saving(data, False).model_copy(update={"checkpoint": kept(False)}), tmp_path / "reference")
    for step in (4, 8, 12):
        name = Path("checkpoints") / f"step-{step:09d}" / "tensors" / "__0_0.distcp"
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "reference" / name).read_bytes(), step


def train(rank: int, world: int, recipe: Recipe, folder: Path) -> None:
    run_recipe(recipe, folder)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_save_behind_training_what_they_save_while_it_waits(
    data: Path, tmp_path: Path, world: int
) -> None:
    for name, asynchronous in (("waiting", False), ("background", True)):
        recipe = tiny_recipe(
            data,
            data={"global_batch": 6, "micro_batch": 1},
            parallel={"dp_shard": world},
            checkpoint={"interval": 2, "keep": 9, "asynchronous": asynchronous},
        )
        run_ranks(train, world, recipe, tmp_path / name)
    for step in (2, 4, 6, 12):
        one, two = (tensors_of(tmp_path / name, step) for name in ("waiting", "background"))
        assert {p.name for p in one.iterdir()} == {p.name for p in two.iterdir()}
        for shard in one.glob("*.distcp"):
            assert shard.read_bytes() == (two / shard.name).read_bytes(), (step, shard.name)


def tensors_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:09d}" / "tensors"


def kept(asynchronous: bool) -> CheckpointSection:
    return CheckpointSection(interval=4 if asynchronous else 2, keep=9, asynchronous=asynchronous)


def assert_goes_on_as_undisturbed(recipe: Recipe, folder: Path) -> None:
    run_recipe(recipe, folder / "run")
    run_recipe(recipe, folder / "reference")
    assert _losses(folder / "run") == _losses(folder / "reference")
    ends = [
        folder / name / "checkpoints" / "step-000000012" / "tensors" / "__0_0.distcp"
        for name in ("run", "reference")
    ]
    assert ends[0].read_bytes() == ends[1].read_bytes()
    assert all(check.passed for check in verify_run(folder / "run"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_run_ends_as_an_undisturbed_one(data: Path, tmp_path: Path, number: signal.Signals) -> None:
    recipe = tiny_recipe(data)
    kill = At(4, lambda: os.kill(os.getpid(), number))
    code = forked(lambda: run_recipe(recipe, tmp_path / "run", hooks=[kill]))
    assert code == (-signal.SIGKILL if number is signal.SIGKILL else 0)
    last = "step-000000002" if number is signal.SIGKILL else "step-000000004"
    assert checkpoints(tmp_path / "run" / "checkpoints")[-1].name == last
    assert_goes_on_as_undisturbed(recipe, tmp_path)


@pytest.mark.parametrize("where", ["before the mark", "before the name"])
@BOTH_WAYS
def test_a_run_killed_while_saving_ends_as_an_undisturbed_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, asynchronous: bool
) -> None:
    recipe = saving(data, asynchronous)

    def killing_seal(temporary: Path, final: Path) -> None:
        if final.name == "step-000000004":
            if where == "before the name":
                monkeypatch.setattr(Path, "rename", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        folder.seal(temporary, final)

    with monkeypatch.context() as patch:
        patch.setattr(tensors, "seal", killing_seal)
        assert forked(lambda: run_recipe(recipe, tmp_path / "run")) == -signal.SIGKILL
    assert [p.name for p in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000000002"]
    assert_goes_on_as_undisturbed(recipe, tmp_path)


def _losses(folder: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in read_json_lines(folder / "metrics.jsonl") if r["kind"] == "train"]


def test_no_whole_checkpoint_left_is_an_error_not_a_fresh_start(data: Path, tmp_path: Path) -> None:
    run_recipe(tiny_recipe(data), tmp_path)
    for path in checkpoints(tmp_path / "checkpoints"):
        shutil.rmtree(path / "tensors")
    with pytest.raises(CheckpointError, match="No whole checkpoint is left"):
        run_recipe(tiny_recipe(data), tmp_path)


def test_an_unwritable_folder_is_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PathError, match="A file stands where a folder is needed"):
        run_recipe(tiny_recipe(data), tmp_path / "file")
