"""Plans are balanced, complete and the same on every rank."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from zgcm_optim import Muon
from zgcm_optim.layout import cutting_order, region_of
from zgcm_optim.ownership import Job, OwnershipPlan, assign

jobs_strategy = st.lists(
    st.builds(Job, st.integers(0, 10**6), st.integers(1, 10**4), st.integers(0, 3)), min_size=1, max_size=40
)


@settings(max_examples=60, deadline=None)
@given(jobs_strategy, st.integers(1, 8))
def test_no_member_does_more_than_its_share_plus_one_matrix(jobs: list[Job], members: int) -> None:
    plan = OwnershipPlan.of(tuple(jobs), members)
    loads = plan.loads(jobs)
    total = sum(job.operations for job in jobs)
    assert sum(loads) == total
    assert max(loads) <= total / members + max(job.operations for job in jobs)
    assert list(plan.owners) == assign([job.operations for job in jobs], members)


@settings(max_examples=60, deadline=None)
@given(jobs_strategy, st.integers(1, 8))
def test_every_job_is_in_one_round_of_its_owner(jobs: list[Job], members: int) -> None:
    plan = OwnershipPlan.of(tuple(jobs), members)
    placed = [(i, member) for turn in plan.rounds for member in range(members) for i in turn[member]]
    assert sorted(placed) == [(i, plan.owners[i]) for i in range(len(jobs))]
    limit = max(sum(j.elements for j in jobs) // (4 * members), *(j.elements for j in jobs), 0)
    assert all(sum(jobs[i].elements for i in mine) <= limit for turn in plan.rounds for mine in turn)


def test_enough_matrices_are_cut_into_rounds_that_can_overlap() -> None:
    plan = OwnershipPlan.of(tuple(Job(10, 100, 0) for _ in range(32)), 2)
    assert len(plan.rounds) == 4
    assert all(len(mine) == 4 for turn in plan.rounds for mine in turn)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 13),
    st.integers(0, 13),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["rows", "columns", "both", "strided", "hybrid"]),
)
def test_regions_tile_the_matrix(rows: int, columns: int, first: int, second: int, kind: str) -> None:
    placements = {
        "rows": [Shard(0), Shard(0)],
        "columns": [Shard(1), Replicate()],
        "both": [Shard(0), Shard(1)],
        "strided": [_StridedShard(0, split_factor=second), Shard(0)],
        "hybrid": [Replicate(), Shard(0)],
    }[kind]
    covered = torch.zeros(rows, columns, dtype=torch.int64)
    for place in ((a, b) for a in range(first) for b in range(second)):
        region_of((rows, columns), (first, second), placements, place).of(covered).add_(1)
    copies = {"columns": second, "hybrid": first}.get(kind, 1)
    assert (covered == copies).all()


def test_order_of_cuts() -> None:
    assert cutting_order((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]) == [1, 0]
    assert cutting_order((2, 2), [Shard(0), Shard(0)]) == [0, 1]
    with pytest.raises(ValueError, match="factor"):
        cutting_order((2, 2), [_StridedShard(0, split_factor=4), Shard(0)])
    with pytest.raises(ValueError, match="partial"):
        cutting_order((2,), [Partial()])
    with pytest.raises(ValueError, match="dims"):
        region_of((4, 4), (2,), [Shard(2)], (0,))


class LiveBytes(TorchDispatchMode):
    """Follow the bytes of results that are alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._follow(result, [*args, *(kwargs or {}).values()])
        self.peak = max(self.peak, self.now)
        return result

    def _follow(self, result: torch.Tensor, inputs: list) -> None:
        storage = result.untyped_storage()
        known = storage.data_ptr()
        given = {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, torch.Tensor)}
        if known and known not in given and known not in self._seen:
            self._seen[known] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._drop, known)

    def _drop(self, known: int) -> None:
        self.now -= self._seen.pop(known, 0)


@pytest.mark.parametrize("shape", [(520, 1100), (64, 200)])
def test_extra_memory_stays_below_two_batches_of_equal_shape(shape: tuple[int, int]) -> None:
    params = [nn.Parameter(torch.randn(shape)) for _ in range(3)]
    for parameter in params:
        parameter.grad = torch.randn(shape)
    optimizer = Muon(params, 0.1)
    with LiveBytes() as live:
        optimizer.step()
    assert live.peak > 0
    assert live.peak <= 2 * sum(parameter.numel() * 4 for parameter in params)
