"""Which ranks hold a matrix between them, and what each of them holds.

``Layouts`` describes a sharded parameter as a ``Spread``: what has to be whole on one rank before it can be
orthogonalized, and the ranks that hold it between them. That is the whole parameter and all ranks of its mesh, or,
where some mesh axes stay apart, the shard that those axes leave and the ranks of the other axes. The shards of one
axis that stays apart may belong together all the same, when their ranks iterate on one matrix between them: that
is a ``TensorGroup``.

Process groups come from the parameter's mesh: the group of an axis where one axis is enough, else a group of
exactly the ranks concerned, made once.
"""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from zgcm_optim.layout import Region, cut_region, cutting_order, dim_of, region_of


@dataclass(frozen=True, eq=False)
class TensorGroup:
    """The ranks that hold the pieces of one matrix and iterate on it together.

    Args:
        shape: rows and columns of the whole matrix.
        dim: the dim that they cut.
        columns: global ranks that hold the pieces of each member of the spread.
        group: the process group of this rank's pieces.
    """

    shape: tuple[int, int]
    dim: int
    columns: tuple[tuple[int, ...], ...]
    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Number of pieces."""
        return len(self.columns[0])


@dataclass(frozen=True, eq=False)
class Spread:
    """A matrix and the ranks that hold it between them.

    Args:
        shape: rows and columns of what one rank has to hold whole.
        ranks: global ranks of the members, in the order of the group.
        regions: what each member holds.
        replicas: for each member the number of the copy that its region belongs to.
        me: the place of this rank among the members.
        group: the members' process group; None where this rank is the only one.
        tensor: set where ``shape`` is only a piece of the matrix that is orthogonalized.
    """

    shape: tuple[int, int]
    ranks: tuple[int, ...]
    regions: tuple[Region, ...]
    replicas: tuple[int, ...]
    me: int
    group: dist.ProcessGroup | None
    tensor: TensorGroup | None = None

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the matrix that is orthogonalized."""
        return self.shape if self.tensor is None else self.tensor.shape

    def sources(self, owner: int) -> list[int]:
        """Return the members that send their regions to ``owner``: those of its own copy."""
        return [member for member, replica in enumerate(self.replicas) if replica == self.replicas[owner]]


class Layouts:
    """Spreads of parameters and the groups they use, made once."""

    def __init__(self) -> None:
        """Start without any."""
        self._spreads: dict[Hashable, Spread | None] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, parameter: DTensor, apart: tuple[int, ...], joint: bool = False) -> Spread | None:
        """Return how a parameter's matrix is spread.

        Collective the first time: every rank of the mesh must ask for the same parameters in the same order.

        Args:
            parameter: a matrix.
            apart: mesh axes whose shards are not put together.
            joint: the shards of the only axis apart are pieces of one matrix, iterated on together.

        Returns:
            The spread, or None where this rank holds a whole matrix and nobody else is concerned.

        Raises:
            ValueError: placements that are not supported.
        """
        key = (parameter.device_mesh, parameter.placements, tuple(parameter.shape), apart, joint)
        if key not in self._spreads:
            self._spreads[key] = self._spread(parameter, apart, joint)
        return self._spreads[key]

    def _spread(self, parameter: DTensor, apart: tuple[int, ...], joint: bool) -> Spread | None:
        mesh, placements = parameter.device_mesh, parameter.placements
        sizes, coordinate = tuple(mesh.shape), mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(
                "this rank is not part of the parameter's mesh; give its optimizer other parameters"
            )
        together = [axis for axis in range(len(sizes)) if axis not in apart and sizes[axis] > 1]
        _check_order(sizes, placements, apart)
        if not together and not joint:
            return None
        places = dict(_members(mesh, together, coordinate))
        group = self._group(mesh, together, places)
        ranks = tuple(places) if group is None else tuple(dist.get_process_group_ranks(group))
        first = [axis for axis in cutting_order(sizes, placements) if axis in apart]
        whole = cut_region(parameter.shape, sizes, placements, coordinate, first)
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
            tensor=_tensor_group(parameter, apart[0], [places[rank] for rank in ranks]) if joint else None,
        )

    def _group(
        self, mesh: DeviceMesh, axes: Sequence[int], places: Mapping[int, tuple[int, ...]]
    ) -> dist.ProcessGroup | None:
        if len(axes) < 2:
            return mesh.get_group(axes[0]) if axes else None
        ranks = tuple(sorted(places))
        if ranks not in self._groups:
            group = dist.new_group(list(ranks), use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            self._groups[ranks] = group
        return self._groups[ranks]


def _tensor_group(parameter: DTensor, axis: int, places: Sequence[tuple[int, ...]]) -> TensorGroup:
    mesh, (rows, columns) = parameter.device_mesh, parameter.shape
    pieces = tuple(tuple(rank for rank, _ in _members(mesh, [axis], place)) for place in places)
    return TensorGroup((rows, columns), dim_of(parameter.placements[axis]), pieces, mesh.get_group(axis))


def named_axes(mesh: DeviceMesh, names: Sequence[str]) -> tuple[int, ...]:
    """Return the axes of a mesh that have one of these names.

    Args:
        mesh: with or without names.
        names: those looked for.

    Returns:
        Axis numbers, ascending; none for a mesh without names.
    """
    return tuple(axis for axis, name in enumerate(mesh.mesh_dim_names or ()) if name in names)


def _check_order(sizes: Sequence[int], placements: Sequence[Placement], apart: Sequence[int]) -> None:
    """A block is whole only if the axes that stay apart cut their dim before all others."""
    order = cutting_order(sizes, placements)
    for early, late in itertools.combinations(order, 2):
        if late in apart and early not in apart and dim_of(placements[early]) == dim_of(placements[late]):
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
