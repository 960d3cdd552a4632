"""What one orthogonalization costs, and which method is cheaper where.

With n the short side, m the long side and a product of [n, k] by [k, m] counted as 2nkm operations:

* standard, per step: ``X Xᵀ`` (2n²m), ``A²`` (2n³) and ``B X`` (2n²m);
* Gram, per segment of L steps: ``X Xᵀ`` and ``Q X`` once (4n²m), and 4L - 3 products of n by n (2n³ each).
"""

from dataclasses import dataclass

import torch

# Steps that the Gram method does on the small matrix before it starts again from the product with X. The small
# matrix holds the squares of the singular values; its rounding error grows by a factor a² (16 and more) in each
# step, and an eigenvalue that it turns negative runs away. In bfloat16 two steps keep every tested spectrum within
# 1.1 times the largest singular value of the standard iteration, and three do not. A matrix of fewer than 32 rows
# averages too little of the error and restarts at every step, which is the standard iteration.
SEGMENT = 3
SEGMENT_BFLOAT16 = 2
SEGMENT_MIN_SIDE = 32

# Shortest side from which a CPU runs matrix by matrix, with symmetric blocks, rather than batched.
CPU_LOOP_SIDE = 512


@dataclass(frozen=True)
class Crossover:
    """The aspect ratio from which the Gram method is the faster one.

    Args:
        min_side: the row holds from this short side on.
        aspect: long side divided by short side.
    """

    min_side: int
    aspect: float


# Measured for "cpu" (2 cores, AVX-512 BF16; benchmarks/test_orthogonalize_benchmark.py). Other devices have no
# symmetric product here, so their row is where the operation counts of the two methods meet, with a margin.
CROSSOVERS: dict[str, tuple[Crossover, ...]] = {
    "cpu": (Crossover(128, 2.0), Crossover(512, 1.8), Crossover(768, 1.6)),
    "other": (Crossover(128, 2.0),),
}


def choose_method(short: int, long: int, device_type: str) -> str:
    """Return the faster method for matrices of one shape.

    Args:
        short: short side of the matrix.
        long: long side of the matrix.
        device_type: ``"cpu"``, ``"cuda"``, ...

    Returns:
        ``"standard"`` or ``"gram"``.
    """
    rows = CROSSOVERS.get(device_type, CROSSOVERS["other"])
    valid = [row for row in rows if short >= row.min_side]
    if not valid:
        return "standard"
    row = max(valid, key=lambda row: row.min_side)
    return "gram" if long >= row.aspect * short else "standard"


def segments(steps: int, short: int, dtype: torch.dtype) -> list[int]:
    """Split the steps of the Gram method into runs between restarts.

    Args:
        steps: number of iterations.
        short: short side of the matrices.
        dtype: dtype of the iteration.

    Returns:
        Lengths of the runs, summing to ``steps``.
    """
    longest = SEGMENT
    if dtype == torch.bfloat16:
        longest = SEGMENT_BFLOAT16 if short >= SEGMENT_MIN_SIDE else 1
    full, rest = divmod(steps, longest)
    return [longest] * full + ([rest] if rest else [])


def operations(rows: int, columns: int, steps: int, method: str, dtype: torch.dtype) -> int:
    """Count the operations of one orthogonalization when no symmetry is used.

    Args:
        rows: rows of the matrix.
        columns: columns of the matrix.
        steps: number of iterations.
        method: ``"standard"`` or ``"gram"``.
        dtype: dtype of the iteration.

    Returns:
        Floating-point operations.
    """
    short, long = min(rows, columns), max(rows, columns)
    wide, small = 2 * short * short * long, 2 * short**3
    if method == "standard":
        return steps * (2 * wide + small)
    return sum(2 * wide + (4 * run - 3) * small for run in segments(steps, short, dtype))
