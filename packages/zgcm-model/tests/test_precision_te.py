"""The Transformer Engine backend against a stand-in.

STAND-IN, not Transformer Engine: modules with the published signatures of Transformer Engine 2.x (``Linear``,
``autocast`` and its older name ``fp8_autocast``, ``recipe.DelayedScaling``, ``recipe.Format``) that refuse other
arguments and note what they are called with. It shows that this package asks for the right things; how Transformer
Engine computes is not tested here.
"""

import enum
import functools
import sys
import types

import pytest
import torch
import torch._dynamo  # once here, or every forked rank imports it again
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from zgcm_model import Decoder, ModelConfig, initialize, load_pretrained, precision, save_pretrained
from zgcm_model.parallel import apply_tensor_parallel
from zgcm_model.precision import DelayedScaling, HighPrecision
from zgcm_testing import run_ranks

CONFIG = ModelConfig(97, 32, 48, 2, 4, 2, 16, window=4, global_every=2, max_positions=64)


class Format(enum.Enum):
    E4M3 = 1
    HYBRID = 2


class StandInRecipe:
    def __init__(self, margin=0, fp8_format=Format.HYBRID, amax_history_len=1024, amax_compute_algo="max"):
        self.settings = (margin, fp8_format, amax_history_len, amax_compute_algo)


class StandInRegion:
    """A region that knows the recipe of everything computed inside."""

    open = []

    def __init__(self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None):
        assert enabled
        self.recipe = recipe

    def __enter__(self):
        self.open.append(self.recipe)
        return self

    def __exit__(self, *error):
        self.open.pop()


class StandInLinear(nn.Module):
    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda"):
        super().__init__()
        assert not bias
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        self.seen = []

    def forward(self, inp, is_first_microbatch=None):
        assert isinstance(inp, torch.Tensor)
        self.seen.append(StandInRegion.open[-1].settings)
        return F.linear(inp, self.weight)


def install(monkeypatch, *, older=False):
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common")
    top, torch_part, common = (types.ModuleType(name) for name in names)
    recipe = types.ModuleType("transformer_engine.common.recipe")
    recipe.Format, recipe.DelayedScaling = Format, StandInRecipe
    torch_part.Linear = StandInLinear
    if older:
        torch_part.fp8_autocast = lambda enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None: (
            StandInRegion(enabled, calibrating, fp8_recipe, fp8_group)
        )
    else:
        torch_part.autocast = StandInRegion
    top.pytorch, top.common, common.recipe = torch_part, common, recipe
    for module in (top, torch_part, common, recipe):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def te_decoder(recipe=None, **options):
    with torch.device("meta"):
        decoder = Decoder(CONFIG)
    precision.apply(decoder, recipe or DelayedScaling(), backend="transformer_engine", **options)
    return initialize(decoder.to_empty(device="cpu"), 3)


def loss_of(decoder, ids):
    total, count = decoder.lm_terms(decoder(ids[:, :-1]), ids[:, 1:], torch.ones_like(ids[:, 1:]) > 0)
    return total / count


IDS = torch.arange(26).reshape(2, 13)


@pytest.mark.parametrize("older", [False, True])
def test_every_projection_runs_once_inside_a_region_with_the_recipe(monkeypatch, older):
    install(monkeypatch, older=older)
    recipe = DelayedScaling(format="e4m3", amax_history_len=7, amax_compute="most_recent", margin=2)
    decoder = te_decoder(recipe, high_precision=HighPrecision(layers={"down": (-1,)}))
    loss = loss_of(decoder, IDS)
    loss.backward()
    found = [module for module in decoder.modules() if isinstance(module, StandInLinear)]
    assert len(found) == 14  # seven projections, a gate in one of two layers, one kept back
    assert all(module.seen == [(2, Format.E4M3, 7, "most_recent")] for module in found)
    assert type(decoder.layers[1].feed_forward.down_proj) is nn.Linear
    assert StandInRegion.open == []
    assert torch.equal(loss, loss_of(initialize(Decoder(CONFIG), 3), IDS))
    report = precision.update_scales(decoder)
    assert report.flagged == report.rolled == ()
    rows = {(row.role, row.layers): row.format for row in precision.describe(decoder)}
    assert rows["down", "0"] == "FP8 E4M3 (transformer_engine)"
    assert rows["down", "1"] == "high precision"


def test_the_region_is_closed_after_an_error(monkeypatch):
    install(monkeypatch)
    decoder = te_decoder()
    with pytest.raises(ValueError, match="outside the vocabulary"):
        decoder(torch.full((1, 4), 1000))
    assert StandInRegion.open == []


def test_recomputation_outside_the_region_is_refused(monkeypatch):
    install(monkeypatch)
    decoder = te_decoder()
    for block in decoder.layers:
        again = functools.partial(checkpoint, block.forward, use_reentrant=False)
        object.__setattr__(block, "forward", again)
    loss = loss_of(decoder, IDS)
    with pytest.raises(ValueError, match="use neither recomputation nor pipeline stages"):
        loss.backward()
    with pytest.raises(ValueError, match="outside the decoder's forward pass"):
        decoder.layers[0].attention.q_proj(torch.zeros(2, 32))


def test_parameters_and_files_are_those_of_the_other_backends(monkeypatch, tmp_path):
    install(monkeypatch)
    decoder, other = te_decoder(), initialize(precision.apply(Decoder(CONFIG), DelayedScaling()), 3)
    want = dict(other.named_parameters())
    assert {n: p.shape for n, p in decoder.named_parameters()} == {n: p.shape for n, p in want.items()}
    save_pretrained(decoder, tmp_path)
    assert all(torch.equal(p, want[n]) for n, p in load_pretrained(tmp_path).named_parameters())


def test_under_tensor_parallelism_and_fsdp(monkeypatch):
    install(monkeypatch)

    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        with torch.device("meta"):
            decoder = Decoder(CONFIG)
        precision.apply(decoder, DelayedScaling(), backend="transformer_engine")
        apply_tensor_parallel(decoder, mesh["tp"], sequence_parallel=False)
        for module in (*decoder.layers, decoder):
            fully_shard(module, mesh=mesh["dp"])
        initialize(decoder.to_empty(device="cpu"), 3)
        loss = loss_of(decoder, IDS)
        loss.backward()
        return loss.detach()

    want = loss_of(initialize(Decoder(CONFIG), 3), IDS).detach()
    for got in run_ranks(rank_main, 2):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


def test_what_transformer_engine_cannot_do_is_refused(monkeypatch):
    with pytest.raises(ImportError, match=r'pip install "zgcm-model\[te\]"'):
        precision.apply(Decoder(CONFIG), DelayedScaling(), backend="transformer_engine")
    install(monkeypatch)
    odd = ModelConfig(97, 32, 40, 2, 4, 2, 16, window=4, max_positions=64)
    with pytest.raises(
        ValueError, match=r"feed_forward.gate_proj has a weight of \[40, 32\].*multiples of 16"
    ):
        precision.apply(Decoder(odd), DelayedScaling(), backend="transformer_engine")
    with pytest.raises(ValueError, match="keeps its scales to itself"):
        precision.gather_in_fp8(te_decoder())
