"""Ending in time: variants that would overrun are left out by name, and a watchdog ends a hung process."""

import os
import sys
import threading
import time
from collections.abc import Callable

NEED_SECONDS = {"compiled": 60.0, "eager": 30.0}
"""Assumed cost of a mode's first variant on a GPU; later ones are judged by the first."""
EXIT_WATCHDOG = 4


class Budget:
    """Seconds since the process began to work.

    Args:
        seconds: no variant starts that is expected to end later.
        need: expected seconds by mode.
    """

    def __init__(self, seconds: float, need: dict[str, float] | None = None) -> None:
        self._start = time.monotonic()
        self._seconds = seconds
        self._need = dict(NEED_SECONDS if need is None else need)

    def spent(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._start

    def allows(self, mode: str) -> bool:
        """Say whether a variant of this mode is expected to end in time."""
        return self.spent() + self._need[mode] <= self._seconds

    def left(self) -> float:
        """Seconds until the budget ends."""
        return self._seconds - self.spent()

    def learn(self, mode: str, seconds: float) -> None:
        """Expect the next variant of this mode to take as long as this one did."""
        self._need[mode] = seconds


def start_watchdog(
    seconds: float, describe: Callable[[], str], end: Callable[[int], None] = os._exit
) -> threading.Timer:
    """End the process after some seconds, whatever it is doing; results are printed as they come.

    Args:
        seconds: from now.
        describe: says what is unfinished.
        end: ends the process with an exit code.

    Returns:
        The timer; cancel it when the work is done.
    """

    def bite() -> None:
        print(f"watchdog: stopped after {seconds:.0f} s; unfinished: {describe()}", flush=True)
        sys.stderr.flush()
        end(EXIT_WATCHDOG)

    timer = threading.Timer(seconds, bite)
    timer.daemon = True
    timer.start()
    return timer
