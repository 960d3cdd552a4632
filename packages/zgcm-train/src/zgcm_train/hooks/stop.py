"""End a run in good order when it is asked to."""

import signal
from types import FrameType

from zgcm_train.trainer import Hook, Trainer


class StopHook(Hook):
    """Turns SIGTERM and SIGINT into a saved stop after the current update; a second SIGINT stops at once."""

    def __init__(self) -> None:
        """Nothing is installed before training starts."""
        self._previous: dict[int, object] = {}

    def stage_start(self, trainer: Trainer) -> None:
        """Install the handlers."""

        def ask(number: int, frame: FrameType | None) -> None:
            if trainer.stop_requested and number == signal.SIGINT:
                raise KeyboardInterrupt
            trainer.stop_requested = True

        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, ask)

    def stage_end(self, trainer: Trainer) -> None:
        """Restore the handlers that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def failed(self, trainer: Trainer, error: BaseException) -> None:
        """Restore the handlers that were there before."""
        self.stage_end(trainer)
