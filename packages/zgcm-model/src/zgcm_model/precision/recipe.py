"""What is computed in FP8, how its scales follow the data, and what stays in high precision."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

Role = Literal["q", "k", "v", "g", "o", "gate", "up", "down"]
Format = Literal["hybrid", "e4m3"]
AmaxCompute = Literal["max", "most_recent"]

ROLES: tuple[Role, ...] = get_args(Role)
"""The projections of a layer: query, key, value, gate of the attention, its output, and the feed-forward three."""

FORWARD = torch.float8_e4m3fn
"""Inputs and weights, in both formats: 3 bits of mantissa, largest value 448."""
_GRADIENT = {"hybrid": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class DelayedScaling:
    """FP8 with scales from the largest magnitudes of earlier optimizer steps.

    After a step, a tensor's scale becomes ``(largest FP8 value / amax) / 2**margin``, with amax over the steps in
    its history. All micro-batches of a step use the same scales.

    Args:
        format: ``hybrid`` has E4M3 inputs and weights and E5M2 gradients; ``e4m3`` has E4M3 for all.
        amax_history_len: optimizer steps that a history remembers.
        amax_compute: ``max`` of the history, or its ``most_recent`` entry.
        margin: halvings of the scale, room for values that grow.

    Raises:
        ValueError: a value is out of range; names the field, the value and the remedy.

    Source: Transformer Engine, ``transformer_engine.common.recipe.DelayedScaling``; the ZGCM-1 run used its defaults
    of hybrid, 1024, max and 0.
    """

    format: Format = "hybrid"
    amax_history_len: int = 1024
    amax_compute: AmaxCompute = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        _require_choice("format", self.format, get_args(Format))
        _require_choice("amax_compute", self.amax_compute, get_args(AmaxCompute))
        _require_integer("amax_history_len", self.amax_history_len, 1, 2**20)
        _require_integer("margin", self.margin, 0, 32)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Format of gradients."""
        return _GRADIENT[self.format]


@dataclass(frozen=True)
class HighPrecision:
    """The projections that are not computed in FP8; attention core, embedding, norms and head never are.

    Args:
        roles: kept in every layer.
        layers: kept in some layers: role -> 0-based indices, negative ones counted from the last layer, such as
            ``{"down": range(-4, 0)}`` for the last four.

    Raises:
        ValueError: a role is unknown.
    """

    roles: tuple[Role, ...] = ()
    layers: Mapping[Role, tuple[int, ...] | range] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role in (*self.roles, *self.layers):
            _require_choice("role", role, ROLES)

    def keeps(self, role: Role, layer: int, num_layers: int) -> bool:
        """Say whether a projection stays in high precision.

        Args:
            role: which projection.
            layer: 0-based index of its layer.
            num_layers: layers of the model.

        Returns:
            True if it is not computed in FP8.
        """
        named = self.layers.get(role, ())
        return role in self.roles or layer in named or layer - num_layers in named

    def check(self, num_layers: int) -> None:
        """Refuse a table that names layers the model does not have.

        Args:
            num_layers: layers of the model.

        Raises:
            ValueError: an index is outside.
        """
        for role, indices in self.layers.items():
            for index in indices:
                if not -num_layers <= index < num_layers:
                    raise ValueError(
                        f"high_precision.layers[{role!r}] names layer {index} of a model with {num_layers}; "
                        f"use indices from {-num_layers} to {num_layers - 1}"
                    )


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(choices)}")


def _require_integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name}={value!r} cannot be used; set a whole number from {low} to {high}")
