"""The table of what is computed in which format."""

from typing import NamedTuple

from torch import nn

from zgcm_model.decoder import Decoder
from zgcm_model.precision.injection import is_applied, scaling_state
from zgcm_model.precision.recipe import ROLES
from zgcm_model.precision.roles import projections

HIGH = "high precision"
_NEVER = ("embedding", "norms", "attention core", "head")


class PrecisionRow(NamedTuple):
    """What some layers do with one role.

    Attributes:
        role: projection, or part of the model.
        layers: 0-based indices as ranges, such as ``0-27``; ``all`` for a part that is not a projection.
        format: how it is computed.
    """

    role: str
    layers: str
    format: str


def describe(decoder: Decoder) -> list[PrecisionRow]:
    """List what is computed in FP8 and what is not.

    Args:
        decoder: with or without FP8.

    Returns:
        One row for each role and format, then the parts that are never computed in FP8.
    """
    found = projections(decoder)
    rows = []
    for role in ROLES:
        by_format: dict[str, list[int]] = {}
        for projection in found:
            if projection.role == role:
                by_format.setdefault(_format(decoder, projection.module), []).append(projection.layer)
        rows += [PrecisionRow(role, _ranges(layers), name) for name, layers in by_format.items()]
    return rows + [PrecisionRow(part, "all", HIGH) for part in _NEVER]


def _format(decoder: Decoder, module: nn.Module) -> str:
    if not is_applied(decoder) or type(module) is nn.Linear:
        return HIGH
    state = scaling_state(decoder)
    formats = "E4M3" if state.recipe.format == "e4m3" else "E4M3 forward, E5M2 gradients"
    return f"FP8 {formats} ({state.backend})"


def _ranges(indices: list[int]) -> str:
    """Write [0, 1, 2, 5] as ``0-2, 5``."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
