"""Public Muon optimizers with the same coefficients and steps, for benchmarks only.

Install the packages of ``INSTALL`` beside zgcm-optim to compare with them; one that is missing, or cannot run
on this device, is left out and named.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zgcm_optim import TABLES, Muon

INSTALL = "pip install muon-optimizer optimuon pytorch-optimizer omnimuon heavyball"

# What all of them are set to: K. Jordan's coefficients, five steps, Nesterov momentum 0.95, decay 0.1.
TRIPLE = TABLES["simple"].triples[0]
RATE, DECAY = 1e-3, 0.1

Params = Sequence[nn.Parameter]


def ours(params: Params) -> Optimizer:
    """Return zgcm_optim.Muon."""
    return Muon(params, RATE, weight_decay=DECAY, coefficients="simple", scale="shape")


def torchs(params: Params) -> Optimizer:
    """Return torch.optim.Muon."""
    return torch.optim.Muon(params, lr=RATE, weight_decay=DECAY)


def jordan(params: Params) -> Optimizer:
    """Return SingleDeviceMuon of the package muon-optimizer."""
    from muon import SingleDeviceMuon

    return SingleDeviceMuon(list(params), lr=RATE, weight_decay=DECAY, momentum=0.95)


def optimuon(params: Params, gram: bool = False) -> Optimizer:
    """Return Muon of the package optimuon, in bfloat16."""
    from optimuon import Muon as Other

    settings = {"ns_coefficients": TRIPLE, "ns_norm_scale": 1.0, "ns_dtype": torch.bfloat16}
    return Other(params, lr=RATE, weight_decay=DECAY, gram_ns=gram, **settings)


def optimuon_gram(params: Params) -> Optimizer:
    """Return the same with its Gram form."""
    return optimuon(params, gram=True)


def pytorch_optimizer(params: Params, method: str = "newton_schulz") -> Optimizer:
    """Return Muon of the package pytorch-optimizer."""
    from pytorch_optimizer import Muon as Other

    groups = [{"params": list(params), "use_muon": True}]
    return Other(groups, lr=RATE, weight_decay=DECAY, ns_method=method)


def pytorch_optimizer_gram(params: Params) -> Optimizer:
    """Return the same with its Gram form, which runs in float16."""
    return pytorch_optimizer(params, "gram_newton_schulz")


def omnimuon(params: Params) -> Optimizer:
    """Return Muon of the package omnimuon."""
    from omnimuon.muon import Muon as Other

    return Other(params, lr=RATE)


def heavyball(params: Params) -> Optimizer:
    """Return Muon of the package heavyball, which compiles."""
    from heavyball import Muon as Other

    return Other(params, lr=RATE, weight_decay=DECAY)


CANDIDATES: dict[str, Callable[[Params], Any]] = {
    "zgcm-optim": ours,
    "torch.optim.Muon": torchs,
    "muon-optimizer": jordan,
    "optimuon": optimuon,
    "optimuon, Gram": optimuon_gram,
    "pytorch-optimizer": pytorch_optimizer,
    "pytorch-optimizer, Gram": pytorch_optimizer_gram,
    "omnimuon": omnimuon,
    "heavyball": heavyball,
}

# Compiling or emulating float16 takes minutes on a CPU; only a comparison that asks for them runs these.
SLOW = ("pytorch-optimizer, Gram", "heavyball")


def parameters(shapes: Sequence[tuple[int, int, int]]) -> list[nn.Parameter]:
    """Return parameters with gradients.

    Args:
        shapes: (count, rows, columns) of each kind.

    Returns:
        Small random weights with random gradients.
    """
    generator = torch.Generator().manual_seed(0)
    params = []
    for count, rows, columns in shapes:
        for _ in range(count):
            params.append(nn.Parameter(torch.randn(rows, columns, generator=generator) * 0.02))
            params[-1].grad = torch.randn(rows, columns, generator=generator) * 1e-3
    return params


def available(names: Sequence[str]) -> tuple[dict[str, Callable[[Params], Any]], dict[str, str]]:
    """Return the candidates that make a step here, and why the others do not.

    Args:
        names: of ``CANDIDATES``.

    Returns:
        Working candidates, and a reason for each of the others.
    """
    working, missing = {}, {}
    for name in names:
        try:
            CANDIDATES[name](parameters([(1, 16, 32), (1, 32, 16)])).step()
        except Exception as error:  # a peer may fail in any way; the reason is printed
            missing[name] = f"{type(error).__name__}: {error}"
        else:
            working[name] = CANDIDATES[name]
    return working, missing
