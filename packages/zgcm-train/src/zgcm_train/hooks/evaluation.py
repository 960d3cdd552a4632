"""Measure the held-out sets without touching training."""

from pathlib import Path
from typing import Any

from zgcm_eval import HeldoutOptions, HeldoutSet, evaluate_heldout, load_heldout
from zgcm_eval.adapters.zgcm import ZgcmLanguageModel
from zgcm_train.files import append_json_line, read_json_lines
from zgcm_train.gathered import GatheredDecoder
from zgcm_train.processes import is_main, of_main
from zgcm_train.step import StepResult
from zgcm_train.trainer import Hook, Trainer


class EvaluationHook(Hook):
    """Evaluates at the run's start, at each stage switch, every ``eval.interval`` updates and at the end.

    A switch is measured when the new stage begins, on the weights it restored.

    Args:
        line: called with every record, for the console; None for silence.
    """

    def __init__(self, heldout: Path, tokenizer: Path, line: Any = None) -> None:
        """Read the frozen sets; a changed set is refused."""
        self.sets: list[HeldoutSet] = load_heldout(heldout)
        self.tokenizer = tokenizer
        self.line = line

    def stage_start(self, trainer: Trainer) -> None:
        """Measure the weights that the stage begins with, once."""
        if trainer.progress.next_row == 0:
            self.measure(trainer, "switch" if trainer.progress.stage else "start")

    def step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Measure when the interval is reached."""
        interval = trainer.parts.recipe.eval.interval
        if interval and trainer.progress.step % interval == 0 and trainer.progress.step < trainer.last_update:
            self.measure(trainer, "interval")

    def stage_end(self, trainer: Trainer) -> None:
        """Measure the final weights of the run."""
        if trainer.progress.stage == len(trainer.parts.recipe.stage) - 1:
            self.measure(trainer, "end")

    def measure(self, trainer: Trainer, event: str) -> None:
        """Evaluate and record, unless this event of this step is on record already."""
        path, progress = trainer.parts.folder / "metrics.jsonl", trainer.progress
        if of_main(is_recorded(path, progress.step, event)):
            return
        recipe = trainer.parts.recipe
        layout = trainer.parts.layout
        eos_id = trainer.parts.loader.shards.manifest.eos_id
        model = ZgcmLanguageModel(
            GatheredDecoder(trainer.parts.decoder, layout), self.tokenizer, eos_id=eos_id
        )
        options = HeldoutOptions(context=recipe.data.sequence_length)
        report = evaluate_heldout(model, self.sets, options, group=layout.data)
        record = {
            "kind": "eval",
            "event": event,
            "step": progress.step,
            "stage": recipe.stage[progress.stage].name,
            "tokens": progress.tokens,
            "heldout_digest": report.digest,
            "domains": {domain.name: domain.as_dict() for domain in report.domains},
        }
        if is_main():
            append_json_line(path, record)
        if self.line is not None:
            self.line(record)


def is_recorded(path: Path, step: int, event: str) -> bool:
    """Return whether ``metrics.jsonl`` holds this evaluation already."""
    wanted = ("eval", step, event)
    return any((r["kind"], r["step"], r.get("event")) == wanted for r in read_json_lines(path))
