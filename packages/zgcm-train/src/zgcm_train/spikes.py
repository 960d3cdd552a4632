"""What counts as a loss spike, and what is done about it."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SpikeAction = Literal["record", "skip", "stop"]


@dataclass(frozen=True)
class SpikePolicy:
    """A spike is a loss far above the median of recent ones; the median forgets single outliers.

    Attributes:
        factor: how many times the median; 0 turns the policy off.
        window: how many recent losses count; nothing is a spike before there are as many.
        action: ``record`` the event and update; ``skip`` the update; or ``stop`` the run before it.
    """

    factor: float = 0.0
    window: int = 64
    action: SpikeAction = "record"

    def is_spike(self, loss: float, recent: Sequence[float]) -> bool:
        """Return whether ``loss``, in nats per token, is a spike after the ``recent`` ones."""
        if not self.factor or len(recent) < self.window or not math.isfinite(loss):
            return False
        return loss > self.factor * statistics.median(recent)

    def remember(self, loss: float, recent: list[float]) -> None:
        """Append the loss of an update that was made, and forget what is older than the window."""
        if self.factor:
            recent.append(loss)
            del recent[: -self.window]
