"""Collectives that autograd can go through; each says what its backward does.

Names: a tensor is *split* when each rank holds its own slice of a dim, *partial* when the ranks' tensors must
be summed, *whole* when all ranks hold the same.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

F = TypeVar("F", bound=Callable[..., Any])


def _not_compiled(function: F) -> F:
    """Leave a function out of ``torch.compile``, which cannot compile sends to one rank: one clean break."""
    return cast(F, torch.compiler.disable(function))


def gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Join the ranks' slices without autograd.

    Args:
        x: this rank's slice; the same shape on every rank.
        dim: the dim that is split.
        group: the ranks.

    Returns:
        The whole tensor.
    """
    source = x.movedim(dim, 0).contiguous()
    out = source.new_empty(group.size() * source.shape[0], *source.shape[1:])
    dist.all_gather_single(out, source, group=group)
    return out.movedim(0, dim)


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sum partial tensors and keep this rank's slice, without autograd.

    Args:
        x: the whole shape, partial.
        dim: the dim to split; a multiple of the number of ranks.
        group: the ranks.

    Returns:
        This rank's slice of the sum.
    """
    source = x.movedim(dim, 0).contiguous()
    out = source.new_empty(source.shape[0] // group.size(), *source.shape[1:])
    dist.reduce_scatter_single(out, source, group=group)
    return out.movedim(0, dim)


def own_slice(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's slice of a whole tensor."""
    return x.chunk(group.size(), dim)[group.rank()]


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum partial tensors into a new one, without autograd."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_to_all(x: Tensor, split_dim: int, join_dim: int, group: ProcessGroup) -> Tensor:
    """Split one dim over the ranks and join another, without autograd.

    Args:
        x: whole along ``split_dim``, split along ``join_dim``.
        split_dim: a multiple of the number of ranks.
        join_dim: joined in rank order.
        group: the ranks.

    Returns:
        Split along ``split_dim``, whole along ``join_dim``.
    """
    # Stacking keeps a channels-last order of strides, which gradients may have by chance.
    source = torch.stack(x.chunk(group.size(), split_dim)).contiguous()
    out = torch.empty_like(source)
    dist.all_to_all_single(out, source, group=group)
    return torch.cat(out.unbind(0), dim=join_dim)


class _SplitToPartialInput(torch.autograd.Function):
    """split -> whole, for inputs whose use is partial: backward sums and splits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return reduce_scatter(grads[0], ctx.dim, ctx.group), None, None


class _PartialToSplit(torch.autograd.Function):
    """partial -> split; backward joins."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return gather(grads[0], ctx.dim, ctx.group), None, None


class _SplitToWhole(torch.autograd.Function):
    """split -> whole, for results that every rank uses alike: backward keeps the own slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return own_slice(grads[0], ctx.dim, ctx.group), None, None


class _WholeToPartialInput(torch.autograd.Function):
    """Identity; backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.group), None


class _PartialToWhole(torch.autograd.Function):
    """Sum; backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None


class _AllToAll(torch.autograd.Function):
    """Exchange one split dim for another; backward exchanges back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split_dim: int, join_dim: int, group: ProcessGroup) -> Tensor:
        ctx.dims, ctx.group = (split_dim, join_dim), group
        return all_to_all(x, split_dim, join_dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        split_dim, join_dim = ctx.dims
        return all_to_all(grads[0], join_dim, split_dim, ctx.group), None, None, None


class _Halo(torch.autograd.Function):
    """Give the own tail to the next rank and take the previous one's; backward gives the gradients back."""

    @staticmethod
    def forward(ctx: Any, tail: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group, ctx.shape = dim, group, tail.shape
        received = shift(tail, group, 1)
        return received if group.rank() else received.narrow(dim, 0, 0).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        grad = grads[0] if ctx.group.rank() else grads[0].new_zeros(ctx.shape)
        return shift(grad, ctx.group, -1), None, None


@_not_compiled
def shift(x: Tensor, group: ProcessGroup, step: int) -> Tensor:
    """Send to the neighbour ``step`` ranks on and receive from the one before, without autograd.

    Args:
        x: the same shape on every rank.
        group: the ranks; the first and the last have one neighbour only.
        step: 1 or -1.

    Returns:
        What the neighbour sent; zeros where there is none.
    """
    rank, operations = group.rank(), []
    out, source = torch.zeros_like(x, memory_format=torch.contiguous_format), x.contiguous()
    if 0 <= rank + step < group.size():
        operations.append(dist.P2POp(dist.isend, source, group=group, group_peer=rank + step))
    if 0 <= rank - step < group.size():
        operations.append(dist.P2POp(dist.irecv, out, group=group, group_peer=rank - step))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return out


def split_to_partial_input(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Join the ranks' slices before a computation each rank does a part of; backward sums and splits."""
    out: Tensor = _SplitToPartialInput.apply(x, dim, group)
    return out


def partial_to_split(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sum the ranks' parts and keep the own slice; backward joins."""
    out: Tensor = _PartialToSplit.apply(x, dim, group)
    return out


def split_to_whole(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Join the ranks' slices into what all ranks use alike; backward keeps the own slice."""
    out: Tensor = _SplitToWhole.apply(x, dim, group)
    return out


def whole_to_partial_input(x: Tensor, group: ProcessGroup) -> Tensor:
    """Use a whole tensor in a computation each rank does a part of; backward sums."""
    out: Tensor = _WholeToPartialInput.apply(x, group)
    return out


def partial_to_whole(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum the ranks' parts; backward passes the gradient on."""
    out: Tensor = _PartialToWhole.apply(x, group)
    return out


def exchange(x: Tensor, split_dim: int, join_dim: int, group: ProcessGroup) -> Tensor:
    """Split one dim over the ranks and join another; backward exchanges back."""
    out: Tensor = _AllToAll.apply(x, split_dim, join_dim, group)
    return out


@_not_compiled
def halo(tail: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Receive the previous rank's tail; empty along ``dim`` on the first rank; backward returns gradients."""
    out: Tensor = _Halo.apply(tail, dim, group)
    return out
