"""Where the elements of a sharded matrix lie, computed from its shape, mesh and placements.

A DTensor is cut along the axes of its mesh. Each rank holds one region (rows by columns) of the matrix, perhaps
an empty one, and axes that replicate give several ranks the same region. ``Layouts`` describes a parameter as a
``Spread``: the matrix that has to be whole before it can be orthogonalized, the ranks that hold it between them,
and what each of them holds. With ``sharded="exact"`` that is the whole parameter and all ranks of its mesh; with
``"blockwise"`` it is the tensor-parallel shard and the ranks of the other axes.

Process groups come from the parameter's mesh: the group of an axis where one axis is enough, else a group of
exactly the ranks concerned, made once.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard


@dataclass(frozen=True)
class Region:
    """A rectangle of a matrix: rows ``top`` to ``bottom``, columns ``left`` to ``right``, ends excluded."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.bottom - self.top, self.right - self.left

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.shape[0] * self.shape[1]

    def of(self, matrix: Tensor) -> Tensor:
        """Return this region of a matrix, a view."""
        return matrix[self.top : self.bottom, self.left : self.right]


@dataclass(frozen=True, eq=False)
class Spread:
    """A matrix and the ranks that hold it between them.

    Args:
        shape: rows and columns of the matrix that is orthogonalized.
        ranks: global ranks of the members, in the order of the group.
        regions: what each member holds.
        replicas: for each member the number of the copy that its region belongs to.
        me: the place of this rank among the members.
        group: the members' process group.
    """

    shape: tuple[int, int]
    ranks: tuple[int, ...]
    regions: tuple[Region, ...]
    replicas: tuple[int, ...]
    me: int
    group: dist.ProcessGroup

    def sources(self, owner: int) -> list[int]:
        """Return the members that send their regions to ``owner``: those of its own copy."""
        return [member for member, replica in enumerate(self.replicas) if replica == self.replicas[owner]]


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds.

    Args:
        tensor: plain or sharded.

    Returns:
        The shard itself, not a copy; a plain tensor comes back as it is.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def align_gradient(parameter: Tensor) -> Tensor:
    """Give a sharded parameter's gradient the placements of the parameter, summing partial values.

    Args:
        parameter: plain or sharded, with a gradient.

    Returns:
        The parameter.
    """
    gradient = parameter.grad
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return parameter
    if gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)
    return parameter


def sharding_axes(tensor: DTensor) -> tuple[int, ...]:
    """Return the mesh axes over which a tensor's elements are spread.

    Args:
        tensor: without partial placements.

    Returns:
        Axis numbers, ascending.
    """
    return tuple(axis for axis, place in enumerate(tensor.placements) if not place.is_replicate())


