"""Cutting a sequence into overlapping blocks, with a backward that adds the overlaps up once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _CutBlocks(torch.autograd.Function):
    """[B, T, K, H] -> the leading positions, and blocks with the look-back of each in front."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: int, block: int, lookback: int) -> tuple[Tensor, Tensor]:
        ctx.cut, ctx.shape = (first, block, lookback), x.shape
        own, before = block_views(x, first, block, lookback)
        return x[:, :first].clone(), torch.cat((before, own), dim=2).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        first, block, lookback = ctx.cut
        grad_first, grad_blocks = grads
        count = -(-(ctx.shape[1] - first) // block)
        blocks = grad_blocks.unflatten(0, (ctx.shape[0], count))
        grad = grad_blocks.new_empty(ctx.shape[0], first + count * block, *ctx.shape[2:])
        own, before = block_views(grad, first, block, lookback)
        grad[:, :first] = grad_first
        own.copy_(blocks[:, :, lookback:])
        before.add_(blocks[:, :, :lookback])
        return grad[:, : ctx.shape[1]], None, None, None


def block_views(x: Tensor, first: int, block: int, lookback: int) -> tuple[Tensor, Tensor]:
    """Return the blocks after position ``first`` and the look-back in front of each.

    Args:
        x: [B, T, ...]; padded at the end with zeros to whole blocks, in which case the results are no views.
        first: where the first block starts; at least ``lookback``.
        block: positions per block.
        lookback: positions in front of each block, at most ``block``.

    Returns:
        [B, count, block, ...] and [B, count, lookback, ...].
    """
    count = -(-(x.shape[1] - first) // block)
    if missing := first + count * block - x.shape[1]:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    start = first - lookback
    before = x[:, start : start + count * block].unflatten(1, (count, block))[:, :, :lookback]
    return x[:, first:].unflatten(1, (count, block)), before


def cut_blocks(x: Tensor, first: int, block: int, lookback: int) -> tuple[Tensor, Tensor]:
    """Split keys or values for block-wise attention.

    Args:
        x: [B, T, K, H].
        first: length of the leading part, at least ``lookback``.
        block: positions per block.
        lookback: positions of the previous block that each block repeats in front.

    Returns:
        [B, first, K, H], and [B * count, lookback + block, K, H] whose last block is zero-padded.
    """
    leading, blocks = _CutBlocks.apply(x, first, block, lookback)
    return leading, blocks
