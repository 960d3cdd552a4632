"""The language-model loss as two numbers, a sum and a count, so that means are taken once and last.

Rules: shift once; the mask follows the target; select before the cross entropy; sums in float32; divide only
by the global count.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

DEFAULT_CHUNK = 512
"""Tokens whose logits exist at the same time."""


def causal_lm_terms(
    logits: Float[Tensor, "batch time vocab"],
    token_ids: Int[Tensor, "batch time"],
    loss_mask: Tensor,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Sum the losses of predicting each token from the one before; shifts inside.

    Args:
        logits: scores at each position.
        token_ids: the unshifted ids; the target of position t is ``token_ids[:, t + 1]``.
        loss_mask: [B, T] bool or 0/1, unshifted: whether each token counts as a target. Logits at positions
            whose target does not count may be anything, even NaN.

    Returns:
        float32 loss sum and int64 count of targets; (0, 0) with a usable graph when nothing counts.

    Raises:
        ValueError: shapes differ, the mask holds anything but 0 and 1, or a counted target is outside the
            vocabulary.

    Source: handbook of pretraining, rules R1 and R2.
    """
    if logits.shape[:2] != token_ids.shape:
        raise ValueError(f"logits {list(logits.shape)} and token_ids {list(token_ids.shape)} do not match")
    keep = _counted(loss_mask, token_ids)[:, 1:]
    targets = token_ids[:, 1:][keep]
    check_targets(targets, logits.shape[-1])
    chosen = logits[:, :-1][keep].float()
    return F.cross_entropy(chosen, targets.long(), reduction="sum"), keep.sum()


def global_token_mean(sums: Tensor, counts: Tensor) -> Tensor:
    """Divide the sum of all losses by the number of all targets.

    Args:
        sums: loss sums of micro-batches or ranks, any shape.
        counts: their target counts, the same shape.

    Returns:
        float32 scalar.

    Raises:
        ValueError: the shapes differ or no target counts at all.

    Source: handbook of pretraining, rules R2 and R3.
    """
    if sums.shape != counts.shape:
        raise ValueError(
            f"sums {list(sums.shape)} and counts {list(counts.shape)} do not match; pass one count per sum"
        )
    total = counts.sum()
    if int(total) <= 0:
        raise ValueError(f"counts add up to {int(total)}; at least one target in the global batch must count")
    return sums.float().sum() / total


ChunkLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps the logits [n, V] and targets [n] of a chunk to its loss and to the gradient of the logits."""


class HeadTerms(NamedTuple):
    """How the loss is taken through the output head.

    Attributes:
        chunk: tokens whose logits exist at the same time.
        chunk_loss: loss and gradient of a chunk.
        join: sums the rows' gradient over the ranks that share the head; None when one has it all.
    """

    chunk: int
    chunk_loss: ChunkLoss
    join: Callable[[Tensor], Tensor] | None = None


def chunked_lm_terms(
    hidden: Float[Tensor, "batch time hidden"],
    head_weight: Float[Tensor, "vocab hidden"],
    targets: Int[Tensor, "batch time"],
    loss_mask: Tensor,
    chunk: int = DEFAULT_CHUNK,
    *,
    z_loss: float = 0.0,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Sum the losses through the output head, a few tokens at a time; shifts nothing.

    The gradients are computed chunk by chunk in the forward pass, so no [B, T, V] tensor ever exists.

    Args:
        hidden: hidden states after the final norm.
        head_weight: the output head.
        targets: the token that follows each position.
        loss_mask: [B, T] bool or 0/1, whether each target counts.
        chunk: tokens whose logits exist at the same time.
        z_loss: weight of the squared log-partition that is added to each token's loss; 0 for none.

    Returns:
        float32 loss sum and int64 count of targets; (0, 0) with a usable graph when nothing counts.

    Raises:
        ValueError: shapes differ, the mask holds anything but 0 and 1, ``chunk`` is below 1, ``z_loss`` is
            negative, or a counted target is outside the vocabulary.
    """
    keep = check_terms(hidden, targets, loss_mask, z_loss)
    chosen, wanted = select_counted(hidden, targets, keep)
    check_targets(wanted, head_weight.shape[0])
    terms = HeadTerms(chunk, partial(_chunk_loss, z_loss=z_loss))
    return through_head(chosen, head_weight, wanted, terms), keep.sum()


def check_terms(
    hidden: Tensor, targets: Tensor, loss_mask: Tensor, z_loss: float
) -> Bool[Tensor, "batch time"]:
    """Check the inputs of a chunked loss.

    Args:
        hidden: [B, T, D].
        targets: [B, T].
        loss_mask: [B, T].
        z_loss: weight of the squared log-partition.

    Returns:
        bool [B, T], True where the target counts.

    Raises:
        ValueError: as :func:`chunked_lm_terms` says.
    """
    if hidden.shape[:2] != targets.shape:
        raise ValueError(f"hidden {list(hidden.shape)} and targets {list(targets.shape)} do not match")
    if z_loss < 0:
        raise ValueError(f"z_loss={z_loss} cannot be used; set 0 or more")
    return _counted(loss_mask, targets)


