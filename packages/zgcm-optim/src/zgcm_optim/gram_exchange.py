"""The update of matrices that the ranks of a tensor-parallel axis iterate on together.

Each piece goes to its owner among the data-parallel ranks, as in ``exchange``; owners of the pieces of one matrix
are the same member of their groups, because all groups plan alike. In each round the owners sum the Gram matrices
of their pieces in one all-reduce, and iterate on them while that of the next round is under way. All ranks run
the same sequence of collectives; the ranks of a tensor-parallel group that own nothing in a round leave its
all-reduce out together, so none waits for another.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zgcm_optim.costs import TensorCut, all_reduce_bytes, distributed_operations
from zgcm_optim.exchange import Exchange, Shared, count_sent
from zgcm_optim.gram import apply_polynomial, carrier, magnitude, packed_gram, polynomials, unpacked
from zgcm_optim.ownership import Job
from zgcm_optim.spread import Spread, TensorGroup


@dataclass(frozen=True)
class Joint(Shared):
    """A matrix of which this rank's group holds a piece."""

    def job(self) -> Job:
        """Return what planning needs to know: the same for every piece, whatever its size."""
        cut, rule = tensor_cut(self.spread, 0), self.part.rule
        cost = distributed_operations(cut, len(rule.iteration.triples))
        return Job(cost, cut.short * cut.piece, (self.spread.matrix, rule.iteration))


def tensor_cut(spread: Spread, element_bytes: int) -> TensorCut:
    """Return how the ranks of a spread cut a matrix.

    Args:
        spread: one with a tensor group.
        element_bytes: bytes of one element on its way to an owner and back.

    Returns:
        The cut.
    """
    short, long = sorted(spread.matrix)
    return TensorCut(short, long, _tensor(spread).size, len(spread.ranks), element_bytes)


def _tensor(spread: Spread) -> TensorGroup:
    assert spread.tensor is not None
    return spread.tensor


@dataclass(frozen=True)
class _Piece:
    """This rank's piece of one matrix, on its way.

    Args:
        matrix: which.
        upright: the piece ``[n, m]``, short side of the matrix first.
        largest: its magnitude.
        result: where its orthogonalized form goes, ``[n, m]``.
    """

    matrix: Shared
    upright: Tensor
    largest: Tensor
    result: Tensor

    @property
    def side(self) -> int:
        """Short side of the matrix."""
        return self.upright.shape[0]

    @property
    def carrier(self) -> torch.dtype:
        """Dtype of the iteration."""
        iteration = self.matrix.part.rule.iteration
        return carrier(iteration.triples, iteration.dtype)


@dataclass(frozen=True)
class _Reduction:
    """An all-reduce of Gram matrices that is under way."""

    number: int
    pieces: list[_Piece]
    results: list[Tensor]
    packed: Tensor | None = None
    work: dist.Work | None = None


class GramExchange(Exchange):
    """The rounds of one group of ranks whose matrices go on in other groups."""

    def _computed(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield the results of a round when the sum of the next one is under way."""
        pending: _Reduction | None = None
        for number, arrived in self._arrivals():
            begun = self._reduce(number, arrived)
            if pending is not None:
                yield pending.number, self._iterate(pending)
            pending = begun
        if pending is not None:
            yield pending.number, self._iterate(pending)

    def _reduce(self, number: int, arrived: Sequence[Tensor]) -> _Reduction:
        """Start to sum the Gram matrices of this rank's pieces over its tensor-parallel group."""
        pieces, results, triangles = [], [], []
        for matrix, piece in self._assemble(number, arrived):
            result = torch.empty_like(piece, dtype=matrix.part.rule.iteration.dtype)
            tall = _tensor(matrix.spread).dim == 0
            upright, target = (piece.mT, result.mT) if tall else (piece, result)
            pieces.append(_Piece(matrix, upright, magnitude(upright), target))
            results.append(result)
            triangles.append(packed_gram(upright, pieces[-1].largest, pieces[-1].carrier))
        if not pieces:
            return _Reduction(number, pieces, results)
        tensor, packed = _tensor(pieces[0].matrix.spread), torch.cat(triangles)
        count_sent(all_reduce_bytes(len(packed), tensor.size))
        work = dist.all_reduce(packed, group=tensor.group, async_op=True)
        return _Reduction(number, pieces, results, packed, work)

    def _iterate(self, reduction: _Reduction) -> list[Tensor]:
        """Iterate on the summed Gram matrices, those of one side together, and multiply the pieces."""
        if reduction.packed is None:
            return reduction.results
        if reduction.work is not None:
            reduction.work.wait()
        sizes = [piece.side * (piece.side + 1) // 2 for piece in reduction.pieces]
        batches: dict[tuple[object, ...], list[tuple[_Piece, Tensor]]] = defaultdict(list)
        for piece, triangle in zip(reduction.pieces, reduction.packed.split(sizes), strict=True):
            batches[piece.side, piece.matrix.part.rule.iteration].append((piece, triangle))
        for batch in batches.values():
            _iterate_batch(batch)
        return reduction.results


def _iterate_batch(batch: Sequence[tuple[_Piece, Tensor]]) -> None:
    first = batch[0][0]
    grams = unpacked(torch.stack([triangle for _, triangle in batch]), first.side)
    triples = first.matrix.part.rule.iteration.triples
    norms, multiple, rests = polynomials(grams, triples, first.carrier)
    for (piece, _), norm, rest in zip(batch, norms, rests, strict=True):
        factor = torch.stack((piece.largest, norm))
        apply_polynomial(piece.upright, factor, multiple, rest, piece.result)
