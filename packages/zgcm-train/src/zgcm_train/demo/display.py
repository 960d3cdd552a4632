"""How the demo shows its progress: bars on a terminal, one line per step elsewhere."""

import time
from types import TracebackType
from typing import Any, Self

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from zgcm_train.console import evaluation_line, progress_console, short_count, train_line


class DemoDisplay:
    """Shows the steps of the data build, then the updates of each stage.

    Args:
        total: updates of all stages.
    """

    def __init__(self, total: int) -> None:
        """Nothing is shown before the display is entered."""
        self.total = total
        self.console = progress_console()
        self._bars = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}
        self._notes: dict[str, str] = {}

    def __enter__(self) -> Self:
        """Start drawing."""
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing and leave the terminal as it was."""
        self._bars.stop()

    def data_step(self, step: str, fraction: float, note: str = "") -> None:
        """Show how far a step of the data build is; a fraction of 1 ends it."""
        self._show(step.replace("_", " "), fraction, note)

    def event(self, kind: str, value: Any) -> None:
        """Show an event of ``run_recipe``."""
        if kind == "train":
            self._train(value)
        elif kind == "eval":
            self.console.print(evaluation_line(value), soft_wrap=True)
        elif kind == "warning":
            self.console.print(f"warning: {value}", style="yellow", soft_wrap=True)

    def _train(self, record: dict[str, Any]) -> None:
        note = f"loss {record['loss']:.3f}  {short_count(record['tokens_per_second'])} tok/s"
        if self.console.is_terminal:
            self._show("train", record["step"] / self.total, f"{record['stage']}  {note}")
        else:
            self.console.print(train_line(record, self.total), soft_wrap=True)

    def _show(self, step: str, fraction: float, note: str) -> None:
        if step not in self._tasks:
            self._tasks[step] = self._bars.add_task(step, total=1.0, note="")
            self._started[step] = time.perf_counter()
        if note and note != "done":
            self._notes[step] = note
        note = self._notes.get(step, note)
        self._bars.update(self._tasks[step], completed=fraction, note=note)
        if fraction >= 1.0 and not self.console.is_terminal:
            seconds = time.perf_counter() - self._started[step]
            self.console.print(f"{step}: {note or 'done'} ({seconds:.1f} s)", soft_wrap=True)
