"""Blocks of a matrix that are orthogonalized apart.

Three layouts, named by the ``blocks`` entry of a parameter group:

* ``None``: the matrix is one block.
* a list of row counts, e.g. ``(512, 512, 128, 128)`` for the query, gate, key and value rows of one group:
  the pattern repeats down the rows, and each kind, joined over its repetitions, is one block. A matrix of
  one repetition, e.g. ``(11008, 11008)`` for a fused gate and up projection, is simply cut.
* a whole number n: n equal blocks along ``block_dim``, which is what n tensor-parallel ranks hold.

A block is a view ``[repetitions, rows, columns]`` of the matrix and stands for the matrix of
repetitions * rows rows.

Source: published ZGCM-1 training setup (fused projections are split by kind, not by head).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Blocks = int | Sequence[int] | None


def check_blocks(blocks: Blocks, block_dim: int, shape: Sequence[int]) -> None:
    """Refuse a layout that does not fit a matrix.

    Args:
        blocks: the layout.
        block_dim: the dim that a whole number of blocks divides, 0 or 1.
        shape: rows and columns of the matrix.

    Raises:
        ValueError: sizes that are not positive, or that do not divide the matrix.
    """
    if block_dim not in (0, 1):
        raise ValueError(f"block_dim={block_dim!r}: a matrix has the dims 0 (rows) and 1 (columns)")
    if blocks is None:
        return
    sizes = [blocks] if isinstance(blocks, int) else list(blocks)
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"blocks={blocks!r}: give positive whole numbers, or None for one block")
    if isinstance(blocks, int) and shape[block_dim] % blocks:
        raise ValueError(
            f"blocks={blocks} does not divide dim {block_dim} of a matrix of shape {tuple(shape)}"
        )
    if not isinstance(blocks, int) and block_dim != 0:
        raise ValueError(f"blocks={blocks!r} lists row counts; set block_dim=0")
    if not isinstance(blocks, int) and shape[0] % sum(sizes):
        raise ValueError(
            f"blocks={blocks!r} sums to {sum(sizes)}, which does not divide the {shape[0]} rows of a matrix of "
            f"shape {tuple(shape)}; put parameters of another layout into a group of their own"
        )


def block_views(matrix: Tensor, blocks: Blocks, block_dim: int = 0) -> list[Tensor]:
    """Return the blocks of a matrix as views.

    Args:
        matrix: ``[rows, columns]``.
        blocks: the layout; see the module.
        block_dim: the dim that a whole number of blocks divides.

    Returns:
        Views ``[repetitions, rows of the block, columns of the block]``.
    """
    if blocks is None:
        return [matrix.unsqueeze(0)]
    if isinstance(blocks, int):
        return [part.unsqueeze(0) for part in matrix.chunk(blocks, dim=block_dim)]
    pattern = matrix.unflatten(0, (-1, sum(blocks)))
    return list(pattern.split(list(blocks), dim=1))


def block_shapes(shape: Sequence[int], blocks: Blocks, block_dim: int = 0) -> list[tuple[int, int]]:
    """Return rows and columns of each block of a matrix, repetitions joined.

    Args:
        shape: rows and columns of the matrix.
        blocks: the layout.
        block_dim: the dim that a whole number of blocks divides.

    Returns:
        One pair for each block.
    """
    views = block_views(torch.empty(tuple(shape), device="meta"), blocks, block_dim)
    return [(view.shape[0] * view.shape[1], view.shape[2]) for view in views]
