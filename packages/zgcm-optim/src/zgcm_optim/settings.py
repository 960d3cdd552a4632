"""What a parameter group may say, checked when it is added."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zgcm_optim.coefficients import check_scale, resolve
from zgcm_optim.orthogonalize import Iteration

ALGORITHMS = ("muon", "adam")
SHARDED = ("exact", "blockwise")
TENSOR_PARALLEL = ("auto", "gather", "gram")


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse a parameter group with an invalid value.

    Args:
        group: a complete group, defaults filled in.

    Raises:
        ValueError: names the field, the value and the remedy.
    """
    _check_choice(group, "algorithm", ALGORITHMS)
    _check_choice(group, "sharded", SHARDED)
    _check_choice(group, "tensor_parallel", TENSOR_PARALLEL)
    for field in ("lr", "weight_decay", "eps"):
        _check_range(group, field, float(group[field]), math.inf)
    _check_range(group, "momentum", float(group["momentum"]), 1.0)
    if not math.isfinite(float(group["extra_scale"])):
        raise ValueError(f"extra_scale={group['extra_scale']!r} is not a finite number; 1.0 is neutral")
    if len(group["betas"]) != 2:
        raise ValueError(f"betas={group['betas']!r}: give two numbers, e.g. (0.9, 0.95)")
    for beta in group["betas"]:
        _check_range(group, "betas", float(beta), 1.0)
    check_scale(group["scale"])
    iteration(group)
    if group["algorithm"] == "muon":
        for index, parameter in enumerate(group["params"]):
            _check_matrix(parameter, _name(group, index), group)


def iteration(group: Mapping[str, Any]) -> Iteration:
    """Return how a group's matrices are orthogonalized.

    Args:
        group: a complete group.

    Returns:
        The iteration.

    Raises:
        ValueError: coefficients, steps, dtype or method that do not fit together.
    """
    return Iteration(resolve(group["coefficients"], group["steps"]), group["dtype"], group["method"])


def _name(group: Mapping[str, Any], index: int) -> str:
    names = group.get("param_names")
    return f"parameter {names[index]!r}" if names else f"parameter {index} of the group"


def _check_choice(group: Mapping[str, Any], field: str, choices: tuple[str, ...]) -> None:
    if group[field] not in choices:
        raise ValueError(f"{field}={group[field]!r} is unknown; choose one of {list(choices)}")


def _check_range(group: Mapping[str, Any], field: str, value: float, below: float) -> None:
    if not 0.0 <= value < below:
        bound = "a finite number of at least 0" if below == math.inf else f"in [0, {below:g})"
        raise ValueError(f"{field}={group[field]!r} must be {bound}")


def _check_matrix(parameter: Tensor, name: str, group: Mapping[str, Any]) -> None:
    if parameter.ndim != 2:
        raise ValueError(
            f"{name} has shape {tuple(parameter.shape)}, and Muon takes matrices only; give its group "
            'algorithm="adam" (route_parameters does). FSDP1 flattens weights: use fully_shard instead'
        )
    if not parameter.is_floating_point():
        raise ValueError(f"{name} has dtype {parameter.dtype}; Muon takes real floating-point matrices")
