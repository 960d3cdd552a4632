"""Read evenly spaced rows with one copy each stretch, whatever file they lie in."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zgcm_data.rows import Integers

Copy = Callable[[int, int, npt.NDArray[np.int64]], None]
"""``copy(place, stride, out)`` fills ``out`` ``[n, T+1]`` with rows whose tokens start at ``place + i * stride``."""


class Run(NamedTuple):
    """Rows ``first`` to ``stop - 1`` of a block; the first starts at byte ``place``, the next ``stride`` on."""

    first: int
    stop: int
    place: int
    stride: int
    copy: Copy


def even_runs(places: Integers, first: int, copy: Copy) -> Iterator[Run]:
    """Split rows into stretches of even spacing.

    Args:
        places: int64 ``[n]``, byte at which each row's tokens start; n >= 1.
        first: place of the first of these rows in the block.
        copy: reads rows of this file.
    """
    steps = np.diff(places)
    changes = [*(np.flatnonzero(steps[1:] != steps[:-1]) + 1).tolist(), len(steps)]
    done = 0
    for change in changes:
        if change <= done < len(steps):
            continue
        stride = int(steps[done]) if change > done else 0
        yield Run(first + done, first + change + 1, int(places[done]), stride, copy)
        done = change + 1


class RunReader:
    """Reads any stretch of a block of rows.

    Args:
        runs: all rows of the block, in order.
    """

    def __init__(self, runs: list[Run]) -> None:
        self._runs = runs
        self._stops = [run.stop for run in runs]

    def read(self, first: int, out: npt.NDArray[np.int64]) -> None:
        """Fill ``out`` ``[m, T+1]`` with the tokens of rows ``first`` to ``first + m - 1``."""
        end, number, row = first + len(out), bisect_right(self._stops, first), first
        while row < end:
            run = self._runs[number]
            stop, number = min(end, run.stop), number + 1
            run.copy(run.place + (row - run.first) * run.stride, run.stride, out[row - first : stop - first])
            row = stop
