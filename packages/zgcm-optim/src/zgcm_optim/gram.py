"""The iteration on Gram matrices, and its form for a matrix whose long side is cut over several ranks.

A matrix X of [n, m], n the short side, cut into pieces X = [X₁ ... X_W] along the long side:

    R = Σ Xᵢ Xᵢᵀ / tr(Σ Xᵢ Xᵢᵀ)     one sum over the ranks gives the Gram matrix and the norm
    Q = q(R)                        the polynomial of all steps, the same on every rank
    Xᵢ <- Q Xᵢ / norm               each rank its own piece

Rounding leaves eigenvalues of R that should be 0 at about ± the dtype's epsilon, and the steps multiply them by
(Π a)², a the first coefficients. A negative one runs away once it leaves the table's interval, so float32 carries
all steps at once only where (Π a)² times epsilon is small; float64 does for every table.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from zgcm_optim.coefficients import Triple
from zgcm_optim.costs import CPU_LOOP_SIDE
from zgcm_optim.products import product, symmetric_product

# How far a negative eigenvalue of rounding size may grow before float64 takes over. "quintic" and "simple" reach
# 0.03 and stay within 5e-4 of the exact update for every tested spectrum; "polar_express" and "deepseek_v4" are
# far beyond, and float32 without restarts fails for them.
GROWTH_LIMIT = 0.05

# Columns that are converted at a time, which bounds the extra memory.
COLUMNS = 4096

# A batch of matrices, or one of them.
Squares = Sequence[Tensor]


def polynomial(square: Squares, triples: Sequence[Triple]) -> tuple[float, Tensor]:
    """Return Q of these steps for the Gram matrix in ``square[0]``.

    Args:
        square: four tensors ``[n, n]`` or ``[B, n, n]``, the first filled; all are overwritten.
        triples: the coefficients of the steps.

    Returns:
        Q as (multiple of the identity, rest); the rest is one of ``square``.
    """
    gram, rest, step, spare = square
    multiple = 1.0
    for index, (a, b, c) in enumerate(triples):
        # P = aI + Z; on the first step Q is P itself.
        z = rest if index == 0 else step
        symmetric_product(gram, gram, z, addend=gram, beta=b, alpha=c)
        if index > 0:
            symmetric_product(z, rest, spare, addend=rest, beta=a)
            rest, spare = spare.add_(z, alpha=multiple), rest
        multiple *= a
        if index + 1 < len(triples):
            symmetric_product(z, gram, spare, addend=gram, beta=a)
            symmetric_product(z, spare, gram, addend=spare, beta=a)
    return multiple, rest


def carrier(triples: Sequence[Triple], dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which all steps can run on the Gram matrix without a restart.

    Args:
        triples: the coefficients of the steps.
        dtype: the dtype that the caller asked for.

    Returns:
        float32 for a bfloat16 result where the table allows it, else float64.
    """
    growth = math.prod(a for a, _, _ in triples) ** 2 * torch.finfo(torch.float32).eps
    return torch.float32 if dtype == torch.bfloat16 and growth < GROWTH_LIMIT else torch.float64


def magnitude(piece: Tensor) -> Tensor:
    """Return the largest absolute value of a piece as a float64 scalar, at least the smallest float32.

    Args:
        piece: ``[n, m]``, perhaps without columns.

    Returns:
        What the piece is divided by before its squares are taken.
    """
    tiny = torch.finfo(torch.float32).tiny
    if piece.numel() == 0:
        return torch.full((), tiny, dtype=torch.float64, device=piece.device)
    largest: Tensor = torch.linalg.vector_norm(piece, ord=torch.inf)
    return largest.double().clamp_(min=tiny)


def packed_gram(piece: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the lower triangle of the Gram matrix of a piece, ready to be summed over the ranks.

    Args:
        piece: ``[n, m]``, perhaps without columns.
        largest: its magnitude.
        dtype: dtype of the products.

    Returns:
        ``[n (n + 1) / 2]`` in float64, whose range holds the squares of all float32 numbers.
    """
    side = piece.shape[0]
    gram = piece.new_zeros((side, side), dtype=dtype)
    scale = largest.to(dtype)
    for columns in piece.split(COLUMNS, dim=1) if piece.numel() else ():
        part = columns.to(dtype) / scale
        symmetric_product(part, part.mT, gram, addend=gram)
    rows, columns = _triangle(side, piece.device)
    return gram[rows, columns].double().mul_(largest).mul_(largest)


def unpacked(triangles: Tensor, side: int) -> Tensor:
    """Return the symmetric matrices of packed triangles.

    Args:
        triangles: ``[B, n (n + 1) / 2]``.
        side: n.

    Returns:
        ``[B, n, n]`` of the same dtype.
    """
    rows, columns = _triangle(side, triangles.device)
    full = triangles.new_empty((len(triangles), side, side))
    full[:, rows, columns] = triangles
    full[:, columns, rows] = triangles
    return full


@lru_cache(maxsize=8)
def _triangle(side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = torch.tril_indices(side, side, device=device)
    return rows, columns


def polynomials(grams: Tensor, triples: Sequence[Triple], dtype: torch.dtype) -> tuple[Tensor, float, Tensor]:
    """Return the norms of matrices and the polynomials of their normalized Gram matrices.

    Args:
        grams: ``[B, n, n]`` in float64.
        triples: the coefficients of the steps.
        dtype: dtype of the iteration.

    Returns:
        Norms ``[B]`` in float64, and Q as (multiple of the identity, rest ``[B, n, n]``).
    """
    traces = grams.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_(min=torch.finfo(torch.float64).tiny)
    first = (grams / traces[:, None, None]).to(dtype)
    alone = grams.device.type == "cpu" and grams.shape[-1] >= CPU_LOOP_SIDE
    if not alone:
        square = [first, *(torch.empty_like(first) for _ in range(3))]
        return (traces.sqrt(), *polynomial(square, triples))
    spare = [torch.empty_like(first[0]) for _ in range(3)]
    for gram in first:
        multiple, rest = polynomial([gram, *spare], triples)
        gram.copy_(rest)
    return traces.sqrt(), multiple, first


def apply_polynomial(piece: Tensor, factor: Tensor, multiple: float, rest: Tensor, out: Tensor) -> None:
    """Write Q times a piece, divided by the norm of the whole matrix, into ``out``.

    Args:
        piece: ``[n, m]``, perhaps without columns.
        factor: two float64 numbers: the magnitude of the piece, and the norm of the whole matrix.
        multiple: multiple of the identity in Q.
        rest: ``[n, n]``, the rest of Q.
        out: ``[n, m]`` of any dtype.
    """
    largest, norm = factor.unbind()
    scale = largest.to(rest.dtype)
    # The magnitude of a piece is at most the norm, except where both are 0 and the floor stands for it.
    ratio = (largest / norm).clamp_(max=1.0).to(rest.dtype)
    for columns, target in zip(piece.split(COLUMNS, 1), out.split(COLUMNS, 1), strict=True):
        part = (columns.to(rest.dtype) / scale).mul_(ratio)
        target.copy_(product(rest, part, torch.empty_like(part), addend=part, beta=multiple))
