"""Trace some updates with PyTorch's profiler when the recipe asks for it."""

from torch.profiler import ProfilerActivity, profile, supported_activities

from zgcm_train.processes import is_main
from zgcm_train.step import StepResult
from zgcm_train.trainer import Hook, Trainer


class ProfilerHook(Hook):
    """Writes ``logs/trace-updates-FIRST-LAST.json`` for Perfetto or Chrome's tracing page, on the main rank.

    Args:
        first: update at which the trace begins.
        last: update at which it ends.
    """

    def __init__(self, first: int, last: int) -> None:
        """Nothing is traced before ``first``."""
        self.first, self.last = first, last
        self._profile: profile | None = None

    def step_start(self, trainer: Trainer) -> None:
        """Begin the trace before the first update's data are read."""
        if self._profile is None and is_main() and self.first <= trainer.progress.step + 1 <= self.last:
            wanted = supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA}
            self._profile = profile(activities=wanted, record_shapes=True, profile_memory=True)
            self._profile.start()

    def step_end(self, trainer: Trainer, result: StepResult) -> None:
        """End the trace after the last update."""
        if trainer.progress.step == self.last:
            self._write(trainer)

    def stage_end(self, trainer: Trainer) -> None:
        """End a trace that the stage cuts short."""
        self._write(trainer)

    def failed(self, trainer: Trainer, error: BaseException) -> None:
        """Keep what was traced so far."""
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if self._profile is not None:
            self._profile.stop()
            name = f"trace-updates-{self.first}-{trainer.progress.step}.json"
            self._profile.export_chrome_trace(str(trainer.parts.folder / "logs" / name))
            self._profile = None
