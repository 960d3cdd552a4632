"""Published optimizers, ready for a model.

============ ======== ======== ============= ========================== ====================================
preset       momentum Nesterov coefficients  scale                      source
============ ======== ======== ============= ========================== ====================================
zgcm1        0.9      no       quintic       spectral                   published ZGCM-1 training setup
deepseek_v4  0.95     yes      deepseek_v4   spectral, times 0.18       DeepSeek-V4 technical report, 2026
moonlight    0.95     yes      simple        match_rms_adamw            Moonlight, arXiv:2502.16982
============ ======== ======== ============= ========================== ====================================

All use a decay of 0.1 (for vectors only deepseek_v4) and Adam with betas (0.9, 0.95) for what is not a hidden
matrix.
"""

from typing import Any

from torch import nn

from zgcm_optim.muon import Muon
from zgcm_optim.routing import route_parameters


def zgcm1(model: nn.Module, lr: float = 2e-4, **overrides: Any) -> Muon:
    """Return the optimizer that ZGCM-1 was pretrained with.

    Args:
        model: the model, sharded or not.
        lr: peak learning rate.
        **overrides: any argument of ``Muon``.

    Returns:
        The optimizer; with tensor-parallel parameters each shard is orthogonalized alone.

    Source: published ZGCM-1 training setup.
    """
    published = {"momentum": 0.9, "nesterov": False, "coefficients": "quintic", "sharded": "blockwise"}
    return Muon(route_parameters(model), lr, **{**published, **overrides})


def deepseek_v4(model: nn.Module, lr: float = 2.7e-4, **overrides: Any) -> Muon:
    """Return the optimizer described for DeepSeek-V4: ten steps, update RMS 0.18, all parameters decay.

    Args:
        model: the model, sharded or not.
        lr: peak learning rate; the default is that of the Flash model.
        **overrides: any argument of ``Muon``.

    Returns:
        The optimizer.

    Source: DeepSeek-V4 technical report, 2026, section 4.2.2.
    """
    published = {"steps": 10, "coefficients": "deepseek_v4", "extra_scale": 0.18, "eps": 1e-20}
    return Muon(route_parameters(model, decay_vectors=True), lr, **{**published, **overrides})


def moonlight(model: nn.Module, lr: float = 4.2e-4, **overrides: Any) -> Muon:
    """Return the optimizer that Moonlight was trained with: the RMS of its update matches AdamW's.

    Args:
        model: the model, sharded or not.
        lr: peak learning rate.
        **overrides: any argument of ``Muon``.

    Returns:
        The optimizer.

    Source: Moonlight, arXiv:2502.16982.
    """
    published = {"coefficients": "simple", "scale": "match_rms_adamw"}
    return Muon(route_parameters(model), lr, **{**published, **overrides})
