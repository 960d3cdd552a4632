"""Collectives of an update, summed by what they are for."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, partial

from zgcm_train.config import Recipe
from zgcm_train.mesh import AXES
from zgcm_train.scale.measure import Traffic
from zgcm_train.scale.watch import Event


def micro_batches_run(recipe: Recipe) -> int:
    """Return how many micro-batches ``measure_rank`` runs: a first and a last one, or a pipeline's all.

    Args:
        recipe: the effective recipe.
    """
    return recipe.accumulation if recipe.parallel.pp > 1 else min(2, recipe.accumulation)


def axis_sizes(recipe: Recipe) -> dict[str, int]:
    """Return the size of each mesh axis, in the mesh's order.

    Args:
        recipe: the effective recipe.
    """
    return {axis: getattr(recipe.parallel, axis) for axis in AXES}


def place_of(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the index of a rank along each axis.

    Args:
        rank: its number.
        sizes: of the axes; the last one varies fastest.
    """
    place = {}
    for axis in reversed(list(sizes)):
        rank, place[axis] = divmod(rank, sizes[axis])
    return {axis: place[axis] for axis in sizes}


def traffic_of(events: Sequence[Event], recipe: Recipe) -> tuple[Traffic, ...]:
    """Sum collectives by purpose, kind and axes.

    Args:
        events: of an update with ``micro_batches_run(recipe)`` micro-batches.
        recipe: the effective recipe.

    Returns:
        The sums of an update with all its micro-batches.
    """
    axes_of = cache(partial(_axes, sizes=axis_sizes(recipe)))
    more = recipe.accumulation - micro_batches_run(recipe)
    counts: Counter[tuple[str, str, str]] = Counter()
    sent: Counter[tuple[str, str, str]] = Counter()
    for event in events:
        axes = axes_of(event.collective.ranks)
        key = (purpose_of(event, axes), event.collective.kind, "+".join(axes))
        times = 1 + more * (event.micro_batch == 1)
        counts[key] += times
        sent[key] += times * event.collective.sent
    return tuple(Traffic(*key, counts[key], sent[key]) for key in counts)


def _axes(ranks: Sequence[int], sizes: Mapping[str, int]) -> tuple[str, ...]:
    places = [place_of(rank, sizes) for rank in ranks]
    return tuple(axis for axis in sizes if len({place[axis] for place in places}) > 1)


def purpose_of(event: Event, axes: tuple[str, ...]) -> str:
    """Name what a collective is for.

    Args:
        event: what was seen.
        axes: over which its ranks differ.
    """
    kind, elements = event.collective.kind, event.collective.elements
    if event.in_update:
        return "optimizer"
    if elements <= 1:
        return "counts, norms"
    if axes in PURPOSES_BY_AXIS:
        return PURPOSES_BY_AXIS[axes]
    if kind == "all-gather" and event.collective.integer:
        return "documents"
    return PURPOSES_BY_KIND[kind]


PURPOSES_BY_AXIS = {("tp",): "tensor parallel", ("pp",): "pipeline"}
PURPOSES_BY_KIND = {
    "send": "window layers",
    "receive": "window layers",
    "all-to-all": "global layers",
    "all-gather": "weights",
    "reduce-scatter": "gradients",
    "all-reduce": "replicas",
}
