"""A measured figure together with the parts it was summed from, which is what a paired comparison needs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Metric:
    """A ratio of two sums over units: bits over bytes of documents, hits over questions.

    Args:
        name: for instance ``code: bits per byte``.
        units: id of each unit, unique within the metric.
        values: numerator of each unit.
        weights: denominator of each unit.
        higher_is_better: which way an improvement goes.
    """

    name: str
    units: tuple[str, ...]
    values: tuple[float, ...]
    weights: tuple[float, ...]
    higher_is_better: bool

    def __post_init__(self) -> None:
        if not len(self.units) == len(self.values) == len(self.weights):
            counts = (len(self.units), len(self.values), len(self.weights))
            raise ValueError(f"metric {self.name!r} has {counts} units, values, weights; give one of each")
        if len(set(self.units)) != len(self.units):
            raise ValueError(f"metric {self.name!r} has a unit twice; give each unit its own id")

    @property
    def value(self) -> float:
        """Sum of the values over sum of the weights."""
        return math.fsum(self.values) / math.fsum(self.weights)


@runtime_checkable
class Report(Protocol):
    """What every evaluation returns."""

    def conditions(self) -> dict[str, object]:
        """What two reports must share to be compared."""
        ...

    def metrics(self) -> Sequence[Metric]:
        """The figures of the report with their parts."""
        ...

    def rows(self) -> Sequence[Mapping[str, object]]:
        """The table that people read."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        ...
