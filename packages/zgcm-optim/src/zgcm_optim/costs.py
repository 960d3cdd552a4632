"""What one orthogonalization costs, and which method is cheaper where.

With n the short side, m the long side and a product of [n, k] by [k, m] counted as 2nkm operations:

* standard, per step: ``X Xᵀ`` (2n²m), ``A²`` (2n³) and ``B X`` (2n²m);
* Gram, per segment of L steps: ``X Xᵀ`` and ``Q X`` once (4n²m), and 4L - 3 products of n by n (2n³ each).

A matrix whose long side is cut over W tensor-parallel ranks, its pieces over D data-parallel ones, has two ways:

* gathered to one owner among W D ranks, which does the cheaper of the above and sends the result back;
* distributed: pieces are gathered over the data-parallel ranks only, and one owner in each of the W columns does
  the Gram method without a restart on its piece (4n²m/W + (4L - 3) 2n³) and sums n (n + 1) / 2 float64 numbers
  with the other columns.
"""

import math
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


@dataclass(frozen=True)
class TensorCut:
    """A matrix whose long side is cut over tensor-parallel ranks.

    Args:
        short: short side.
        long: long side, of the whole matrix.
        tensor: ranks that cut the long side.
        data: ranks that hold each piece between them.
        element_bytes: bytes of one element on its way to an owner and back.
    """

    short: int
    long: int
    tensor: int
    data: int
    element_bytes: int

    @property
    def piece(self) -> int:
        """Long side of the largest piece."""
        return math.ceil(self.long / self.tensor)

    def gathered_bytes(self, ranks: int) -> float:
        """Return what each rank sends when all elements go to one of ``ranks`` ranks and back."""
        elements = self.short * self.long / (self.tensor * self.data)
        return self.element_bytes * elements * (1 - 1 / ranks)


def distributed_operations(cut: TensorCut, steps: int) -> int:
    """Count the operations that an owner of one piece does in the distributed Gram form.

    Args:
        cut: the matrix and its ranks.
        steps: number of iterations.

    Returns:
        Floating-point operations.
    """
    return 4 * cut.short**2 * cut.piece + (4 * steps - 3) * 2 * cut.short**3


def all_reduce_bytes(elements: int, ranks: int) -> int:
    """Count the bytes that one rank sends in an all-reduce of float64 numbers.

    Args:
        elements: how many numbers are summed.
        ranks: how many ranks sum them.

    Returns:
        Bytes of a ring, which sends every number twice but for its own part.
    """
    return 2 * 8 * elements * (ranks - 1) // ranks


def choose_tensor_parallel(cut: TensorCut, operations: int, steps: int, weight: float) -> str:
    """Return how a matrix is handled whose long side is cut over tensor-parallel ranks.

    The distributed form is taken where no rank then has more operations, times their weight, than its share of the
    gathered form, and the ranks send fewer bytes, so that the bounds on both hold whichever form is taken. With five
    steps in bfloat16, iterated on in float32 by one data-parallel rank, that is from an aspect of 28.5 on at 2 ranks,
    62.5 at 4 and 130.5 at 8. Measured with 2 processes on AVX-512 BF16, one thread each: at [256, 1472] the distributed
    form takes 1.7 times the processor time, at [256, 4096] the same, at [64, 2048] two thirds.

    Args:
        cut: the matrix and its ranks.
        operations: those of the whole matrix when one rank orthogonalizes it.
        steps: number of iterations.
        weight: what an operation of the distributed form costs in operations of the other: the ratio of the bytes of
            their numbers.

    Returns:
        ``"gather"`` or ``"gram"``.
    """
    columns = cut.short * (cut.short + 1) // 2
    summed = all_reduce_bytes(columns, cut.tensor) / cut.data + cut.gathered_bytes(cut.data)
    fewer_bytes = summed < cut.gathered_bytes(cut.tensor * cut.data)
    cheaper = weight * distributed_operations(cut, steps) <= operations / cut.tensor
    return "gram" if fewer_bytes and cheaper else "gather"
