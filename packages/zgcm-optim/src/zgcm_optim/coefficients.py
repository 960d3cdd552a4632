"""Coefficient tables of the Newton-Schulz iteration and the scale of the update.

One step maps every singular value s of a matrix to ``a*s + b*s**3 + c*s**5``; a table says which triple
(a, b, c) each step uses. Three kinds of table exist, and they differ in what happens when the number of
steps is not the length of the table:

======== ====================================================================================
kind     steps other than the length
======== ====================================================================================
cycle    more steps start again at the first triple; fewer are refused
tail     fewer steps use the first triples; more repeat the last one, whose fixed point is 1
exact    refused: the table is one schedule and only works as a whole
======== ====================================================================================
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice
from typing import Literal

Triple = tuple[float, float, float]
Coefficients = str | Sequence[Sequence[float]]

SCALES = ("spectral", "match_rms_adamw", "shape", "unit_rms", "none")


@dataclass(frozen=True)
class CoefficientTable:
    """A named table of triples.

    Args:
        triples: one (a, b, c) for each step, in order.
        kind: what to do when the number of steps is not ``len(triples)``; see the module's table.
        source: where the numbers come from.
    """

    triples: tuple[Triple, ...]
    kind: Literal["cycle", "tail", "exact"]
    source: str

    def schedule(self, steps: int) -> tuple[Triple, ...]:
        """Return the triples of ``steps`` steps.

        Args:
            steps: number of iterations, at least 1.

        Returns:
            One triple per step.

        Raises:
            ValueError: the table cannot serve that number of steps.
        """
        length = len(self.triples)
        if self.kind == "exact" and steps != length:
            raise ValueError(
                f"steps={steps}: these coefficients are a schedule of {length} steps; set steps={length}"
            )
        if self.kind == "cycle" and steps < length:
            raise ValueError(
                f"steps={steps}: these coefficients need at least {length} steps; set steps={length}"
            )
        if self.kind == "cycle":
            return tuple(islice(cycle(self.triples), steps))
        return (self.triples + self.triples[-1:] * steps)[:steps]


def _safe(triples: Sequence[Triple], margin: float) -> tuple[Triple, ...]:
    """Shrink the argument of all but the last polynomial, so that rounding cannot leave its interval."""
    shrunk = [(a / margin, b / margin**3, c / margin**5) for a, b, c in triples[:-1]]
    return (*shrunk, triples[-1])


_JORDAN: Triple = (3.4445, -4.7750, 2.0315)

TABLES: dict[str, CoefficientTable] = {
    "quintic": CoefficientTable(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        "cycle",
        "The published ZGCM-1 training setup (Emerging-Optimizers v0.2.0, table 'quintic').",
    ),
    "simple": CoefficientTable(
        (_JORDAN,),
        "cycle",
        "K. Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.",
    ),
    "polar_express": CoefficientTable(
        _safe(
            (
                (8.28721201814563, -23.595886519098837, 17.300387312530933),
                (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
                (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
                (3.3184196573706015, -2.488488024314874, 0.51004894012372),
                (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
                (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
                (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
                (1.875, -1.25, 0.375),
            ),
            1.01,
        ),
        "tail",
        "Amsel, Persson, Musco, Gower, The Polar Express, arXiv:2505.16932, algorithm 1 (margin 1.01).",
    ),
    "deepseek_v4": CoefficientTable(
        (_JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2,
        "exact",
        "DeepSeek-V4 technical report, 2026: 8 fast steps, then 2 that settle at 1.",
    ),
}


def resolve(coefficients: Coefficients, steps: int) -> tuple[Triple, ...]:
    """Return the triples that ``steps`` iterations use.

    Args:
        coefficients: the name of a table, or a list of triples: one for each step, or a single one for all.
        steps: number of iterations, at least 1.

    Returns:
        ``steps`` triples.

    Raises:
        ValueError: an unknown name, a malformed triple, or a table that does not fit ``steps``.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} is not a whole number of at least 1; 5 is usual")
    if isinstance(coefficients, str):
        if coefficients not in TABLES:
            raise ValueError(f"coefficients={coefficients!r} is unknown; choose one of {sorted(TABLES)}")
        return TABLES[coefficients].schedule(steps)
    triples = tuple(_triple(entry) for entry in coefficients)
    if not triples:
        raise ValueError("coefficients=[] is empty; give one triple for each step")
    kind: Literal["cycle", "exact"] = "cycle" if len(triples) == 1 else "exact"
    return CoefficientTable(triples, kind, "given by the caller").schedule(steps)


def _triple(entry: Sequence[float]) -> Triple:
    values = tuple(float(value) for value in entry)
    if len(values) != 3 or not all(math.isfinite(value) for value in values):
        raise ValueError(f"coefficients: {entry!r} is not three finite numbers (a, b, c)")
    return values[0], values[1], values[2]


@lru_cache(maxsize=1024)
def update_scale(out: int, in_: int, mode: str) -> float:
    """Return the factor that an orthogonalized update is multiplied by.

    Args:
        out: rows of the matrix (output features).
        in_: columns of the matrix (input features).
        mode: ``"spectral"`` sqrt(max(out, in)), which gives the update an RMS of 1;
            ``"match_rms_adamw"`` 0.2 * sqrt(max(out, in)); ``"shape"`` sqrt(max(1, out / in));
            ``"unit_rms"`` sqrt(out / in); ``"none"`` 1.

    Returns:
        The factor; 1.0 for a matrix without elements.

    Raises:
        ValueError: an unknown mode.

    Source: ZGCM-1 (spectral); Moonlight, arXiv:2502.16982 (match_rms_adamw); K. Jordan 2024 (shape).
    """
    check_scale(mode)
    if out == 0 or in_ == 0 or mode == "none":
        return 1.0
    factors = {
        "spectral": math.sqrt(max(out, in_)),
        "match_rms_adamw": 0.2 * math.sqrt(max(out, in_)),
        "shape": math.sqrt(max(1.0, out / in_)),
        "unit_rms": math.sqrt(out / in_),
    }
    return factors[mode]


def check_scale(mode: str) -> None:
    """Refuse an unknown scale mode.

    Args:
        mode: the mode to check.

    Raises:
        ValueError: the mode is none of ``SCALES``.
    """
    if mode not in SCALES:
        raise ValueError(f"scale={mode!r} is unknown; choose one of {list(SCALES)}")