def through_head(rows: Tensor, weight: Tensor, targets: Tensor, terms: HeadTerms) -> Float[Tensor, ""]:
    """Sum the losses of rows, a chunk of logits at a time.

    Args:
        rows: [n, D], hidden states whose targets count.
        weight: [V, D], the output head or this rank's rows of it.
        targets: int64 [n].
        terms: how.

    Returns:
        float32 loss sum.

    Raises:
        ValueError: the chunk is below 1.
    """
    if terms.chunk < 1:
        raise ValueError(f"chunk={terms.chunk} cannot be used; set at least 1 token")
    total: Tensor = _ThroughHead.apply(rows, weight, targets, terms)
    return total


def select_counted(hidden: Tensor, targets: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Pick the rows whose target counts; without a copy when all do.

    Args:
        hidden: [B, T, D].
        targets: [B, T].
        keep: bool [B, T].

    Returns:
        [n, D] and int64 [n].
    """
    rows, wanted = hidden.flatten(0, 1), targets.flatten().long()
    index = keep.flatten().nonzero().squeeze(1)
    if index.numel() == wanted.numel():
        return rows, wanted
    return rows.index_select(0, index), wanted.index_select(0, index)


def _counted(loss_mask: Tensor, targets: Tensor) -> Tensor:
    if loss_mask.shape != targets.shape:
        raise ValueError(f"loss_mask {list(loss_mask.shape)} does not match the ids {list(targets.shape)}")
    if loss_mask.dtype == torch.bool:
        return loss_mask
    keep = loss_mask != 0
    if not torch.equal(keep.to(loss_mask.dtype), loss_mask):
        raise ValueError(
            "loss_mask holds values other than 0 and 1; weights are not supported, pass a bool mask"
        )
    return keep


def check_targets(targets: Tensor, vocab_size: int) -> None:
    """Refuse counted targets outside the vocabulary; on a CPU only, where looking costs nothing.

    Args:
        targets: int [n].
        vocab_size: targets must lie in [0, vocab_size).

    Raises:
        ValueError: a target is outside.
    """
    if targets.numel() == 0 or targets.device.type != "cpu":
        return
    low, high = (int(x) for x in targets.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"targets holds {low if low < 0 else high} where the loss mask is set, outside "
            f"[0, {vocab_size}); clear the mask there or use the right tokenizer"
        )


class _ThroughHead(torch.autograd.Function):
    """Loss sum over rows; both gradients are accumulated while the logits of a chunk are at hand."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, terms: HeadTerms) -> Tensor:
        need_rows, need_weight = ctx.needs_input_grad[:2]
        compute = _matmul_dtype(rows)
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        grad_rows = torch.empty_like(rows, dtype=torch.float32 if terms.join else None) if need_rows else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        with torch.autocast(rows.device.type, enabled=False):
            matrix = weight.to(compute)
            for start in range(0, rows.shape[0], terms.chunk):
                part = slice(start, start + terms.chunk)
                chunk = rows[part].to(compute)
                loss, gradient = terms.chunk_loss(chunk @ matrix.T, targets[part])
                total += loss
                gradient = gradient.to(compute)
                if grad_rows is not None:
                    grad_rows[part] = gradient @ matrix
                if grad_weight is not None:
                    _accumulate_product(grad_weight, gradient, chunk)
                # Or it would live beside the next chunk's logits.
                del gradient
        if grad_rows is not None and terms.join is not None:
            grad_rows = terms.join(grad_rows)
        ctx.dtypes = (rows.dtype, weight.dtype)
        ctx.save_for_backward(grad_rows, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        # Scaled in float32: the factor is one over a token count, which bfloat16 would round.
        scaled = [
            None
            if gradient is None
            else (gradient.to(torch.promote_types(dtype, torch.float32)) * grads[0]).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return scaled[0], scaled[1], None, None


def _matmul_dtype(rows: Tensor) -> torch.dtype:
    """Return the dtype in which products of the rows are computed: autocast's where it is on."""
    device = rows.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype


def _accumulate_product(total: Tensor, gradient: Tensor, rows: Tensor) -> None:
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.T, rows)
    else:
        total += gradient.T @ rows


def _chunk_loss(logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return the loss of a chunk and, in the memory of its log-probabilities, the gradient of the logits."""
    log_probabilities = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    picked = log_probabilities.gather(1, targets.unsqueeze(1))
    log_partition = logits.gather(1, targets.unsqueeze(1)).float() - picked
    loss = -picked.sum() + z_loss * log_partition.square().sum()
    gradient = log_probabilities.exp_()
    if z_loss:
        gradient *= 1 + 2 * z_loss * log_partition
    return loss, gradient.scatter_add_(1, targets.unsqueeze(1), torch.full_like(picked, -1.0))
