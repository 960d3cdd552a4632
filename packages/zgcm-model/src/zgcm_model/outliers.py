"""Holding back extreme activations: a penalty on the outputs of the layers (TWEO), off unless asked for.

The penalty is the mean over layers of ``E[(|x| / (tau + eps)) ** p]``, x the residual stream after a layer. With a
high power it hardly sees values below tau and grows steeply above, which keeps FP8 scales usable.

    with collect_block_outputs(decoder) as outputs:
        hidden = decoder(token_ids)
    loss_sum, _ = decoder.lm_terms(hidden, targets, loss_mask)
    penalty_sum, _ = tweo_terms(outputs, loss_mask=loss_mask)
    (loss_sum + 0.01 * penalty_sum) / global_count_of_loss_tokens

Source: TWEO, arXiv:2511.23225.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from zgcm_model.decoder import Decoder

TAU = 3.0
"""Magnitude from which the penalty is felt."""
POWER = 4.0
WEIGHT = 0.01
"""Published weight of the penalty beside the mean token loss; nothing here applies it."""
EPSILON = 1e-6
"""Keeps the division defined for tau = 0."""


@contextmanager
def collect_block_outputs(decoder: Decoder) -> Iterator[list[Tensor]]:
    """Keep what every layer adds up to, for one forward pass; the values and the graph stay as they are.

    The backward pass may run inside or after the block, with or without recomputation of layers. The tensors are
    those that the next layer keeps anyway, so they cost no memory as long as the caller drops the list.

    Args:
        decoder: sharded or not; not a pipeline stage, which runs several micro-batches at once.

    Yields:
        A list that holds the residual stream [B, T, D] after each layer once the decoder has run. Under sequence
        parallelism it holds this rank's stretch of positions.

    Raises:
        ValueError: the decoder ran not once but several times or, when the block ends, not at all; or its layers
            were compiled before, so that nothing could be collected.
    """
    outputs: list[Tensor] = []
    blocks = decoder.blocks()

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        # A layer that is computed again for the backward pass comes by once more.
        if len(outputs) < len(blocks):
            outputs.append(output)

    def start(module: nn.Module, args: Any) -> None:
        if outputs:
            raise ValueError("the decoder ran twice in one collection; collect each micro-batch by itself")

    handles = [decoder.register_forward_pre_hook(start)]
    handles += [block.register_forward_hook(keep) for block in blocks]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
    if len(outputs) != len(blocks):
        raise ValueError(
            f"{len(outputs)} of {len(blocks)} layers were seen; run the decoder once inside the collection, and "
            "compile its layers inside one as well"
        )


def tweo_terms(
    outputs: Sequence[Float[Tensor, "batch time hidden"]],
    *,
    loss_mask: Tensor | None = None,
    tau: float = TAU,
    p: float = POWER,
    eps: float = EPSILON,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Sum the penalty over positions, so that micro-batches and ranks add up before the one division.

    Args:
        outputs: residual stream after each layer, of one forward pass.
        loss_mask: bool [B, T], True where a position counts; None for all. With the mask of the loss the count is
            that of the loss tokens, and one division serves both. Values where it is False may be anything.
        tau: magnitude from which the penalty is felt.
        p: power, at least 1.
        eps: added to ``tau``.

    Returns:
        The sum over counted positions of the mean over layers and channels of ``(|x| / (tau + eps)) ** p``,
        float32 (float64 for such outputs), and the int64 count of positions. (0, 0) with a usable graph when
        nothing counts.

    Raises:
        ValueError: there are no outputs, the mask is not bool or has another shape, or a number is out of range.

    Source: TWEO, arXiv:2511.23225.
    """
    _check(outputs, loss_mask, tau + eps, p)
    parts = [_PowerSum.apply(output, loss_mask, 1.0 / (tau + eps), float(p)) for output in outputs]
    total: Tensor = torch.stack(parts).sum() / (len(outputs) * outputs[0].shape[-1])
    if loss_mask is not None:
        return total, loss_mask.sum()
    return total, torch.tensor(outputs[0].shape[:2].numel(), device=total.device)


def _check(outputs: Sequence[Tensor], loss_mask: Tensor | None, scale: float, power: float) -> None:
    if not outputs:
        raise ValueError("outputs is empty; run the decoder inside collect_block_outputs first")
    if not scale > 0:
        raise ValueError(f"tau + eps = {scale} cannot be used; set a positive tau")
    if not power >= 1:
        raise ValueError(f"p={power} cannot be used; set at least 1")
    if loss_mask is None:
        return
    if loss_mask.dtype != torch.bool:
        raise ValueError(f"loss_mask has dtype {loss_mask.dtype}; pass a bool mask")
    if loss_mask.shape != outputs[0].shape[:2]:
        raise ValueError(
            f"loss_mask {list(loss_mask.shape)} does not match the positions {list(outputs[0].shape[:2])} of the "
            "outputs; under sequence parallelism pass the part of this rank"
        )


class _PowerSum(torch.autograd.Function):
    """Sum of (|x| * inverse) ** power over counted positions; keeps x, which the next layer keeps too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, inverse: float, power: float) -> Tensor:
        ctx.save_for_backward(x, mask)
        ctx.numbers = (inverse, power)
        rows = _power(_scaled(x, inverse), power).sum(-1)
        if mask is not None:
            rows = rows.where(mask, 0.0)
        return rows.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        x, mask = ctx.saved_tensors
        inverse, power = ctx.numbers
        scaled = _scaled(x, inverse)
        slope = _power(scaled, power - 1.0).mul_(scaled.sign()).mul_(power * inverse).mul_(grads[0])
        if mask is not None:
            slope = slope.where(mask.unsqueeze(-1), 0.0)
        return slope.to(x.dtype), None, None, None


def _scaled(x: Tensor, inverse: float) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)) * inverse


def _power(x: Tensor, power: float) -> Tensor:
    """Return |x| ** power in new memory."""
    return x.abs().pow_(power)
