"""Where a row lies, and which rows a rank reads: pure functions of a few integers.

The order is data. Row i of a stage is row i of its shard set, so nothing here shuffles, scans or knows of
ranks other than by number. Update k (1-based) covers rows ``[start + (k-1)*G, start + k*G)`` for every
data-parallel size; micro step m of rank r reads ``micro_batch`` consecutive rows from
``start + (m * dp_size + r) * micro_batch``. Tensor- and context-parallel ranks of one replica pass the same
``dp_rank`` and so read the same rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from zgcm_data.rows import Integers


class RowOrder:
    """Maps a global row index to a shard and an offset in it, by bisection over the shard sizes.

    Args:
        shard_rows: rows of each shard, in order.
    """

    def __init__(self, shard_rows: Sequence[int]) -> None:
        self._bounds = np.concatenate([[0], np.cumsum(np.asarray(shard_rows, np.int64))]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def locate(self, row: int) -> tuple[int, int]:
        """Return the shard that holds a row and the row's offset in that shard.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is not among the {len(self)} rows of the set")
        shard = int(np.searchsorted(self._bounds, row, side="right")) - 1
        return shard, row - int(self._bounds[shard])

    def split(self, rows: Integers) -> list[tuple[int, slice, Integers]]:
        """Split rows at the borders of shards.

        Args:
            rows: int64 ``[n]``, each inside the set.

        Returns:
            One ``(shard, place in rows, offsets in the shard)`` per stretch that stays in one shard.
        """
        ends = rows[[0, -1]]
        shard = np.searchsorted(self._bounds, ends, side="right") - 1
        if shard[0] == shard[1] and ends[1] - ends[0] == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all()):
            return [(int(shard[0]), slice(0, len(rows)), rows - self._bounds[shard[0]])]
        shard = np.searchsorted(self._bounds, rows, side="right") - 1
        cuts = [0, *(np.flatnonzero(shard[1:] != shard[:-1]) + 1).tolist(), len(rows)]
        return [(int(shard[a]), slice(a, b), rows[a:b] - self._bounds[shard[a]]) for a, b in pairwise(cuts)]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Which rows of a global batch a data-parallel rank reads.

    Attributes:
        global_batch: G, rows per update over all ranks.
        dp_rank: this rank among the data-parallel ranks.
        dp_size: number of data-parallel ranks.
        micro_batch: rows per micro batch of one rank.
    """

    global_batch: int
    dp_rank: int
    dp_size: int
    micro_batch: int

    def __post_init__(self) -> None:
        for name in ("global_batch", "dp_size", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; use 1 or more")
        if not 0 <= self.dp_rank < self.dp_size:
            raise ValueError(f"dp_rank {self.dp_rank} is not below dp_size {self.dp_size}")
        if self.global_batch % self.rows_per_micro_step:
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of micro_batch {self.micro_batch} times "
                f"dp_size {self.dp_size}; change one of them"
            )

    @property
    def rows_per_micro_step(self) -> int:
        """Rows that all ranks together read in one micro step."""
        return self.micro_batch * self.dp_size

    @property
    def accumulation(self) -> int:
        """Micro batches per update."""
        return self.global_batch // self.rows_per_micro_step

    def rows(self, start: int, first: int, count: int) -> Integers:
        """Return the rows this rank reads in micro steps ``first`` to ``first + count - 1``.

        Args:
            start: row at which micro step 0 begins.
            first: first micro step.
            count: number of micro steps.

        Returns:
            int64 ``[count, micro_batch]``.
        """
        base = start + np.arange(first, first + count, dtype=np.int64) * self.rows_per_micro_step
        return np.asarray(base[:, None] + self.dp_rank * self.micro_batch + np.arange(self.micro_batch))


def row_in_stage(global_rows: int, stage_start: int, stage_rows: int) -> int:
    """Return the row of a stage's own shard set at which a run goes on.

    Args:
        global_rows: rows consumed so far over all stages.
        stage_start: rows consumed when the stage began.
        stage_rows: rows of the stage's shard set.

    Raises:
        ValueError: the numbers do not fit each other, so some row would be skipped or read twice.
    """
    row = global_rows - stage_start
    if row < 0:
        raise ValueError(
            f"{global_rows} rows were consumed, but the stage begins after {stage_start}; "
            "resume the stage before it, or correct the stage's start"
        )
    if row > stage_rows:
        raise ValueError(
            f"row {row} of the stage ({global_rows} consumed, stage begins after {stage_start}) is past the "
            f"{stage_rows} rows of its shard set; this is the set or the start of another stage"
        )
    return row
