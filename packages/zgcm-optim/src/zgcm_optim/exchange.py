"""The update of matrices that several ranks hold between them.

For each round of an ownership plan: every rank advances the momentum of its regions and sends them to the
owners, the owners orthogonalize, and every rank gets its region of each result back. The exchange of the next
round is under way while this one is computed, and so is the return of the last one. Regions travel in the dtype
of the momentum, results in the dtype of the orthogonalization.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zgcm_optim.blocks import block_shapes, block_views
from zgcm_optim.costs import choose_method, operations
from zgcm_optim.ownership import Job, OwnershipPlan
from zgcm_optim.spread import Spread
from zgcm_optim.update import Matrix, Rule, Task, run_tasks


@dataclass
class TrafficCount:
    """Bytes that this rank has sent to others."""

    sent: int = 0


_counters: list[TrafficCount] = []


@contextmanager
def count_traffic() -> Iterator[TrafficCount]:
    """Count the bytes that the exchange sends to other ranks inside the block.

    Yields:
        A count whose ``sent`` grows with every exchange.
    """
    counter = TrafficCount()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


@dataclass(frozen=True)
class Shared:
    """A matrix that several ranks hold between them.

    Args:
        part: what lies on this rank.
        spread: where the rest lies.
    """

    part: Matrix
    spread: Spread

    def job(self) -> Job:
        """Return what planning needs to know."""
        rule, shape = self.part.rule, self.spread.shape
        cost = whole_operations(shape, rule, self.part.weight.device.type)
        return Job(cost, shape[0] * shape[1], (shape, rule.blocks, rule.block_dim, rule.iteration))


def whole_operations(shape: tuple[int, int], rule: Rule, device_type: str) -> int:
    """Count the operations of a whole matrix on one rank.

    Args:
        shape: rows and columns.
        rule: of its group.
        device_type: ``"cpu"``, ``"cuda"``, ...

    Returns:
        Those of all its blocks.
    """
    cost, iteration = 0, rule.iteration
    for rows, columns in block_shapes(shape, rule.blocks, rule.block_dim):
        method = iteration.method
        if method == "auto":
            method = choose_method(min(rows, columns), max(rows, columns), device_type)
        cost += operations(rows, columns, len(iteration.triples), method, iteration.dtype)
    return cost


def count_sent(size: int) -> None:
    """Add bytes that this rank sends to every open count.

    Args:
        size: bytes.
    """
    for counter in _counters:
        counter.sent += size


@dataclass(frozen=True)
class _Transfer:
    """An all-to-all that is under way, or what a rank has all by itself."""

    work: dist.Work | None
    sent: Tensor
    received: Tensor
    sizes: list[int]

    def wait(self) -> list[Tensor]:
        """Return what each member sent, once it is here."""
        if self.work is not None:
            self.work.wait()
        return list(self.received.split(self.sizes))


class Exchange:
    """The rounds of one group of ranks."""

    def __init__(self, matrices: Sequence[Shared], plan: OwnershipPlan) -> None:
        """Take the matrices and the plan of who owns them."""
        self._matrices, self._rounds = matrices, plan.rounds
        spread = matrices[0].spread
        self._me, self._members, self._group = spread.me, range(len(spread.ranks)), spread.group

    def run(self) -> None:
        """Gather, orthogonalize and return, one round after the other, with the exchanges in the background."""
        returning: _Transfer | None = None
        number = 0
        for number, results in self._computed():
            sent = self._return(number, results)
            if returning is not None:
                self._apply(number - 1, returning.wait())
            returning = sent
        if returning is not None:
            self._apply(number, returning.wait())

    def _computed(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield the results of this rank's matrices, round by round."""
        for number, arrived in self._arrivals():
            yield number, self._orthogonalize(number, arrived)

    def _arrivals(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield what arrived for each round, with the next round's regions already on their way."""
        gathering = self._gather(0)
        for number in range(len(self._rounds)):
            arrived = gathering.wait()
            if number + 1 < len(self._rounds):
                gathering = self._gather(number + 1)
            yield number, arrived

    def _gather(self, number: int) -> _Transfer:
        turn = self._rounds[number]
        pieces: list[list[Tensor]] = []
        for owner in self._members:
            directions = [(self._matrices[i], self._matrices[i].part.direction()) for i in turn[owner]]
            pieces.append([u for matrix, u in directions if self._me in matrix.spread.sources(owner)])
        sizes = [
            sum(spread.regions[source].size for spread in self._sent_by(source, turn))
            for source in self._members
        ]
        return self._send(pieces, sizes, self._matrices[0].part.momentum.dtype)

    def _sent_by(self, source: int, turn: Sequence[Sequence[int]]) -> list[Spread]:
        """Return the spreads of my matrices of which ``source`` sends its region."""
        mine = [self._matrices[i].spread for i in turn[self._me]]
        return [spread for spread in mine if source in spread.sources(self._me)]

    def _assemble(self, number: int, arrived: Sequence[Tensor]) -> list[tuple[Shared, Tensor]]:
        """Put the regions of this rank's matrices together."""
        readers, complete = [_Reader(buffer) for buffer in arrived], []
        for index in self._rounds[number][self._me]:
            spread = self._matrices[index].spread
            whole = arrived[0].new_empty(spread.shape)
            for source in spread.sources(self._me):
                region = spread.regions[source]
                region.of(whole).copy_(readers[source].take(region.shape))
            complete.append((self._matrices[index], whole))
        return complete

    def _orthogonalize(self, number: int, arrived: Sequence[Tensor]) -> list[Tensor]:
        results, tasks = [], []
        for matrix, whole in self._assemble(number, arrived):
            rule = matrix.part.rule
            result = torch.empty_like(whole, dtype=rule.iteration.dtype)
            results.append(result)
            views = (block_views(tensor, rule.blocks, rule.block_dim) for tensor in (whole, result))
            tasks += [Task.between(view, target, rule.iteration) for view, target in zip(*views, strict=True)]
        run_tasks(tasks)
        return results

    def _return(self, number: int, results: Sequence[Tensor]) -> _Transfer:
        turn = self._rounds[number]
        spreads = [self._matrices[i].spread for i in turn[self._me]]
        pieces = [
            [spread.regions[member].of(result) for spread, result in zip(spreads, results, strict=True)]
            for member in self._members
        ]
        sizes = [
            sum(self._matrices[i].spread.regions[self._me].size for i in turn[owner])
            for owner in self._members
        ]
        return self._send(pieces, sizes, self._matrices[0].part.rule.iteration.dtype)

    def _apply(self, number: int, arrived: Sequence[Tensor]) -> None:
        for owner, buffer in enumerate(arrived):
            reader = _Reader(buffer)
            for index in self._rounds[number][owner]:
                matrix = self._matrices[index]
                region = matrix.spread.regions[self._me]
                rates = matrix.part.rule.rates(matrix.spread.matrix, region.top, region.bottom)
                matrix.part.apply_part(reader.take(region.shape), rates)

    def _send(self, pieces: Sequence[Sequence[Tensor]], sizes: list[int], dtype: torch.dtype) -> _Transfer:
        device = self._matrices[0].part.weight.device
        flat = [piece.reshape(-1) for target in pieces for piece in target]
        sent = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        counts = [sum(piece.numel() for piece in target) for target in pieces]
        if self._group is None:
            return _Transfer(None, sent, sent, sizes)
        count_sent((sum(counts) - counts[self._me]) * sent.element_size())
        received = torch.empty(sum(sizes), dtype=dtype, device=device)
        work = dist.all_to_all_single(received, sent, sizes, counts, group=self._group, async_op=True)
        return _Transfer(work, sent, received, sizes)


class _Reader:
    """Reads regions from a flat buffer, one after the other."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer, self._at = buffer, 0

    def take(self, shape: tuple[int, int]) -> Tensor:
        """Return the next region, a view."""
        size = shape[0] * shape[1]
        self._at += size
        return self._buffer[self._at - size : self._at].view(shape)
