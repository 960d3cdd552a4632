"""From rows to batches: the part that every backend shares, so that their output is identical.

Work is done for a block of several micro batches at once and cut afterwards, which keeps Python out of the
cost per row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from zgcm_data.loader.batch import Batch
from zgcm_data.loader.options import LoaderOptions, RowSource
from zgcm_data.masks import Segments, count_sources, document_ids, ends_in_last, loss_mask
from zgcm_data.order import BatchPlan
from zgcm_data.rows import PADDING_SOURCE, Integers
from zgcm_data.shards.manifest import Manifest, ShardError

BLOCK_TOKENS = 1 << 18
"""Tokens read at once: large enough to spread the fixed cost, small enough to stay in the cache."""


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

    def blocks(self) -> list[tuple[int, int]]:
        """Return (first micro step, number of micro steps) of each block."""
        per_block = max(1, BLOCK_TOKENS // (self.plan.micro_batch * (self.manifest.sequence_length + 1)))
        return [
            (first, min(per_block, self.micro_steps - first))
            for first in range(0, self.micro_steps, per_block)
        ]

    def positions(self, first: int, count: int) -> Integers:
        """Return the positions of a block, int64 ``[count * micro_batch]``; -1 past the end of the stage."""
        rows = self.plan.rows(self.start, first, count).reshape(-1)
        return np.where(rows < self.total, rows, -1) if len(rows) and rows[-1] >= self.total else rows


def with_filler(docs: Integers, per_row: Integers, missing: int) -> tuple[Integers, Integers]:
    """Add ``missing`` rows that are all padding to the docs tables of a block."""
    filler = np.tile(np.array([[0, PADDING_SOURCE, -1, 0]], np.int64), (missing, 1))
    return np.concatenate([docs, filler]), np.concatenate([per_row, np.ones(missing, np.int64)])


def cut(
    job: Job, positions: Integers, tokens: torch.Tensor, tables: tuple[Integers, Integers]
) -> Iterator[Batch]:
    """Turn a block of rows into micro batches.

    Args:
        job: what is read.
        positions: int64 ``[R]``, of the rows; -1 for rows of filler.
        tokens: int64 ``[R, T+1]``, on the CPU or a GPU.
        tables: docs tables of the rows, joined, and the entries of each.

    Raises:
        ShardError: a docs table cannot be true.
    """
    manifest, isolate, size = job.manifest, job.options.isolate_documents, job.plan.micro_batch
    segments = Segments.of(*tables, tokens.shape[1])
    fault = segments.first_fault(len(manifest.sources))
    if fault is not None:
        raise ShardError(f"row {int(positions[fault])} has an impossible docs table; its shard was altered")
    last = ends_in_last(tokens[:, -1:].cpu().numpy(), manifest.eos_id)
    counts = count_sources(segments, last, size, len(manifest.sources), isolate=isolate)
    mask, documents = (
        _place(loss_mask(segments, isolate=isolate), tokens),
        _place(document_ids(segments), tokens),
    )
    rows = torch.from_numpy(positions)
    sums = [
        torch.from_numpy(values)
        for values in (counts.tokens, counts.loss_tokens, counts.documents, counts.rows)
    ]
    for group, first in enumerate(range(0, segments.rows, size)):
        part = slice(first, first + size)
        yield Batch(tokens[part], mask[part], documents[part], rows[part], *(total[group] for total in sums))


def _place(values: np.ndarray, beside: torch.Tensor) -> torch.Tensor:
    """Put an array where ``beside`` is: on its device, page-locked if it is."""
    tensor = torch.from_numpy(values)
    if beside.is_cuda:
        return tensor.pin_memory().to(beside.device, non_blocking=True)
    return tensor.pin_memory() if torch.cuda.is_available() and beside.is_pinned() else tensor
