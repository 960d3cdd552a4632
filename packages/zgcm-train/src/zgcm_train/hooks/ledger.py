"""Book what every update learned from, and the switch between stages."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zgcm_data import Batch, Ledger, read_ledger
from zgcm_train.files import read_json_lines
from zgcm_train.processes import is_main
from zgcm_train.stage_data import open_stage
from zgcm_train.step import StepResult
from zgcm_train.trainer import Hook, Trainer


class LedgerHook(Hook):
    """Writes one ledger record per log interval and before every checkpoint."""

    def __init__(self) -> None:
        """The ledger is opened when training starts."""
        self._ledger: Ledger | None = None
        self._batches: Sequence[Batch] = ()

    def stage_start(self, trainer: Trainer) -> None:
        """Drop what is being done again, open the stage's ledger, book a switch."""
        parts, progress = trainer.parts, trainer.progress
        path = parts.folder / "ledger.jsonl"
        stage = parts.recipe.stage[progress.stage].name
        if is_main():
            Ledger.rewind(path, progress.step)
        self._ledger = Ledger(
            path if is_main() else None,
            stage=stage,
            manifest=parts.loader.shards.manifest,
            group=parts.layout.data,
        )
        book_after_switch(self._ledger, trainer)
        if progress.stage > 0 and progress.next_row == 0:
            book_switch(self._ledger, trainer)

    def batches_read(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        """Remember the update's data until it is known whether it was learned."""
        self._batches = batches

    def step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Count the update, and write when an interval or a checkpoint is due."""
        ledger, progress, recipe = self._open_ledger(), trainer.progress, trainer.parts.recipe
        for batch in self._batches:
            ledger.add(batch if result.applied else unlearned(batch))
        if not result.applied:
            ledger.event("skipped", step=progress.step, loss_tokens_not_learned=result.loss_tokens)
        due = progress.step % recipe.log.interval == 0 or progress.step % recipe.checkpoint.interval == 0
        if due or progress.step == trainer.last_update or trainer.stopping:
            ledger.write(step=progress.step, global_rows=progress.rows, global_tokens=progress.tokens)
        if recipe.eval.interval and progress.step % recipe.eval.interval == 0:
            book_after_switch(ledger, trainer)

    def stage_end(self, trainer: Trainer) -> None:
        """Book the last evaluation, if it is the first after a switch."""
        book_after_switch(self._open_ledger(), trainer)

    def _open_ledger(self) -> Ledger:
        if self._ledger is None:
            raise RuntimeError("the ledger is opened by stage_start")
        return self._ledger


def unlearned(batch: Batch) -> Batch:
    """Return the batch with its loss tokens counted as none: it was read, but nothing was learned from it."""
    return dataclasses.replace(batch, source_loss_tokens=torch.zeros_like(batch.source_loss_tokens))


def book_switch(ledger: Ledger, trainer: Trainer) -> None:
    """Write the event of rule R9: what changed with the stage, and what was measured just before it."""
    recipe, progress = trainer.parts.recipe, trainer.progress
    path = trainer.parts.folder / "ledger.jsonl"
    if any(r.get("kind") == "switch" and r["step"] == progress.step for r in read_ledger(path)):
        return
    ended = recipe.stage[progress.stage - 1]
    evaluation = _last_evaluation(trainer.parts.folder)
    ledger.switch(
        dataclasses.replace(open_stage(recipe, progress.stage - 1).manifest, stage=ended.name),
        step=progress.step,
        global_tokens=progress.tokens,
        learning_rate_changed=_rate_changes(trainer),
        heldout=None if evaluation is None else evaluation["domains"],
    )


def book_after_switch(ledger: Ledger, trainer: Trainer) -> None:
    """Write what was first measured after the latest switch of stage, once it is known."""
    if not is_main():
        return
    records = read_ledger(trainer.parts.folder / "ledger.jsonl")
    switches = [r["step"] for r in records if r["kind"] == "switch"]
    booked = {r["switch_step"] for r in records if r["kind"] == "after_switch"}
    evaluation = _last_evaluation(trainer.parts.folder)
    if not switches or switches[-1] in booked or evaluation is None or evaluation["step"] <= switches[-1]:
        return
    ledger.event(
        "after_switch",
        step=evaluation["step"],
        switch_step=switches[-1],
        measured_at=evaluation["step"],
        heldout_after=evaluation["domains"],
    )


def _rate_changes(trainer: Trainer) -> bool:
    step = trainer.progress.step
    return trainer.parts.schedule(step) != trainer.parts.schedule(step + 1)


def _last_evaluation(folder: Path) -> dict[str, Any] | None:
    records = [r for r in read_json_lines(folder / "metrics.jsonl") if r["kind"] == "eval"]
    return records[-1] if records else None
