"""Orthogonalization of matrices by an odd quintic iteration, in two forms that give the same result.

A matrix is transposed so that its rows are the short side, divided by its Frobenius norm and then, for each
triple (a, b, c) of the coefficient table,

    A = X Xᵀ,   X <- a X + (b A + c A²) X                                         (standard)

Every iterate is Q X₀ with Q a polynomial in R = X₀ X₀ᵀ, so the steps can run on the small matrices alone:

    P = a I + b R + c R²,   Q <- P Q,   R <- P R P,   and at the end X = Q X₀      (Gram)

The Gram form restarts from X = Q X₀ every few steps, because R holds the squares of the singular values and
bfloat16 cannot carry them through all of them. Q and P are kept as a multiple of the identity plus a rest, so
that rounding the rest does not touch the multiple.

Source: K. Jordan et al. 2024 (standard form); published ZGCM-1 training setup (normalization, body in BF16).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zgcm_optim.coefficients import Coefficients, Triple, resolve
from zgcm_optim.costs import CPU_LOOP_SIDE, choose_method, segments
from zgcm_optim.gram import polynomial
from zgcm_optim.products import product, symmetric_product

METHODS = ("auto", "standard", "gram")
BODY_DTYPES = (torch.bfloat16, torch.float32, torch.float64)

# Elements of one batch: bounds the extra memory, and is far beyond where batching stops paying.
BATCH_ELEMENTS = 1 << 24

# Frobenius norms whose squares float32 sums without loss of elements that matter.
_SAFE_NORM = (1e-10, 1e15)


@dataclass(frozen=True)
class Iteration:
    """How matrices are orthogonalized.

    Args:
        triples: the coefficients of each step.
        dtype: the dtype of the iteration's body.
        method: ``"auto"``, ``"standard"`` or ``"gram"``.
    """

    triples: tuple[Triple, ...]
    dtype: torch.dtype = torch.bfloat16
    method: str = "auto"

    def __post_init__(self) -> None:
        """Refuse a dtype or a method that does not exist."""
        if self.dtype not in BODY_DTYPES:
            raise ValueError(f"dtype={self.dtype} cannot carry the iteration; choose one of {BODY_DTYPES}")
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is unknown; choose one of {METHODS}")


def orthogonalize(
    matrix: Tensor,
    *,
    steps: int = 5,
    coefficients: Coefficients = "quintic",
    dtype: torch.dtype = torch.bfloat16,
    method: str = "auto",
) -> Tensor:
    """Return the matrices with their singular values moved close to 1 and their singular vectors kept.

    The result does not depend on the size of the input: a gradient of 1e-9 times another gives the same
    update. A matrix of zeros gives zeros.

    Args:
        matrix: ``[..., m, n]``, floating point.
        steps: number of iterations.
        coefficients: name of a table in ``coefficients.TABLES``, or triples.
        dtype: dtype of the iteration: bfloat16, float32 or float64.
        method: ``"standard"``, ``"gram"``, or ``"auto"`` for the faster one on this shape and device.

    Returns:
        A new tensor of the shape and dtype of ``matrix``.

    Raises:
        ValueError: fewer than two dims, an unknown method or dtype, or a table that does not fit ``steps``.
    """
    if matrix.ndim < 2:
        raise ValueError(f"matrix has shape {tuple(matrix.shape)}; orthogonalize needs at least two dims")
    iteration = Iteration(resolve(coefficients, steps), dtype, method)
    out = torch.empty_like(matrix, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    targets = out.view(-1, *out.shape[-2:])
    sources = [partial(_same, flat) for flat in matrix.reshape(targets.shape)]
    for target, result in zip(targets, orthogonalize_each(sources, iteration), strict=True):
        target.copy_(result)
    return out


def _same(matrix: Tensor) -> Tensor:
    return matrix


def orthogonalize_each(sources: Sequence[Callable[[], Tensor]], iteration: Iteration) -> Iterator[Tensor]:
    """Orthogonalize matrices of one shape, up to transposition, in batches that bound the memory.

    Args:
        sources: functions that return the matrices, ``[rows, columns]`` or ``[groups, rows, columns]`` (one
            matrix of groups * rows rows), with at least one element; each is called once, in order, when its
            batch begins.
        iteration: what to do.

    Yields:
        For each source the result ``[rows, columns]`` in the dtype of the body, in order; it may be
        overwritten when a later one is asked for.
    """
    pending = list(sources)
    workspace: _Workspace | None = None
    while pending:
        first = pending[0]().flatten(0, -2)
        if workspace is None:
            workspace = _Workspace.of(first, len(pending), iteration)
        workspace.load(first)
        del first  # only one direction in full precision is alive at a time
        for source in pending[1 : workspace.capacity]:
            workspace.load(source().flatten(0, -2))
        del pending[: workspace.capacity]
        yield from workspace.run()


def normalize_into(target: Tensor, matrix: Tensor) -> None:
    """Write ``matrix`` divided by its Frobenius norm into ``target``, whatever the matrix's magnitude.

    Args:
        target: ``[n, m]`` in the dtype of the body.
        matrix: ``[n, m]``; zeros give zeros.
    """
    if matrix.device.type == "cpu" and matrix.dtype == torch.float32:
        # Reading the norm costs nothing on a CPU, and between these bounds its squares lose nothing.
        norm = float(torch.linalg.vector_norm(matrix))
        if _SAFE_NORM[0] < norm < _SAFE_NORM[1]:
            torch.mul(matrix, 1.0 / norm, out=target)
            return
    wide = matrix if matrix.dtype == torch.float64 else matrix.float()
    # Squares of elements below 1e-19 vanish in float32, hence the largest element is divided out first.
    tiny = torch.finfo(wide.dtype).tiny
    largest = torch.linalg.vector_norm(wide, ord=torch.inf).clamp_(min=tiny)
    scaled = wide / largest
    target.copy_(scaled.div_(torch.linalg.vector_norm(scaled).clamp_(min=tiny)))


class _Workspace:
    """Buffers for matrices of one shape, reused from batch to batch."""

    def __init__(self, short: int, long: int, capacity: int, like: Tensor, iteration: Iteration) -> None:
        self.capacity, self._triples = capacity, iteration.triples
        self._tall: list[bool] = []
        method = iteration.method
        self._gram = (choose_method(short, long, like.device.type) if method == "auto" else method) == "gram"
        self._wide = like.new_empty((2, capacity, short, long), dtype=iteration.dtype)
        squares = 4 if self._gram else 2
        self._square = like.new_empty((squares, capacity, short, short), dtype=iteration.dtype)

    @classmethod
    def of(cls, first: Tensor, count: int, iteration: Iteration) -> "_Workspace":
        """Size the buffers for ``count`` matrices like ``first``."""
        short, long = sorted(first.shape)
        alone = first.device.type == "cpu" and short >= CPU_LOOP_SIDE
        capacity = 1 if alone else min(count, max(1, BATCH_ELEMENTS // first.numel()))
        return cls(short, long, capacity, first, iteration)

    def load(self, matrix: Tensor) -> None:
        """Add a matrix ``[rows, columns]`` to the batch, normalized."""
        tall = matrix.shape[0] > matrix.shape[1]
        normalize_into(self._wide[0, len(self._tall)], matrix.mT if tall else matrix)
        self._tall.append(tall)

    def run(self) -> list[Tensor]:
        """Orthogonalize the batch and empty it; the results live until the next one is loaded."""
        tall, self._tall = self._tall, []
        wide, square = self._wide[:, : len(tall)], self._square[:, : len(tall)]
        if self.capacity == 1:
            wide, square = wide[:, 0], square[:, 0]
        iterate = _gram if self._gram else _standard
        result = iterate(list(wide), list(square), self._triples)
        each = [result] if self.capacity == 1 else list(result)
        return [one.mT if transposed else one for one, transposed in zip(each, tall, strict=True)]


def _standard(wide: list[Tensor], square: list[Tensor], triples: Sequence[Triple]) -> Tensor:
    x, y = wide
    gram, cubic = square
    for a, b, c in triples:
        symmetric_product(x, x.mT, gram)
        symmetric_product(gram, gram, cubic, addend=gram, beta=b, alpha=c)
        x, y = product(cubic, x, y, addend=x, beta=a), x
    return x


def _gram(wide: list[Tensor], square: list[Tensor], triples: Sequence[Triple]) -> Tensor:
    x, y = wide
    done = 0
    for run in segments(len(triples), x.shape[-2], x.dtype):
        symmetric_product(x, x.mT, square[0])
        multiple, rest = polynomial(square, triples[done : done + run])
        x, y = product(rest, x, y, addend=x, beta=multiple), x
        done += run
    return x
