"""Clipping on plain parameters; sharded ones are in test_sharded.py."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zgcm_optim import clip_grad_norm_
from zgcm_testing import run_ranks


def parameters() -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(2))]
    params[0].grad = torch.full((3, 4), 2.0)
    params[1].grad = torch.full((5,), -1.0)
    return params


@pytest.mark.parametrize("limit", [0.5, 100.0, math.inf, 0.0])
def test_same_as_torch(limit: float) -> None:
    ours, theirs = parameters(), parameters()
    norm = clip_grad_norm_(ours, limit)
    expected = torch.nn.utils.clip_grad_norm_(theirs, limit)
    torch.testing.assert_close(norm, expected)
    for one, other in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert ours[2].grad is None


def test_o10_zero_limit_is_a_limit() -> None:
    params = parameters()
    clip_grad_norm_(params, 0.0)
    assert all(p.grad.abs().sum() == 0 for p in params[:2])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_norms_are_returned_or_raised(value: float) -> None:
    params = parameters()
    params[1].grad[0] = value
    kept = params[0].grad.clone()
    with pytest.raises(RuntimeError, match="gradient norm"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert torch.equal(params[0].grad, kept)
    assert not torch.isfinite(clip_grad_norm_(params, 1.0))


def test_invalid_limit_and_no_gradients() -> None:
    for limit in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm"):
            clip_grad_norm_(parameters(), limit)
    assert clip_grad_norm_([nn.Parameter(torch.zeros(2))], 1.0) == 0.0
    assert clip_grad_norm_(nn.Parameter(torch.zeros(2)), 1.0) == 0.0


def clip_one_stage(rank: int, world: int) -> tuple[float, list[torch.Tensor]]:
    params = parameters()[rank : rank + 1]
    norm = clip_grad_norm_(params, 0.5, stages=dist.group.WORLD)
    return float(norm), [p.grad for p in params]


def test_stages_are_clipped_by_their_joint_norm() -> None:
    whole = parameters()
    norm = float(clip_grad_norm_(whole, 0.5))
    for stage, (own, gradients) in enumerate(run_ranks(clip_one_stage, 2)):
        assert own == pytest.approx(norm)
        torch.testing.assert_close(gradients[0], whole[stage].grad)
