"""FP8 training with delayed scaling: E4M3 inputs and weights, E5M2 gradients, float32 master weights.

Order of things: build the decoder, :func:`apply`, split and shard it, ``initialize``; then after every optimizer
step :func:`update_scales`, once, on every rank.
"""

from zgcm_model.precision.gather import gather_in_fp8
from zgcm_model.precision.injection import apply, is_applied, scaling_state, update_scales
from zgcm_model.precision.recipe import ROLES, DelayedScaling, HighPrecision
from zgcm_model.precision.scaling import ScalingState, UpdateReport
from zgcm_model.precision.switch import find_switch, is_state_name, require_same_precision
from zgcm_model.precision.table import PrecisionRow, describe
from zgcm_model.precision.watch import NumericsSample, NumericsWatch

__all__ = [
    "ROLES",
    "DelayedScaling",
    "HighPrecision",
    "NumericsSample",
    "NumericsWatch",
    "PrecisionRow",
    "ScalingState",
    "UpdateReport",
    "apply",
    "describe",
    "find_switch",
    "gather_in_fp8",
    "is_applied",
    "is_state_name",
    "require_same_precision",
    "scaling_state",
    "update_scales",
]
