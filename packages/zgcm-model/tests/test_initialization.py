import math

import pytest
import torch
import torch._dynamo  # once here, or every forked rank imports it again
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zgcm_model import Decoder, ModelConfig, initialize
from zgcm_testing import run_ranks


def test_standard_deviations():
    config = ModelConfig(500, 128, 256, 8, 4, 2, 32)
    decoder = initialize(Decoder(config), 1)
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 0.02 / math.sqrt(16) if residual else 0.02
        assert parameter.std().item() == pytest.approx(std, rel=0.05), name


def test_the_seed_decides_and_each_parameter_differs(toy):
    first, again, other = (initialize(Decoder(toy), seed) for seed in (1, 1, 2))
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.dim() == 1 or not torch.equal(a, c)
    q0, q1 = (first.layers[i].attention.q_proj.weight for i in (0, 1))
    assert not torch.equal(q0, q1)


@pytest.mark.parametrize("world", [2, 3])
def test_same_weights_under_fsdp_from_meta(toy, world):
    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        with torch.device("meta"):
            decoder = Decoder(toy)
        for block in decoder.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(decoder, mesh=mesh)
        initialize(decoder.to_empty(device="cpu"), 4)
        full = {name: p.full_tensor() for name, p in decoder.named_parameters()}
        dist.barrier()
        return full

    expected = dict(initialize(Decoder(toy), 4).named_parameters())
    for full in run_ranks(rank_main, world):
        assert full.keys() == expected.keys()
        assert all(torch.equal(full[name], expected[name]) for name in expected)


def test_meta_parameters_are_refused(toy):
    with torch.device("meta"):
        decoder = Decoder(toy)
    with pytest.raises(ValueError, match=r"embed_tokens.weight is on the meta device; call"):
        initialize(decoder, 0)
