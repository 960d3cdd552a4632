"""One record per log interval: to ``metrics.jsonl``, the console and TensorBoard.

This is the only place that waits for the device during training.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from zgcm_model import flops_per_token
from zgcm_train.errors import ZgcmError
from zgcm_train.files import append_json_line, keep_lines
from zgcm_train.memory import peak_memory_bytes
from zgcm_train.processes import barrier, is_main
from zgcm_train.step import StepResult
from zgcm_train.trainer import Hook, Trainer

Line = Callable[[dict[str, Any]], None]
Warn = Callable[[str], None]


class MetricsHook(Hook):
    """Averages the loss over an interval's loss tokens and measures the time between its updates.

    Args:
        line: called with every record, for the console; None for silence.
        warn: called with what went wrong although training goes on.
    """

    def __init__(self, line: Line | None = None, warn: Warn | None = None) -> None:
        """Nothing is opened before training starts."""
        self.line = line
        self.warn = warn
        self._board: SummaryWriter | None = None
        self._clear()

    def stage_start(self, trainer: Trainer) -> None:
        """Drop records of updates that are being made again, and open TensorBoard."""
        folder, step = trainer.parts.folder, trainer.progress.step
        if is_main():
            keep_lines(folder / "metrics.jsonl", lambda record: record["step"] <= step)
        barrier()
        if trainer.parts.recipe.log.tensorboard and is_main():
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._clear()

    def step_start(self, trainer: Trainer) -> None:
        """Start the clock and note the rate of this update."""
        self._started = time.perf_counter()
        self._learning_rate = trainer.learning_rate

    def step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Add the update; write a record when the interval, the stage or the run is over."""
        self._seconds += time.perf_counter() - self._started
        self._loss_sum += result.loss_sum
        self._loss_tokens += result.loss_tokens
        self._updates += 1
        step = trainer.progress.step
        if trainer.spiked or not result.applied:
            self._event(trainer, *describe_fault(trainer, result))
        if step % trainer.parts.recipe.log.interval == 0 or step == trainer.last_update or trainer.stopping:
            self._write(trainer, result)

    def save_failed(self, trainer: Trainer, error: ZgcmError) -> None:
        """Record and say that a checkpoint is missing."""
        self._event(trainer, "save_failed", f"{error} Training goes on; the next save is tried as planned.")

    def stage_end(self, trainer: Trainer) -> None:
        """Close TensorBoard."""
        if self._board is not None:
            self._board.close()

    def failed(self, trainer: Trainer, error: BaseException) -> None:
        """Close TensorBoard."""
        self.stage_end(trainer)

    def _event(self, trainer: Trainer, event: str, message: str) -> None:
        record = {"kind": "event", "event": event, "step": trainer.progress.step, "message": message}
        if is_main():
            append_json_line(trainer.parts.folder / "metrics.jsonl", record)
        if self.warn is not None:
            self.warn(message)

    def _write(self, trainer: Trainer, result: StepResult) -> None:
        record = self._record(trainer, result)
        if is_main():
            append_json_line(trainer.parts.folder / "metrics.jsonl", record)
        if self._board is not None:
            for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second", "model_tflops"):
                self._board.add_scalar(f"train/{name}", record[name], record["step"])
            self._board.add_scalar("train/tokens", record["tokens"], record["step"])
        if self.line is not None:
            self.line(record)
        self._clear()

    def _record(self, trainer: Trainer, result: StepResult) -> dict[str, Any]:
        recipe, progress = trainer.parts.recipe, trainer.progress
        rate = self._updates * recipe.tokens_per_update / max(self._seconds, 1e-9)
        per_device = rate / recipe.parallel.devices
        flops = flops_per_token(recipe.model.architecture(), recipe.data.sequence_length)
        return {
            "kind": "train",
            "step": progress.step,
            "stage": recipe.stage[progress.stage].name,
            "loss": self._loss_sum / max(self._loss_tokens, 1),
            "grad_norm": result.grad_norm,
            "learning_rate": self._learning_rate,
            "rows": progress.rows,
            "tokens": progress.tokens,
            "loss_tokens": progress.loss_tokens,
            "skipped": progress.skipped,
            "tokens_per_second": rate,
            "tokens_per_second_per_device": per_device,
            "model_tflops": per_device * flops.total / 1e12,
            "model_tflops_if_all_full": per_device * flops.total_if_all_full / 1e12,
            "seconds": self._seconds,
            "seconds_left": self._seconds / self._updates * (recipe.total_updates - progress.step),
            "peak_memory_bytes": peak_memory_bytes(trainer.parts.settings.device),
        }

    def _clear(self) -> None:
        self._loss_sum, self._loss_tokens, self._updates, self._seconds = 0.0, 0, 0, 0.0
        self._started, self._learning_rate = 0.0, 0.0


def describe_fault(trainer: Trainer, result: StepResult) -> tuple[str, str]:
    """Return the name and the sentence of what was wrong with an update."""
    outcome = "it was made all the same" if result.applied else "it was left out"
    update = f"update {trainer.progress.step}"
    if trainer.spiked:
        recent = statistics.median(trainer.progress.recent_losses)
        loss = result.loss_sum / max(result.loss_tokens, 1)
        return (
            "loss_spike",
            f"The loss of {update}, {loss:.4f}, is a spike over a median of {recent:.4f}; {outcome}.",
        )
    flagged = () if result.scales is None else result.scales.flagged
    places = f" Not finite in FP8: {', '.join(flagged[:5])}." if flagged else ""
    return "not_finite", f"The loss or a gradient of {update} is not finite; {outcome}.{places}"
