"""How each sharded matrix is handled, and the update of all of them.

``"blockwise"`` keeps the shards of tensor-parallel axes apart. ``"exact"`` puts the whole matrix together on one
owner among all its ranks or, for a matrix whose long side is cut over one tensor-parallel axis, iterates on the
Gram matrix between the ranks of that axis, whichever ``costs.choose_tensor_parallel`` says.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from zgcm_optim.costs import choose_tensor_parallel
from zgcm_optim.exchange import Exchange, Shared, whole_operations
from zgcm_optim.gram import carrier
from zgcm_optim.gram_exchange import GramExchange, Joint, tensor_cut
from zgcm_optim.layout import cuts_first, dim_of
from zgcm_optim.ownership import OwnershipPlan
from zgcm_optim.spread import Layouts, Spread, named_axes
from zgcm_optim.update import Matrix, Rule


@dataclass(frozen=True)
class Handling:
    """What a group says about its sharded matrices.

    Args:
        sharded: ``"exact"`` or ``"blockwise"``.
        tensor_parallel: ``"auto"``, ``"gather"`` or ``"gram"``.
        tensor_axes: names of the tensor-parallel axes.
    """

    sharded: str
    tensor_parallel: str
    tensor_axes: tuple[str, ...]

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "Handling":
        """Read a parameter group.

        Args:
            group: a complete, checked group.

        Returns:
            Its handling.
        """
        return cls(group["sharded"], group["tensor_parallel"], tuple(group["tensor_axes"]))


class Distribution:
    """The spreads of an optimizer's parameters, chosen once for each kind."""

    def __init__(self) -> None:
        """Start without any."""
        self._layouts = Layouts()
        self._chosen: dict[Hashable, Spread | None] = {}

    def of(self, parameter: Tensor, handling: Handling, rule: Rule) -> Spread | None:
        """Return how a parameter's matrix is spread over the ranks that orthogonalize it.

        Collective the first time: every rank of the mesh must ask for the same parameters in the same order.

        Args:
            parameter: a matrix, plain or sharded.
            handling: what its group says.
            rule: the numbers of its group.

        Returns:
            The spread, or None where this rank holds a whole matrix and nobody else is concerned.

        Raises:
            ValueError: placements that are not supported, or axes without names where names are needed.
        """
        if not isinstance(parameter, DTensor):
            return None
        layout = (parameter.device_mesh, parameter.placements, tuple(parameter.shape), parameter.dtype)
        key = (*layout, handling, rule.blocks, rule.iteration)
        if key not in self._chosen:
            self._chosen[key] = self._choose(parameter, handling, rule)
        return self._chosen[key]

    def _choose(self, parameter: DTensor, handling: Handling, rule: Rule) -> Spread | None:
        axes = named_axes(parameter.device_mesh, handling.tensor_axes)
        if handling.sharded == "blockwise":
            _check_names(parameter, handling.tensor_axes)
            return self._layouts.of(parameter, axes)
        axis = _joint_axis(parameter, axes, rule)
        if axis is None or handling.tensor_parallel == "gather":
            return self._layouts.of(parameter, ())
        spread = self._layouts.of(parameter, (axis,), joint=True)
        if spread is None or handling.tensor_parallel == "gram":
            return spread
        cut = tensor_cut(spread, parameter.dtype.itemsize + rule.iteration.dtype.itemsize)
        cost = whole_operations(spread.matrix, rule, parameter.device.type)
        triples, body = rule.iteration.triples, rule.iteration.dtype
        weight = carrier(triples, body).itemsize / body.itemsize
        if choose_tensor_parallel(cut, cost, len(triples), weight) == "gram":
            return spread
        return self._layouts.of(parameter, ())


def _check_names(parameter: DTensor, names: Sequence[str]) -> None:
    if names and parameter.device_mesh.mesh_dim_names is None:
        raise ValueError(
            f'sharded="blockwise" looks for the mesh axes {tuple(names)}, but this mesh has no names; give '
            "mesh_dim_names to init_device_mesh, or tensor_axes=() if no axis is tensor-parallel"
        )


def _joint_axis(parameter: DTensor, axes: Iterable[int], rule: Rule) -> int | None:
    """Return the only tensor-parallel axis that cuts, if it cuts the long side of one block, and first."""
    sizes, placements = tuple(parameter.device_mesh.shape), parameter.placements
    cutting = [axis for axis in axes if sizes[axis] > 1 and not placements[axis].is_replicate()]
    if len(cutting) != 1 or 0 in parameter.shape or not _one_block(rule):
        return None
    dim = dim_of(placements[cutting[0]])
    long = parameter.shape[dim] >= parameter.shape[1 - dim]
    return cutting[0] if long and cuts_first(sizes, placements, cutting[0]) else None


def _one_block(rule: Rule) -> bool:
    return rule.blocks in (None, 1) or (isinstance(rule.blocks, tuple) and len(rule.blocks) == 1)


def shared(part: Matrix, spread: Spread) -> Shared:
    """Join what lies on this rank with where the rest lies.

    Args:
        part: what lies here.
        spread: as ``Distribution.of`` gave it.

    Returns:
        One entry for ``update_shared``.
    """
    return Shared(part, spread) if spread.tensor is None else Joint(part, spread)


def update_shared(matrices: Sequence[Shared]) -> None:
    """Update the regions of this rank in place; every rank that holds a part must call this alike.

    Args:
        matrices: in the same order on every rank; those without elements are left alone.
    """
    together: dict[tuple[Any, ...], list[Shared]] = {}
    for matrix in matrices:
        spread, part = matrix.spread, matrix.part
        pieces = None if spread.tensor is None else spread.tensor.columns
        key = (spread.ranks, pieces, part.weight.device, part.momentum.dtype, part.rule.iteration.dtype)
        if 0 not in spread.matrix:
            together.setdefault(key, []).append(matrix)
    loads = Loads()
    for members in together.values():
        plan = loads.plan(members)
        (Exchange if members[0].spread.tensor is None else GramExchange)(members, plan).run()


class Loads:
    """Operations that ranks have been given so far, so that later plans level out earlier ones."""

    def __init__(self) -> None:
        """Start without any."""
        self._given: list[dict[int, int]] = []

    def plan(self, matrices: Sequence[Shared]) -> OwnershipPlan:
        """Plan the matrices of one group and remember who does how much.

        Args:
            matrices: of one group, in the same order on every rank of it.

        Returns:
            The plan. It counts earlier loads only where all ranks of the group know them.
        """
        spread, jobs = matrices[0].spread, tuple(matrix.job() for matrix in matrices)
        known = [given for given in self._given if given.keys() >= set(spread.ranks)]
        before = tuple(sum(given[rank] for given in known) for rank in spread.ranks)
        plan = OwnershipPlan.of(jobs, len(before), before)
        columns = [(rank,) for rank in spread.ranks] if spread.tensor is None else spread.tensor.columns
        loads = plan.loads(jobs)
        self._given.append({rank: load for load, ranks in zip(loads, columns, strict=True) for rank in ranks})
        return plan
