"""Where the elements of a sharded matrix lie, computed from its shape, mesh and placements.

A DTensor is cut along the axes of its mesh. Each rank holds one region (rows by columns) of the matrix, perhaps
an empty one, and axes that replicate give several ranks the same region.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
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
    return cut_region(shape, sizes, placements, coordinate, cutting_order(sizes, placements))


def cut_region(
    shape: Sequence[int],
    sizes: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
    axes: Sequence[int],
) -> Region:
    """Return the region that is left when some axes cut, one after the other.

    Args:
        shape: rows and columns of the whole matrix.
        sizes: ranks along each mesh axis.
        placements: one for each mesh axis.
        coordinate: the rank's place along each mesh axis.
        axes: those that cut, in order.

    Returns:
        The region.
    """
    spans = [(0, shape[0]), (0, shape[1])]
    for axis in axes:
        start, stop = spans[dim_of(placements[axis])]
        step = math.ceil((stop - start) / sizes[axis])
        first = min(start + coordinate[axis] * step, stop)
        spans[dim_of(placements[axis])] = (first, min(first + step, stop))
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
        later = [a for a in plain if a > axis and dim_of(placements[a]) == dim_of(placements[axis])]
        expected = math.prod(sizes[a] for a in later)
        if getattr(placements[axis], "split_factor", None) != expected:
            raise ValueError(
                f"placements={tuple(placements)}: the strided shard should have a factor of {expected}"
            )
    return plain + strided[::-1]


def dim_of(placement: Placement) -> int:
    """Return the dim of a matrix that a placement cuts.

    Args:
        placement: a shard, plain or strided.

    Returns:
        0 or 1.

    Raises:
        ValueError: it cuts neither rows nor columns.
    """
    dim = int(getattr(placement, "dim", -1))
    if dim not in (0, 1):
        raise ValueError(f"placement={placement}: a matrix has the dims 0 and 1 only")
    return dim


def cuts_first(sizes: Sequence[int], placements: Sequence[Placement], axis: int) -> bool:
    """Return whether a mesh axis cuts its dim before every other axis does.

    Args:
        sizes: ranks along each mesh axis.
        placements: one for each mesh axis.
        axis: one that shards.

    Returns:
        Whether the shards of that axis alone are contiguous.
    """
    dim = dim_of(placements[axis])
    return next(a for a in cutting_order(sizes, placements) if dim_of(placements[a]) == dim) == axis
