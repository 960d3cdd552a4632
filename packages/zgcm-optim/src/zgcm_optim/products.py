"""Matrix products of the iteration, with symmetric results computed once and every operation counted.

All functions write into tensors that the caller owns, so that an iteration allocates nothing. A 2-D operand
is one matrix; a 3-D operand is a batch, which goes to the device's batched product, since that is faster for small
matrices. A symmetric product of larger ones on a CPU computes the lower blocks only and mirrors them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

# Rows per block of a symmetric product. Measured with AVX-512 BF16: 192 to 256 rows gain 1.13 at side 512, 1.30 at
# 768, 1.35 at 1024 and 1.55 at 2048; smaller blocks skip more work but run less efficiently.
SYMMETRIC_BLOCK = 256

# The same below side 768, for X Xᵀ and in batches, where smaller blocks lose less: 1.05 to 1.2 at side 384.
SMALL_BLOCK = 128

# Blocks pay from the first side on for X Xᵀ where X is at least twice as wide, for others from the second on.
WIDE_SIDE, SQUARE_SIDE = 256, 384


@dataclass
class OperationCount:
    """Floating-point operations that products have done (a multiply-add is two)."""

    flops: int = 0


_counters: list[OperationCount] = []


@contextmanager
def count_operations() -> Iterator[OperationCount]:
    """Count the operations of all products inside the block.

    Yields:
        A count whose ``flops`` grows as products run; a symmetric product counts the blocks it computes.
    """
    counter = OperationCount()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


def product(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    *,
    addend: Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> Tensor:
    """Write ``alpha * left @ right + beta * addend`` into ``out``.

    Args:
        left: ``[n, k]`` or ``[B, n, k]``.
        right: ``[k, m]`` or ``[B, k, m]``.
        out: ``[n, m]`` or ``[B, n, m]``; must not share memory with ``left`` or ``right``.
        addend: added to the product, of the shape of ``out``; None for nothing.
        beta: factor of the addend.
        alpha: factor of the product.

    Returns:
        ``out``.
    """
    for counter in _counters:
        counter.flops += 2 * out.numel() * left.shape[-1]
    if addend is None and alpha == 1.0:
        return torch.matmul(left, right, out=out)
    if addend is None:
        addend, beta = out, 0.0
    if out.ndim == 2:
        return torch.addmm(addend, left, right, beta=beta, alpha=alpha, out=out)
    return torch.baddbmm(addend, left, right, beta=beta, alpha=alpha, out=out)


def symmetric_product(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    *,
    addend: Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> Tensor:
    """Write ``alpha * left @ right + beta * addend`` into ``out``, which is known to be symmetric.

    Args:
        left: ``[n, k]`` or ``[B, n, k]``.
        right: ``[k, n]`` or ``[B, k, n]``.
        out: ``[n, n]`` or ``[B, n, n]``; must not share memory with ``left`` or ``right``.
        addend: a symmetric tensor of the shape of ``out``, or None.
        beta: factor of the addend.
        alpha: factor of the product.

    Returns:
        ``out``; blocks off the diagonal are exact mirrors of each other.
    """
    block = _block(left, out, addend)
    if block is None:
        return product(left, right, out, addend=addend, beta=beta, alpha=alpha)
    if out.ndim == 3 and addend is None:
        # A batched product of blocks would copy the transposed operand; one matrix after the other does not.
        for rows, columns, target in zip(left, right, out, strict=True):
            symmetric_product(rows, columns, target, alpha=alpha)
        return out
    side = out.shape[-1]
    for start in range(0, side, block):
        stop = min(start + block, side)
        part = None if addend is None else addend[..., start:stop, :stop]
        rows, columns = left[..., start:stop, :], right[..., :stop]
        product(rows, columns, out[..., start:stop, :stop], addend=part, beta=beta, alpha=alpha)
        out[..., :start, start:stop].copy_(out[..., start:stop, :start].mT)
    return out


def _block(left: Tensor, out: Tensor, addend: Tensor | None) -> int | None:
    """Return the rows of a block, or None where the whole product is the faster one."""
    side = out.shape[-1]
    wide = left.shape[-1] >= 2 * side
    if out.device.type != "cpu" or side < (WIDE_SIDE if wide else SQUARE_SIDE):
        return None
    small = side < 3 * SYMMETRIC_BLOCK and (addend is None or out.ndim == 3)
    block = SMALL_BLOCK if small else SYMMETRIC_BLOCK
    return block if side >= 2 * block else None
