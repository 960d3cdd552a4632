"""Sample how values fit their formats: amaxes, scales, saturation, and the kurtosis of layer outputs."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

from zgcm_data import Batch
from zgcm_model.precision.watch import NumericsSample, NumericsWatch, Record
from zgcm_train.files import append_json_line, keep_lines
from zgcm_train.processes import barrier, is_main, world_size
from zgcm_train.step import StepResult
from zgcm_train.trainer import Hook, Trainer

SHOWN = ("amax", "scale", "saturated", "flushed", "kurtosis")


class NumericsHook(Hook):
    """Writes ``numerics.jsonl`` and TensorBoard every ``log.numerics_interval`` updates, and events on saturation.

    Args:
        warn: called once for each sample with events, for the console; None for silence.
    """

    def __init__(self, warn: Callable[[str], None] | None = None) -> None:
        """The watch is set up when the decoder is known."""
        self._warn = warn
        self._watch: NumericsWatch | None = None
        self._sample: NumericsSample | None = None
        self._open = ExitStack()
        self._board: SummaryWriter | None = None

    def stage_start(self, trainer: Trainer) -> None:
        """Drop samples of updates that are being made again, and set up the watch."""
        folder, step, log = trainer.parts.folder, trainer.progress.step, trainer.parts.recipe.log
        if is_main():
            keep_lines(folder / "numerics.jsonl", lambda record: record["step"] <= step)
            if log.tensorboard:
                self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        barrier()
        self._watch = NumericsWatch(
            trainer.parts.decoder,
            every=log.numerics_interval,
            saturation_threshold=log.saturation_threshold,
        )

    def batches_read(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        """Watch the update at hand if it is due."""
        step = trainer.progress.step + 1
        if self._watch is not None and self._watch.due(step):
            self._sample = self._open.enter_context(self._watch.sample(step))

    def step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Write what was seen; every rank takes part."""
        self._open.close()
        if self._sample is not None:
            records = self._sample.records(dist.group.WORLD if world_size() > 1 else None)
            self._sample = None
            if is_main():
                self._write(trainer, records)
                self._say(records)

    def stage_end(self, trainer: Trainer) -> None:
        """Stop watching."""
        self._open.close()
        if self._board is not None:
            self._board.close()

    def failed(self, trainer: Trainer, error: BaseException) -> None:
        """Stop watching."""
        self.stage_end(trainer)

    def _say(self, records: Sequence[Record]) -> None:
        events = [record for record in records if record["kind"] == "event"]
        if self._warn is None or not events:
            return
        worst = max(events, key=lambda event: float(event["saturated"]))
        others = f" ({len(events) - 1} more in metrics.jsonl)" if len(events) > 1 else ""
        self._warn(f"update {worst['step']}: {worst['message']}{others}")

    def _write(self, trainer: Trainer, records: Sequence[Record]) -> None:
        for record in records:
            if record["kind"] == "event":
                append_json_line(trainer.parts.folder / "metrics.jsonl", record)
                continue
            append_json_line(trainer.parts.folder / "numerics.jsonl", record)
            for figure in (
                name for name in SHOWN if self._board is not None and record.get(name) is not None
            ):
                assert self._board is not None
                self._board.add_scalar(f"{figure}/{record['name']}", record[figure], record["step"])
