"""Initial weights that depend on the seed and on a parameter's name, and on nothing else."""

import hashlib
import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zgcm_model.decoder import Decoder
from zgcm_model.interchange.names import bare_name
from zgcm_model.linear import HasState
from zgcm_model.norm import RmsNorm
from zgcm_model.sharding import local_part


@torch.no_grad()
def initialize(decoder: Decoder, seed: int) -> Decoder:
    """Draw all weights in place: the same full weights under every sharding and every number of ranks.

    Matrices are normal with ``config.init_std``; the two that write to the residual stream (attention output
    and feed-forward output) with ``init_std / sqrt(2 * num_layers)``; norm scales are 1. Each parameter has a
    generator of its own, seeded by ``seed`` and its name, so neither order nor sharding matters. The state of
    FP8 scaling, where there is one, starts anew.

    Args:
        decoder: may be sharded (DTensor parameters) and may have been built on the meta device, but must have
            been materialized since (``to_empty``).
        seed: any integer.

    Returns:
        The decoder.

    Raises:
        ValueError: a parameter is still on the meta device, or belongs to no known role.

    Source: ZGCM-1 release (init std 0.02, scaled output matrices as in Megatron-LM).
    """
    scales = _standard_deviations(decoder)
    for name, parameter in decoder.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device; call decoder.to_empty(device=...) first")
        std = scales.get(id(parameter))
        if std is None:
            raise ValueError(f"{name} has no known role; initialize it where its module is made")
        _fill(parameter, std, seed, bare_name(name))
    for module in decoder.modules():
        if isinstance(module, HasState):
            module.reset_state()
    return decoder


def _standard_deviations(decoder: Decoder) -> dict[int, float]:
    """Map the id of each parameter to its standard deviation; 0 stands for a norm scale."""
    config = decoder.config
    residual = config.init_std / math.sqrt(2 * config.num_layers)
    scales: dict[int, float] = {}
    for module in decoder.modules():
        # Not module.weight: under tensor parallelism that is the local part.
        weight = module._parameters.get("weight")
        if weight is not None:
            scales[id(weight)] = 0.0 if isinstance(module, RmsNorm) else config.init_std
    for block in decoder.blocks():
        for output in (block.attention.o_proj, block.feed_forward.down_proj):
            scales[id(output._parameters["weight"])] = residual
    return scales


def _fill(parameter: Tensor, std: float, seed: int, name: str) -> None:
    if std == 0.0:
        parameter.fill_(1.0)
        return
    generator = torch.Generator().manual_seed(parameter_seed(seed, name))
    full = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
    target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    target.copy_(local_part(full, parameter))


def parameter_seed(seed: int, name: str) -> int:
    """Derive the seed of one parameter.

    Args:
        seed: the run's seed.
        name: the parameter's full name.

    Returns:
        A 63-bit seed.
    """
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
