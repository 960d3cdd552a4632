"""From rows to batches: the part that every backend shares, so that their output is identical.

What must be looked up or counted is done for a block of many micro batches at once, which keeps Python out of
the cost per row; tokens and masks are made a few rows at a time, which keeps them in the cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zgcm_data.loader.batch import Batch
from zgcm_data.loader.options import LoaderOptions, RowBlock, RowSource
from zgcm_data.masks import RowFields, Segments, count_sources
from zgcm_data.order import BatchPlan
from zgcm_data.rows import PADDING_SOURCE, Integers
from zgcm_data.shards.manifest import Manifest, ShardError

BLOCK_TOKENS = 1 << 22
BLOCK_ROWS = 1024
"""Tokens and rows looked up at once, at most; enough to spread the fixed cost of a block."""

PIECE_TOKENS = 1 << 18
"""Tokens made at a time, cut into micro batches: few, so that they are still in the cache when they are used."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one pass over a source reads.

    Attributes:
        source: the rows.
        plan: which of them this rank reads.
        start: position of the first row of micro step 0.
        micro_steps: how many micro steps.
        options: the loader's options.
    """

    source: RowSource
    plan: BatchPlan
    start: int
    micro_steps: int
    options: LoaderOptions

    @property
    def manifest(self) -> Manifest:
        """The source's manifest."""
        return self.source.manifest

    @property
    def total(self) -> int:
        """Positions in the stage's order, all epochs together."""
        return len(self.source) * self.options.epochs

    @property
    def pin_memory(self) -> bool:
        """Whether tensors are page-locked."""
        wanted = self.options.pin_memory
        return torch.cuda.is_available() if wanted is None else wanted

    def blocks(self, times: int = 1) -> Iterator[tuple[int, int]]:
        """Yield (first micro step, number of micro steps) of each block, or of every ``times`` blocks."""
        rows = min(BLOCK_ROWS, BLOCK_TOKENS // self.manifest.sequence_length)
        size = max(1, rows // self.plan.micro_batch) * times
        for first in range(0, self.micro_steps, size):
            yield first, min(size, self.micro_steps - first)

    def positions(self, first: int, count: int) -> Integers:
        """Return the positions of a block, int64 ``[count * micro_batch]``; -1 past the end of the stage."""
        rows = self.plan.rows(self.start, first, count).reshape(-1)
        return np.where(rows < self.total, rows, -1) if rows[-1] >= self.total else rows


class _Filled:
    """A block that ends with rows of nothing but padding, to fill up the last update."""

    def __init__(self, block: RowBlock | None, present: int, missing: int, eos_id: int) -> None:
        self._block, self._present, self._eos_id = block, present, eos_id
        filler = np.tile(np.array([[0, PADDING_SOURCE, -1, 0]], np.int64), (missing, 1))
        ones = np.ones(missing, np.int64)
        self.docs, self.per_row, self.ended = filler, ones, np.zeros(missing, np.bool_)
        if block is not None:
            self.docs = np.concatenate([block.docs, filler])
            self.per_row = np.concatenate([block.per_row, ones])
            self.ended = np.concatenate([block.ended, self.ended])

    def read_tokens(self, first: int, out: npt.NDArray[np.int64]) -> None:
        present = max(0, min(self._present - first, len(out)))
        if self._block is not None and present:
            self._block.read_tokens(first, out[:present])
        out[present:] = self._eos_id


def look_up(job: Job, positions: Integers) -> RowBlock:
    """Find rows by their positions, -1 standing for a row of filler."""
    present = int((positions >= 0).sum())
    block = job.source.block(positions[:present] % len(job.source)) if present else None
    if block is not None and present == len(positions):
        return block
    return _Filled(block, present, len(positions) - present, job.manifest.eos_id)


def piece_places(job: Job, count: int) -> Iterator[tuple[int, int]]:
    """Yield (first, stop) of the micro batches of a block of ``count`` that are made together."""
    size = max(1, PIECE_TOKENS // (job.manifest.sequence_length * job.plan.micro_batch))
    for first in range(0, count, size):
        yield first, min(first + size, count)


class BlockBatches:
    """The micro batches of one block.

    Args:
        job: what is read.
        first: first micro step.
        count: micro steps of the block.

    Raises:
        ShardError: the rows cannot be read as the manifest says.
    """

    def __init__(self, job: Job, first: int, count: int) -> None:
        self._job, self.count, self._pin = job, count, job.pin_memory
        self._positions = job.positions(first, count)
        self._block = look_up(job, self._positions)
        sources, isolate = len(job.manifest.sources), job.options.isolate_documents
        width = job.manifest.sequence_length + 1
        segments = Segments.of(self._block.docs, self._block.per_row, width)
        fault = segments.first_fault(sources)
        if fault is not None:
            row = int(self._positions[fault]) % len(job.source)
            raise ShardError(f"row {row} has an impossible docs table; its shard was altered")
        self._fields = RowFields(segments, isolate=isolate)
        counts = count_sources(segments, self._block.ended, job.plan.micro_batch, sources, isolate=isolate)
        columns = np.stack((counts.tokens, counts.loss_tokens, counts.documents, counts.rows), axis=1)
        self._counts = torch.from_numpy(columns).flatten(0, 1).unbind()
        self._rows = torch.from_numpy(self._positions).view(count, -1).unbind()

    def __iter__(self) -> Iterator[Batch]:
        for first, stop in piece_places(self._job, self.count):
            yield from self.piece(first, stop)

    def piece(self, first: int, stop: int) -> list[Batch]:
        """Make micro batches ``first`` to ``stop - 1`` of the block."""
        size, device = self._job.plan.micro_batch, self._job.options.device
        place = (first * size, stop * size)
        made = (self._tokens(*place), self._fields.loss_mask(*place), self._fields.document_ids(*place))
        tensors = [torch.from_numpy(array) for array in made]
        if self._pin:
            tensors = [tensor.pin_memory() for tensor in tensors]
        parts: list[tuple[Tensor, ...]] = [(tensor,) for tensor in tensors]
        if stop - first > 1:
            parts = [tensor.view(stop - first, size, -1).unbind() for tensor in tensors]
        counts = [self._counts[4 * number : 4 * number + 4] for number in range(first, stop)]
        rows = self._rows[first:stop]
        batches = [Batch(t, m, d, r, *c) for t, m, d, r, c in zip(*parts, rows, counts, strict=True)]
        return batches if device is None else [batch.to(device) for batch in batches]

    def _tokens(self, first: int, stop: int) -> Integers:
        tokens = np.empty((stop - first, self._job.manifest.sequence_length + 1), np.int64)
        self._block.read_tokens(first, tokens)
        return tokens