def region_of(
    shape: Sequence[int], sizes: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> Region:
    """Return the region that one rank holds.

    Args:
        shape: rows and columns of the whole matrix.
        sizes: ranks along each mesh axis.
        placements: one for each mesh axis.
        coordinate: the rank's place along each mesh axis.

    Returns:
        The region.

    Raises:
        ValueError: a placement that is no shard of rows or columns, or a strided one in an unknown order.

    Source: torch.distributed.tensor (shards are cut as torch.chunk does; FSDP2 over TP cuts right to left).
    """
    return _cut(shape, sizes, placements, coordinate, cutting_order(sizes, placements))


def _cut(
    shape: Sequence[int],
    sizes: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
    axes: Sequence[int],
) -> Region:
    """Return the region that is left when ``axes`` cut, one after the other."""
    spans = [(0, shape[0]), (0, shape[1])]
    for axis in axes:
        start, stop = spans[_dim(placements[axis])]
        step = math.ceil((stop - start) / sizes[axis])
        first = min(start + coordinate[axis] * step, stop)
        spans[_dim(placements[axis])] = (first, min(first + step, stop))
    return Region(*spans[0], *spans[1])


def cutting_order(sizes: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """Return the sharding mesh axes in the order in which they cut the matrix.

    Args:
        sizes: ranks along each mesh axis.
        placements: one for each mesh axis.

    Returns:
        Axis numbers: plain shards from left to right, then strided ones from right to left.

    Raises:
        ValueError: a partial placement, or a strided shard whose factor is not the number of shards before it.
    """
    plain = [axis for axis, place in enumerate(placements) if place.is_shard()]
    strided = [axis for axis, place in enumerate(placements) if isinstance(place, _StridedShard)]
    if any(place.is_partial() for place in placements):
        raise ValueError(
            f"placements={tuple(placements)}: a parameter cannot be partial; redistribute it first"
        )
    for axis in strided:
        later = [a for a in plain if a > axis and _dim(placements[a]) == _dim(placements[axis])]
        expected = math.prod(sizes[a] for a in later)
        if getattr(placements[axis], "split_factor", None) != expected:
            raise ValueError(
                f"placements={tuple(placements)}: the strided shard should have a factor of {expected}"
            )
    return plain + strided[::-1]


def _dim(placement: Placement) -> int:
    dim = int(getattr(placement, "dim", -1))
    if dim not in (0, 1):
        raise ValueError(f"placement={placement}: a matrix has the dims 0 and 1 only")
    return dim


class Layouts:
    """Spreads of parameters and the groups they use, made once."""

    def __init__(self) -> None:
        """Start without any."""
        self._spreads: dict[tuple[Any, ...], Spread | None] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, parameter: Tensor, settings: Mapping[str, Any]) -> Spread | None:
        """Return how a parameter's matrix is spread.

        Collective the first time: every rank of the mesh must ask for the same parameters in the same order.

        Args:
            parameter: a matrix.
            settings: its group; ``sharded`` and ``tensor_axes`` are read.

        Returns:
            The spread, or None where this rank holds a whole matrix and nobody else is concerned.

        Raises:
            ValueError: placements that are not supported, or axes without names where names are needed.
        """
        if not isinstance(parameter, DTensor):
            return None
        axes = tuple(settings["tensor_axes"]) if settings["sharded"] == "blockwise" else ()
        key = (parameter.device_mesh, parameter.placements, tuple(parameter.shape), axes)
        if key not in self._spreads:
            apart = _named_axes(parameter.device_mesh, axes)
            self._spreads[key] = self._spread(parameter, apart)
        return self._spreads[key]

    def _spread(self, parameter: DTensor, apart: tuple[int, ...]) -> Spread | None:
        mesh, placements = parameter.device_mesh, parameter.placements
        sizes, coordinate = tuple(mesh.shape), mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(
                "this rank is not part of the parameter's mesh; give its optimizer other parameters"
            )
        together = [axis for axis in range(len(sizes)) if axis not in apart and sizes[axis] > 1]
        _check_order(sizes, placements, apart)
        if not together:
            return None
        group = self._group(mesh, together, coordinate)
        ranks = tuple(dist.get_process_group_ranks(group))
        first = [axis for axis in cutting_order(sizes, placements) if axis in apart]
        whole = _cut(parameter.shape, sizes, placements, coordinate, first)
        places = dict(_members(mesh, together, coordinate))
        regions = [region_of(parameter.shape, sizes, placements, places[rank]) for rank in ranks]
        copies = [axis for axis in together if placements[axis].is_replicate()]
        numbers: dict[tuple[int, ...], int] = {}
        keys = [tuple(places[rank][axis] for axis in copies) for rank in ranks]
        return Spread(
            shape=whole.shape,
            ranks=ranks,
            regions=tuple(_within(region, whole) for region in regions),
            replicas=tuple(numbers.setdefault(key, len(numbers)) for key in keys),
            me=ranks.index(dist.get_rank()),
            group=group,
        )

    def _group(self, mesh: DeviceMesh, axes: Sequence[int], coordinate: Sequence[int]) -> dist.ProcessGroup:
        if len(axes) == 1:
            return mesh.get_group(axes[0])
        ranks = tuple(sorted(rank for rank, _ in _members(mesh, axes, coordinate)))
        if ranks not in self._groups:
            group = dist.new_group(list(ranks), use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            self._groups[ranks] = group
        return self._groups[ranks]


def _named_axes(mesh: DeviceMesh, names: Sequence[str]) -> tuple[int, ...]:
    if names and mesh.mesh_dim_names is None:
        raise ValueError(
            f'sharded="blockwise" looks for the mesh axes {tuple(names)}, but this mesh has no names; give '
            "mesh_dim_names to init_device_mesh, or tensor_axes=() if no axis is tensor-parallel"
        )
    return tuple(axis for axis, name in enumerate(mesh.mesh_dim_names or ()) if name in names)


def _check_order(sizes: Sequence[int], placements: Sequence[Placement], apart: Sequence[int]) -> None:
    """A block is whole only if the axes that stay apart cut their dim before all others."""
    order = cutting_order(sizes, placements)
    for early, late in itertools.combinations(order, 2):
        if late in apart and early not in apart and _dim(placements[early]) == _dim(placements[late]):
            raise ValueError(
                f"placements={tuple(placements)}: the tensor-parallel axis cuts shards of another axis, so no rank's "
                'block is a shard of the matrix; apply tensor parallelism before FSDP, or set sharded="exact"'
            )


def _members(
    mesh: DeviceMesh, axes: Sequence[int], coordinate: Sequence[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """Return (global rank, coordinate) of all ranks that differ from ``coordinate`` along ``axes`` only."""
    choices = [range(mesh.shape[axis]) if axis in axes else (coordinate[axis],) for axis in range(mesh.ndim)]
    return [(int(mesh.mesh[place]), place) for place in itertools.product(*choices)]


def _within(region: Region, whole: Region) -> Region:
    return Region(
        region.top - whole.top, region.bottom - whole.top, region.left - whole.left, region.right - whole.left
    )
