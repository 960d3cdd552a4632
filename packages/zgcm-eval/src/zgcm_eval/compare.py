"""Compare two reports document by document, on every figure they hold.

A checkpoint is not chosen by one figure: the result says for each one whether it clearly improved, and calls
the whole mixed as soon as one figure improved and another became worse.

Both models saw the same units, so the difference is taken per resample of the units (paired bootstrap): a
domain where all documents are hard does not widen the interval of the difference. It is the percentile
interval, at a confidence that holds for all figures together (Bonferroni): of many figures, one always looks
better by chance.

Source: Koehn, "Statistical Significance Tests for Machine Translation Evaluation", 2004 (paired bootstrap).
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from zgcm_eval.metrics import Metric, Report

FEWEST_UNITS = 10
"""Under this many units a bootstrap interval is too narrow to decide by."""


@dataclass(frozen=True)
class CompareOptions:
    """How the interval of a difference is found.

    Args:
        confidence: probability that all intervals of a comparison hold.
        resamples: number of bootstrap resamples.
        seed: of the resamples.
    """

    confidence: float = 0.95
    resamples: int = 5000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise ValueError(
                f"confidence is {self.confidence}; give a share between 0 and 1, for instance 0.95"
            )
        if self.resamples < 100:
            raise ValueError(f"resamples is {self.resamples}; give at least 100")


@dataclass(frozen=True)
class MetricComparison:
    """One figure before and after."""

    name: str
    before: float
    after: float
    difference: float
    """After minus before."""
    low: float
    high: float
    """Interval of the difference."""
    units: int
    improved: float
    """Share of units that improved, ties half."""
    verdict: str
    """``better``, ``worse``, ``no clear difference`` or ``too few units``."""


@dataclass(frozen=True)
class Comparison:
    """All figures of two reports."""

    metrics: tuple[MetricComparison, ...]
    options: CompareOptions

    @property
    def verdict(self) -> str:
        """``better`` or ``worse`` if no figure goes the other way; else ``mixed`` or no clear difference."""
        found = {metric.verdict for metric in self.metrics}
        if {"better", "worse"} <= found:
            return "mixed"
        return next((verdict for verdict in ("better", "worse") if verdict in found), "no clear difference")

    def rows(self) -> list[dict[str, Any]]:
        """One row per figure."""
        return [asdict(metric) for metric in self.metrics]

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON types."""
        return {"verdict": self.verdict, "options": asdict(self.options), "metrics": self.rows()}


def compare_reports(before: Report, after: Report, options: CompareOptions | None = None) -> Comparison:
    """Compare two reports of one kind on the same sets.

    Args:
        before: the report of the older or the reference model.
        after: the report of the model in question.
        options: of the interval.

    Returns:
        The comparison.

    Raises:
        ValueError: the reports are of different kinds, or measured different things.
    """
    if type(before) is not type(after):
        raise ValueError(f"{type(before).__name__} and {type(after).__name__} measure different things")
    first, second = before.conditions(), after.conditions()
    for name, value in first.items():
        if second[name] != value:
            raise ValueError(
                f"{name} is {value!r} in the first report and {second[name]!r} in the second; measure both "
                "alike"
            )
    options = options or CompareOptions()
    figures = before.metrics()
    pairs = zip(figures, after.metrics(), strict=True)
    return Comparison(tuple(compare_metrics(one, two, options, len(figures)) for one, two in pairs), options)


def compare_metrics(
    before: Metric, after: Metric, options: CompareOptions, figures: int = 1
) -> MetricComparison:
    """Compare one figure over the same units.

    Args:
        before: reference.
        after: in question.
        options: of the interval.
        figures: figures that the confidence covers together.

    Returns:
        The figure's comparison.

    Raises:
        ValueError: the figures are not of the same units.
    """
    if (before.name, before.units) != (after.name, after.units):
        raise ValueError(f"{before.name!r} and {after.name!r} are not figures of the same units")
    sums = np.array([before.values, before.weights, after.values, after.weights], dtype=np.float64)
    # A unit without weight, such as an empty document, says nothing about a ratio.
    sums = sums[:, (sums[1] > 0) & (sums[3] > 0)]
    low, high = _interval(sums, options, (1 - options.confidence) / figures)
    sign = 1.0 if after.higher_is_better else -1.0
    gains = sign * (sums[2] / sums[3] - sums[0] / sums[1])
    improved = float(np.mean((gains > 0) + 0.5 * (gains == 0)))
    verdict = _verdict(sign * low, sign * high, sums.shape[1])
    difference = after.value - before.value
    return MetricComparison(
        before.name, before.value, after.value, difference, low, high, sums.shape[1], improved, verdict
    )


def _interval(sums: Float64[np.ndarray, "4 N"], options: CompareOptions, miss: float) -> tuple[float, float]:
    """Percentile interval of the difference of two ratios over resampled units; ``miss`` is its error."""
    rng, count = np.random.default_rng(options.seed), sums.shape[1]
    differences = np.empty(options.resamples)
    for start in range(0, options.resamples, 100):
        size = min(100, options.resamples - start)
        drawn = rng.multinomial(count, np.full(count, 1 / count), size=size) @ sums.T
        differences[start : start + size] = drawn[:, 2] / drawn[:, 3] - drawn[:, 0] / drawn[:, 1]
    low, high = np.quantile(differences, [miss / 2, 1 - miss / 2])
    return float(low), float(high)


def _verdict(one_end: float, other_end: float, units: int) -> str:
    """Judge the interval of a gain, whose ends may come in either order."""
    if units < FEWEST_UNITS:
        return "too few units"
    if min(one_end, other_end) > 0:
        return "better"
    return "worse" if max(one_end, other_end) < 0 else "no clear difference"
