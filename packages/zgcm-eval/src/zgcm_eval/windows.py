"""Cut token sequences into windows, batch them by length and score them on one or several processes.

A window is one prefix id followed by consecutive tokens of one document::

    document                 t0 t1 t2 t3 t4 t5 t6            context 4, overlap 2
    window 0          prefix t0 t1 t2 t3                     scores t0 t1 t2 t3
    window 1                prefix t2 t3 t4 t5               scores       t4 t5
    window 2                      prefix t4 t5 t6            scores             t6

Every token is scored exactly once, and a token that is not in the first window sees at least ``overlap``
tokens before it. Batches are formed before they are dealt out to processes, so a batch, and with it every
rounding, is the same on one process and on many.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

Progress = Callable[[int, int], None]
"""Called with (batches done, batches in all)."""

ScoreBatch = Callable[[Int[Tensor, "B T"], Bool[Tensor, "B S"]], Float[Tensor, "B F"]]
"""Takes token ids and the mask of scored targets (S = T-1); returns F figures for each row."""


@dataclass(frozen=True)
class Window:
    """Consecutive token ids of which those from ``scored_from`` on are rated."""

    item: int
    """Index of the document, or of the request, that it belongs to."""
    token_ids: tuple[int, ...]
    """One prefix id and the tokens after it."""
    scored_from: int
    """Position in ``token_ids`` of the first rated token; at least 1."""


@dataclass(frozen=True)
class Batching:
    """How windows share forward passes.

    Args:
        tokens_per_batch: padded tokens of one forward pass; a longer window goes alone.
        group: processes that share the work, for instance the data-parallel group; None means this one alone.
    """

    tokens_per_batch: int = 4096
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.tokens_per_batch < 1:
            raise ValueError(
                f"tokens_per_batch is {self.tokens_per_batch}; give at least 1, for instance 4096"
            )


def cut_windows(
    item: int, token_ids: Sequence[int], prefix_id: int, context: int, overlap: int
) -> list[Window]:
    """Cut one document so that every token is scored exactly once.

    Args:
        item: index that the windows carry.
        token_ids: the document without any added id.
        prefix_id: id that stands in front of every window.
        context: tokens that a window takes from the document.
        overlap: tokens that a later window repeats from its predecessor, unscored.

    Returns:
        The windows in document order; none for an empty document.

    Raises:
        ValueError: ``context`` is under 1, or ``overlap`` is not within 0 and ``context - 1``.
    """
    if context < 1:
        raise ValueError(f"context is {context}; a window needs at least 1 token")
    if not 0 <= overlap < context:
        raise ValueError(f"overlap is {overlap}; with context {context} give 0 to {context - 1}")
    windows, scored = [], 0
    while scored < len(token_ids):
        start = max(0, scored - overlap) if scored else 0
        stop = min(start + context, len(token_ids))
        windows.append(Window(item, (prefix_id, *token_ids[start:stop]), 1 + scored - start))
        scored = stop
    return windows


def plan_batches(windows: Sequence[Window], tokens_per_batch: int) -> list[list[int]]:
    """Group windows of like length, the longest first, so that memory peaks at once and little is padded.

    Args:
        windows: what is to be scored.
        tokens_per_batch: padded tokens that a batch may hold.

    Returns:
        Indices into ``windows``, each exactly once; the same for the same input.
    """
    order = sorted(range(len(windows)), key=lambda index: (-len(windows[index].token_ids), index))
    batches: list[list[int]] = []
    for index in order:
        if batches:
            width = len(windows[batches[-1][0]].token_ids)
            if width * (len(batches[-1]) + 1) <= tokens_per_batch:
                batches[-1].append(index)
                continue
        batches.append([index])
    return batches


def pad_batch(windows: Sequence[Window], pad_id: int) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B S"]]:
    """Pad windows at the right and mark the targets that are scored.

    Args:
        windows: the rows of the batch.
        pad_id: any valid id; a causal model never shows it to a token before it.

    Returns:
        Token ids, and a mask of the targets ``token_ids[:, 1:]``.
    """
    width = max(len(window.token_ids) for window in windows)
    token_ids = torch.full((len(windows), width), pad_id, dtype=torch.int64)
    scored = torch.zeros(len(windows), width - 1, dtype=torch.bool)
    for row, window in enumerate(windows):
        token_ids[row, : len(window.token_ids)] = torch.tensor(window.token_ids)
        scored[row, window.scored_from - 1 : len(window.token_ids) - 1] = True
    return token_ids, scored


def score_windows(
    windows: Sequence[Window],
    score: ScoreBatch,
    pad_id: int,
    batching: Batching,
    progress: Progress | None = None,
) -> Float64[np.ndarray, "N F"]:
    """Score every window once, shared over the processes of ``batching.group``.

    Each process runs the same number of batches, the last ones perhaps again and in vain, because a sharded
    model's forward pass is a collective call.

    Args:
        windows: what is to be scored; the same on every process.
        score: rates one padded batch.
        pad_id: id that fills rows up.
        batching: batch size and processes.
        progress: told after each batch of this process.

    Returns:
        The figures of each window in the order of ``windows``, equal on every process.
    """
    if not windows:
        return np.zeros((0, 0))
    group = batching.group
    rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    batches = plan_batches(windows, batching.tokens_per_batch)
    rounds = -(-len(batches) // world)
    rows: list[tuple[list[int], Tensor]] = []
    for turn in range(rounds):
        number = turn * world + rank
        batch = batches[min(number, len(batches) - 1)]
        figures = score(*pad_batch([windows[index] for index in batch], pad_id))
        if number < len(batches):
            rows.append((batch, figures))
        if progress is not None:
            progress(turn + 1, rounds)
    return _collect(rows, len(windows), figures, group)


def _collect(
    rows: list[tuple[list[int], Tensor]], count: int, sample: Tensor, group: dist.ProcessGroup | None
) -> Float64[np.ndarray, "N F"]:
    """Put each window's figures at its index; the other processes hold zeros there, so the sum is exact."""
    result = torch.zeros(count, sample.shape[1], dtype=torch.float64)
    for batch, figures in rows:
        result[torch.tensor(batch)] = figures.detach().cpu().double()
    if group is not None:
        # A process group of NCCL moves only tensors of its GPU.
        moved = result.to(sample.device)
        dist.all_reduce(moved, group=group)
        result = moved.cpu()
    return result.numpy()


def summed_log_probability(
    log_probabilities: Float[Tensor, "B S"], scored: Bool[Tensor, "B S"]
) -> Float64[Tensor, "B"]:
    """Sum the scored log-probabilities of each row in float64; padding counts nothing, even NaN."""
    values = log_probabilities.detach().cpu().double()
    return torch.where(scored.cpu(), values, torch.zeros_like(values)).sum(dim=1)
