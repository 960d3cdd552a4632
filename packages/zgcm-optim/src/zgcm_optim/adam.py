"""Adam with decoupled decay for the parameters that Muon does not take."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from zgcm_optim.layout import local

# Devices on which torch has a fused Adam kernel.
_FUSED = ("cpu", "cuda", "xpu", "mps")


def initial_state(parameter: Tensor) -> dict[str, Tensor]:
    """Return the state of a parameter that has not been updated yet.

    Args:
        parameter: plain or sharded.

    Returns:
        ``step`` (a float32 scalar, 0) and zero moments of the parameter's layout and dtype.
    """
    return {
        "step": torch.zeros((), dtype=torch.float32, device=local(parameter).device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


def update(
    parameters: Sequence[Tensor], state: Mapping[Tensor, dict[str, Any]], group: Mapping[str, Any]
) -> None:
    """Update parameters in place; every element is handled where it lies.

    Args:
        parameters: those of the group that have a gradient, plain or sharded.
        state: their state, advanced in place.
        group: ``lr``, ``weight_decay``, ``betas``, ``eps``.

    Source: Loshchilov, Hutter, Decoupled weight decay regularization, 2019.
    """
    buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        shard = local(parameter)
        buckets[shard.device, shard.dtype].append(parameter)
    for (device, _), bucket in buckets.items():
        _update_bucket(bucket, state, group, device)


def _update_bucket(
    bucket: Sequence[Tensor],
    state: Mapping[Tensor, dict[str, Any]],
    group: Mapping[str, Any],
    device: torch.device,
) -> None:
    fused = device.type in _FUSED
    adamw(
        [local(parameter) for parameter in bucket],
        [local(parameter.grad) for parameter in bucket if parameter.grad is not None],
        [local(state[parameter]["exp_avg"]) for parameter in bucket],
        [local(state[parameter]["exp_avg_sq"]) for parameter in bucket],
        [],
        [state[parameter]["step"] for parameter in bucket],
        fused=fused,
        foreach=not fused,
        amsgrad=False,
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        maximize=False,
    )
