"""Gradient clipping by the global norm, over plain and sharded parameters of any meshes together."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zgcm_optim.layout import align_gradient, local, sharding_axes

_Axes = tuple[DeviceMesh | None, tuple[int, ...]]


def clip_grad_norm_(
    params: Iterable[Tensor] | Tensor,
    max_norm: float,
    *,
    error_if_nonfinite: bool = False,
    stages: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale all gradients down so that their joint 2-norm is at most ``max_norm``.

    Every element counts once, however it is sharded or replicated; every rank that holds a part must call this
    with the same parameters in the same order. A parameter without a mesh is taken as it is on this rank.

    Args:
        params: parameters; those without a gradient are passed over.
        max_norm: largest norm that is left alone; ``inf`` only measures, 0.0 zeroes the gradients.
        error_if_nonfinite: raise instead of scaling when the norm is not finite.
        stages: ranks that hold other parameters of the same model, such as pipeline stages; the norm is over all.

    Returns:
        The norm before clipping, a float32 scalar (float64 if a gradient is), the same on every rank.

    Raises:
        ValueError: ``max_norm`` is negative or not a number.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    if not max_norm >= 0.0:
        raise ValueError(f"max_norm={max_norm!r} must be at least 0; use inf to measure only")
    chosen = [params] if isinstance(params, Tensor) else list(params)
    ready = [align_gradient(parameter) for parameter in chosen if parameter.grad is not None]
    gradients = [parameter.grad for parameter in ready if parameter.grad is not None]
    norm = _global_norm(gradients)
    if stages is not None:
        norm = _joint_norm(norm, [stages])
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(f"the gradient norm is {norm.item()}; look for the first non-finite loss")
    if max_norm != math.inf:
        _scale(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _global_norm(gradients: list[Tensor]) -> Tensor:
    """Return sqrt of the sum, over groups of equally sharded gradients, of their reduced squares."""
    groups: dict[_Axes, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        groups[_sharded_axes(gradient)].append(local(gradient))
    wide = torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32
    if not groups:
        return torch.zeros((), dtype=wide)
    totals = [_group_norm(members, axes, wide) for axes, members in groups.items()]
    return _norm([total.to(totals[0].device) for total in totals])


def _norm(norms: list[Tensor]) -> Tensor:
    joint: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return joint


def _sharded_axes(gradient: Tensor) -> _Axes:
    """Return the mesh and those of its axes over which the elements are spread."""
    if not isinstance(gradient, DTensor):
        return None, ()
    return gradient.device_mesh, sharding_axes(gradient)


def _group_norm(members: list[Tensor], axes: _Axes, wide: torch.dtype) -> Tensor:
    norm = _norm([torch.linalg.vector_norm(member, dtype=wide) for member in members])
    mesh, spread = axes
    if mesh is None or not spread:
        return norm
    return _joint_norm(norm, [mesh.get_group(axis) for axis in spread])


def _joint_norm(norm: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    square = norm.double().square()
    for group in groups:
        dist.all_reduce(square, group=group)
    return square.sqrt().to(norm.dtype)


def _scale(gradients: list[Tensor], factor: Tensor) -> None:
    for gradient in gradients:
        shard = local(gradient)
        shard.mul_(factor.to(shard.device, shard.dtype))
