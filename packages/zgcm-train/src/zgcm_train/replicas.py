"""Compare copies of the same weights on different ranks: they must agree to the last bit."""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # elements whose 64-bit copies exist at the same time


def differing_replicas(model: nn.Module) -> list[str]:
    """Return the parameters whose copies differ between ranks; every rank of the model's meshes must call this.

    Copies are the replicas of HSDP and what tensor parallelism keeps whole, such as norms. Every parameter is read once
    and two numbers per parameter and axis are exchanged.

    Args:
        model: its parameters may be sharded; those without a mesh have no copies.

    Returns:
        ``name over axis``, sorted; the same on all ranks that share a copy.
    """
    copies: dict[tuple[DeviceMesh, int], list[tuple[str, Tensor]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            for axis in _replicated_axes(parameter):
                copies[parameter.device_mesh, axis].append((name, checksum(parameter.to_local())))
    found: list[str] = []
    for (mesh, axis), entries in copies.items():
        label = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else str(axis)
        differs = _differ(torch.stack([value for _, value in entries]), mesh.get_group(axis))
        found += [f"{name} over {label}" for (name, _), bad in zip(entries, differs, strict=True) if bad]
    return sorted(found)


@torch.no_grad()
def checksum(values: Tensor) -> Tensor:
    """Return an int64 scalar that changes with any bit of a tensor and with the order of its elements.

    Args:
        values: of any dtype and shape.
    """
    bits = values.detach().contiguous().flatten().view(_BITS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        # Odd factors are invertible modulo 2**64, so no single change is lost.
        total += (part * (2 * torch.arange(start, start + part.numel(), device=bits.device) + 1)).sum()
    return total


def _replicated_axes(parameter: DTensor) -> list[int]:
    mesh = parameter.device_mesh
    return [
        axis
        for axis, placement in enumerate(parameter.placements)
        if placement.is_replicate() and mesh.size(axis) > 1
    ]


def _differ(sums: Tensor, group: dist.ProcessGroup) -> list[bool]:
    lowest, highest = sums.clone(), sums.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    differs: list[bool] = (lowest != highest).tolist()
    return differs
