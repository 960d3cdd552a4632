"""Learning rates as pure functions of how far training has come.

Progress is a number of updates (update 1 is the first) or of tokens; ``warmup`` and ``total`` are in the same
unit. Nothing is stored, so a resumed run computes the same rate from the same number.

    rate = schedule.cosine(update, peak=2e-4, warmup=100, total=10_000)
    for group in optimizer.param_groups:
        group["lr"] = rate
"""

import math
from typing import Literal


def constant(progress: float, peak: float, warmup: float = 0) -> float:
    """Return the rate of a linear warm-up to a constant.

    Args:
        progress: update number (1-based) or tokens seen when this update is done.
        peak: rate after the warm-up.
        warmup: length of the warm-up; update k gets ``peak * min(1, k / warmup)``.

    Returns:
        The learning rate.

    Raises:
        ValueError: a negative or non-finite argument.

    Source: published ZGCM-1 training setup (linear warm-up, then constant).
    """
    _check(progress=progress, peak=peak, warmup=warmup)
    return peak * _warm(progress, warmup)


def cosine(progress: float, peak: float, warmup: float, total: float, floor: float = 0.0) -> float:
    """Return the rate of a linear warm-up followed by half a cosine.

    Args:
        progress: update number (1-based) or tokens seen when this update is done.
        peak: rate at the end of the warm-up.
        warmup: length of the warm-up.
        total: where the rate reaches ``floor``, and stays there.
        floor: last rate.

    Returns:
        The learning rate.

    Raises:
        ValueError: a negative or non-finite argument, a warm-up longer than the whole, or a floor above the peak.

    Source: Loshchilov, Hutter, SGDR, 2017.
    """
    _check(progress=progress, peak=peak, warmup=warmup, total=total, floor=floor)
    _check_order(peak, warmup, total, floor)
    if progress <= warmup:
        return peak * _warm(progress, warmup)
    done = min(1.0, (progress - warmup) / (total - warmup)) if total > warmup else 1.0
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


def warmup_stable_decay(
    progress: float,
    peak: float,
    warmup: float,
    total: float,
    decay: float,
    *,
    floor: float = 0.0,
    shape: Literal["linear", "sqrt"] = "linear",
) -> float:
    """Return the rate of a linear warm-up, a constant part and a decay at the end.

    Args:
        progress: update number (1-based) or tokens seen when this update is done.
        peak: rate of the constant part.
        warmup: length of the warm-up.
        total: where the rate reaches ``floor``, and stays there.
        decay: length of the decay, the last part of ``total``.
        floor: last rate.
        shape: ``"linear"``, or ``"sqrt"`` for 1 - sqrt(part of the decay that is done).

    Returns:
        The learning rate.

    Raises:
        ValueError: a negative or non-finite argument, parts longer than the whole, or an unknown shape.

    Source: Hu et al., MiniCPM, 2024 (linear); Hägele et al., Scaling laws beyond fixed durations, 2024 (sqrt).
    """
    _check(progress=progress, peak=peak, warmup=warmup, total=total, decay=decay, floor=floor)
    _check_order(peak, warmup + decay, total, floor)
    if shape not in ("linear", "sqrt"):
        raise ValueError(f"shape={shape!r} is unknown; choose 'linear' or 'sqrt'")
    start = total - decay
    if progress <= start or decay == 0:
        return peak * _warm(progress, warmup)
    done = min(1.0, (progress - start) / decay)
    left = 1.0 - (math.sqrt(done) if shape == "sqrt" else done)
    return floor + (peak - floor) * left


def _warm(progress: float, warmup: float) -> float:
    return min(1.0, progress / warmup) if warmup > 0 else 1.0


def _check(**values: float) -> None:
    for field, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{field}={value!r} must be a finite number of at least 0")


def _check_order(peak: float, parts: float, total: float, floor: float) -> None:
    if parts > total:
        raise ValueError(
            f"total={total!r} is shorter than its parts ({parts!r}); lengthen it or shorten them"
        )
    if floor > peak:
        raise ValueError(f"floor={floor!r} is above peak={peak!r}")
