"""Embedding, head and loss with the vocabulary split over ranks; uneven and empty shares are fine."""

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from zgcm_model.loss import DEFAULT_CHUNK, HeadTerms, check_targets, check_terms, select_counted, through_head
from zgcm_model.parallel.collectives import all_reduce, split_to_whole, whole_to_partial_input


class VocabularyShard(NamedTuple):
    """The rows of the vocabulary that this rank holds.

    Attributes:
        start: first id.
        stop: the id after the last one that is no padding.
        total: ids of all ranks that are no padding.
        size: rows of a full share, the same on every rank.
        group: the ranks.
    """

    start: int
    stop: int
    total: int
    size: int
    group: ProcessGroup

    @property
    def rows(self) -> int:
        """Ids on this rank."""
        return self.stop - self.start


def vocabulary_shard(rows: int, real_rows: int, group: ProcessGroup) -> VocabularyShard:
    """Return this rank's share, as DTensor cuts it: equal chunks, the last ones short or empty.

    Args:
        rows: rows of the whole table, padding included.
        real_rows: rows that are no padding.
        group: the ranks.

    Returns:
        The share.
    """
    size = -(-rows // group.size())
    start = min(group.rank() * size, real_rows)
    return VocabularyShard(start, min(start + size, real_rows), real_rows, size, group)


def embed(token_ids: Tensor, local_weight: Tensor, shard: VocabularyShard) -> Tensor:
    """Look up the ids this rank holds; the others give zeros, so the ranks' results are partial.

    Args:
        token_ids: int [B, T], the same on every rank.
        local_weight: this rank's rows of the table.
        shard: which ids they are.

    Returns:
        [B, T, D], to be summed over the ranks.
    """
    mine = (token_ids >= shard.start) & (token_ids < shard.stop)
    if shard.rows == 0:
        return local_weight.sum() * 0 + local_weight.new_zeros(*token_ids.shape, local_weight.shape[1])
    found = F.embedding((token_ids - shard.start).where(mine, 0), local_weight)
    return found * mine.unsqueeze(-1).to(found.dtype)


def vocabulary_parallel_logits(hidden: Tensor, local_weight: Tensor, shard: VocabularyShard) -> Tensor:
    """Return the logits of the whole vocabulary on every rank.

    Args:
        hidden: [..., D], the same on every rank.
        local_weight: this rank's rows of the head, padding left out.
        shard: which ids they are.

    Returns:
        [..., V].
    """
    logits = F.linear(whole_to_partial_input(hidden, shard.group), local_weight)
    padded = F.pad(logits, (0, shard.size - shard.rows))
    return split_to_whole(padded, -1, shard.group)[..., : shard.total]


def vocabulary_parallel_lm_terms(
    hidden: Float[Tensor, "batch time hidden"],
    local_weight: Float[Tensor, "rows hidden"],
    targets: Int[Tensor, "batch time"],
    loss_mask: Tensor,
    shard: VocabularyShard,
    *,
    chunk: int = DEFAULT_CHUNK,
    z_loss: float = 0.0,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Sum the losses like ``chunked_lm_terms`` with the head's rows spread over ranks.

    Args:
        hidden: the same on every rank; its gradient comes out complete on every rank.
        local_weight: this rank's rows of the head, padding left out.
        targets: the token that follows each position.
        loss_mask: [B, T] bool or 0/1, whether each target counts.
        shard: which ids ``local_weight`` holds.
        chunk: tokens whose logits exist at the same time.
        z_loss: weight of the squared log-partition; 0 for none.

    Returns:
        float32 loss sum and int64 count of targets, the same on every rank.

    Raises:
        ValueError: as ``chunked_lm_terms`` says.
    """
    keep = check_terms(hidden, targets, loss_mask, z_loss)
    chosen, wanted = select_counted(hidden, targets, keep)
    check_targets(wanted, shard.total)
    chunk_loss = partial(_chunk_loss, shard=shard, z_loss=z_loss)
    terms = HeadTerms(chunk, chunk_loss, join=partial(all_reduce, group=shard.group))
    return through_head(chosen, local_weight, wanted, terms), keep.sum()


def _chunk_loss(
    logits: Tensor, targets: Tensor, shard: VocabularyShard, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of a chunk, whole, and the gradient of this rank's logits."""
    scores = logits.float()
    highest = scores.amax(-1) if shard.rows else scores.new_full((scores.shape[0],), -torch.inf)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=shard.group)
    mine = (targets >= shard.start) & (targets < shard.stop)
    column = (targets - shard.start).where(mine, 0).unsqueeze(1)
    exponentials = (scores - highest.unsqueeze(1)).exp_()
    wanted = scores.gather(1, column).squeeze(1) if shard.rows else torch.zeros_like(highest)
    sums = torch.stack((exponentials.sum(-1), wanted.where(mine, 0.0)))
    dist.all_reduce(sums, group=shard.group)
    log_partition = sums[0].log() + highest
    loss = (log_partition - sums[1]).sum() + z_loss * log_partition.square().sum()
    gradient = exponentials.mul_(((1 + 2 * z_loss * log_partition) / sums[0]).unsqueeze(1))
    if shard.rows:
        gradient.scatter_add_(1, column, -mine.unsqueeze(1).to(gradient.dtype))
    return loss, gradient
