"""Who orthogonalizes which matrix.

Of the ranks that hold a matrix between them, exactly one owns it. The others send it their regions and get
their part of the result back, so that together the ranks do the work of one. Owners are chosen by operations,
largest matrix first, each to the rank with the least work so far: no rank then does more than an equal share
plus one matrix. The work of each owner is cut into rounds, so that the exchange of one round can run while
another is computed.

Source: Graham, Bounds on multiprocessing timing anomalies, 1969 (largest first).
"""

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

# Elements that an owner takes in one round at most, beyond its first matrix; bounds the buffers.
ROUND_ELEMENTS = 1 << 24

# Rounds that an owner's work is cut into where it has enough matrices.
ROUNDS = 4


@dataclass(frozen=True)
class Job:
    """One matrix, as planning sees it.

    Args:
        operations: floating-point operations of its orthogonalization.
        elements: its size.
        batch: matrices with equal keys can be orthogonalized in one batch.
    """

    operations: int
    elements: int
    batch: Hashable


@dataclass(frozen=True)
class OwnershipPlan:
    """Owners and rounds of a list of jobs.

    Args:
        owners: for each job the member that orthogonalizes it.
        rounds: for each round and member, the jobs that it orthogonalizes then.
    """

    owners: tuple[int, ...]
    rounds: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, jobs: tuple[Job, ...], members: int, before: tuple[int, ...] = ()) -> "OwnershipPlan":
        """Plan jobs for a number of members; the same arguments give the same plan on every rank.

        Args:
            jobs: the matrices.
            members: number of ranks that share them.
            before: operations that each member has to do anyway; empty for none.

        Returns:
            The plan.
        """
        owners = assign([job.operations for job in jobs], members, before)
        limit = _round_elements(jobs, members)
        queues = [
            _cut(jobs, [i for i, owner in enumerate(owners) if owner == m], limit) for m in range(members)
        ]
        longest = max((len(queue) for queue in queues), default=0)
        rounds = tuple(tuple(queue[r] if r < len(queue) else () for queue in queues) for r in range(longest))
        return cls(tuple(owners), rounds)

    def loads(self, jobs: Sequence[Job]) -> list[int]:
        """Return the operations of each member.

        Args:
            jobs: those that were planned.

        Returns:
            One number for each member that owns something, 0 for the others.
        """
        members = len(self.rounds[0]) if self.rounds else 0
        return [sum(jobs[i].operations for turn in self.rounds for i in turn[m]) for m in range(members)]


def assign(costs: Sequence[int], members: int, before: Sequence[int] = ()) -> list[int]:
    """Give each cost to a member so that no sum exceeds an equal share plus one cost.

    Args:
        costs: any non-negative numbers.
        members: at least 1.
        before: what each member has already; it counts in the sums and in the share. Empty for nothing.

    Returns:
        For each cost the member that got it. A member that has more than that already gets none.
    """
    heap = [(before[member] if before else 0, member) for member in range(members)]
    heapq.heapify(heap)
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, member = heapq.heappop(heap)
        owners[index] = member
        heapq.heappush(heap, (load + costs[index], member))
    return owners


def _round_elements(jobs: Sequence[Job], members: int) -> int:
    share = sum(job.elements for job in jobs) // (members * ROUNDS)
    return min(ROUND_ELEMENTS, max([share, *(job.elements for job in jobs)]))


def _cut(jobs: Sequence[Job], mine: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    """Cut a member's jobs, those of one batch side by side, into rounds of at most ``limit`` elements."""
    first: dict[Hashable, int] = {}
    for index in mine:
        first.setdefault(jobs[index].batch, index)
    rounds: list[list[int]] = []
    room = 0
    for index in sorted(mine, key=lambda i: (first[jobs[i].batch], i)):
        if not rounds or jobs[index].elements > room:
            rounds.append([])
            room = limit
        rounds[-1].append(index)
        room -= jobs[index].elements
    return [tuple(turn) for turn in rounds]
