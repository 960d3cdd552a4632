"""The Transformer Engine backend against a stand-in (``zgcm_testing.te_stand_in``), which is not Transformer Engine.

It shows that this package asks for the right things and that scales, steps and checkpoints are those of the other
backends; how Transformer Engine's kernels compute is not tested here.
"""

import copy
import functools
import inspect

import pytest
import torch
import torch._dynamo  # once here, or every forked rank imports it again
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from zgcm_model import Decoder, ModelConfig, initialize, load_pretrained, precision, save_pretrained
from zgcm_model.parallel import apply_tensor_parallel
from zgcm_model.precision import DelayedScaling, HighPrecision
from zgcm_testing import run_ranks, te_stand_in

CONFIG = ModelConfig(97, 32, 48, 2, 4, 2, 16, window=4, global_every=2, max_positions=64)
RECIPE = DelayedScaling(amax_history_len=3)
IDS = torch.arange(26).reshape(2, 13)
BACKENDS = ("reference", "scaled_mm", "transformer_engine")


def build(backend="transformer_engine", recipe=RECIPE, **options):
    with torch.device("meta"):
        decoder = Decoder(CONFIG)
    precision.apply(decoder, recipe, backend=backend, **options)
    return initialize(decoder.to_empty(device="cpu"), 3)


def loss_of(decoder, ids):
    total, count = decoder.lm_terms(decoder(ids[:, :-1]), ids[:, 1:], torch.ones_like(ids[:, 1:]) > 0)
    return total / count


def recompute(decoder):
    for block in decoder.layers:
        again = functools.partial(checkpoint, block.forward, use_reentrant=False)
        object.__setattr__(block, "forward", again)
    return decoder


def train(decoder, steps, micro_batches=3):
    """Make updates of several micro-batches, with an evaluation before and after each."""
    losses = []
    for step in steps:
        for number in range(micro_batches):
            loss = loss_of(decoder, (IDS * (number + 2) + step) % 97)
            loss.backward()
            losses.append(loss.detach())
        decoder.eval()
        with torch.no_grad():
            loss_of(decoder, (IDS * 7) % 97)
        decoder.train()
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        precision.update_scales(decoder)
    return torch.stack(losses)


def scales(decoder):
    return {name: t.clone() for name, t in decoder.state_dict().items() if precision.is_state_name(name)}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("older", [False, True])
def test_every_projection_runs_with_the_recipe(monkeypatch, older):
    te_stand_in.install(monkeypatch, older=older)
    decoder = build(
        recipe=DelayedScaling(format="e4m3", margin=2), high_precision=HighPrecision(layers={"down": (-1,)})
    )
    loss_of(decoder, IDS).backward()
    found = [module for module in decoder.modules() if isinstance(module, te_stand_in.Linear)]
    assert len(found) == 14  # seven projections, a gate in one of two layers, one kept back
    asked = {id(module.fp8_meta["recipe"]): module.fp8_meta["recipe"] for module in found}
    (recipe,) = asked.values()
    assert (recipe.margin, recipe.fp8_format, recipe.reduce_amax) == (2, te_stand_in.Format.E4M3, False)
    assert type(decoder.layers[1].feed_forward.down_proj) is nn.Linear
    assert te_stand_in.FP8GlobalStateManager.depth == 0
    report = precision.update_scales(decoder)
    assert set(report.rolled) == set(precision.scaling_state(decoder).names)
    rows = {(row.role, row.layers): row.format for row in precision.describe(decoder)}
    assert rows["down", "0"] == "FP8 E4M3 (transformer_engine)"
    assert rows["down", "1"] == "high precision"


@pytest.mark.parametrize("older", [False, True])
def test_steps_and_scales_are_those_of_reference(monkeypatch, older):
    te_stand_in.install(monkeypatch, older=older)
    decoder, other = recompute(build()), build("reference")
    torch.testing.assert_close(train(decoder, range(5)), train(other, range(5)), rtol=0, atol=0)
    assert_same(scales(decoder), scales(other))
    # No walk over all modules: neither at the end of a region nor in a backward pass.
    assert te_stand_in.ROLLS == []


def test_a_region_of_the_user_does_not_lose_amaxes(monkeypatch):
    te_stand_in.install(monkeypatch)
    decoder, other = build(), build("reference")
    import transformer_engine.pytorch as te

    state = precision.scaling_state(decoder)
    for number in range(4):
        with te.autocast(recipe=state._region._recipe):
            loss_of(decoder, (IDS * (number + 2)) % 97).backward()
        loss_of(other, (IDS * (number + 2)) % 97).backward()
    assert "forward" in te_stand_in.ROLLS
    for model in (decoder, other):
        precision.update_scales(model)
    assert_same(scales(decoder), scales(other))


def test_the_region_is_closed_after_an_error(monkeypatch):
    te_stand_in.install(monkeypatch)
    decoder = build()
    with pytest.raises(RuntimeError):
        decoder.layers[0].attention.q_proj(torch.zeros(2, 5))
    assert te_stand_in.FP8GlobalStateManager.depth == 0


def test_a_module_that_did_not_run_keeps_its_state(monkeypatch):
    te_stand_in.install(monkeypatch)
    decoder = build()
    train(decoder, [0])
    before = scales(decoder)
    decoder.layers[0].feed_forward(torch.randn(1, 16, 32)).sum().backward()
    report = precision.update_scales(decoder)
    names = precision.scaling_state(decoder).names
    assert report.rolled == tuple(name for name in names if name.startswith("layers.0.feed_forward"))
    second = torch.tensor([name not in report.rolled for name in names])
    after = scales(decoder)
    assert torch.equal(after["scaling.cursor"][second], before["scaling.cursor"][second])
    assert torch.equal(after["scaling.amax_history"][:, second], before["scaling.amax_history"][:, second])
    assert (after["scaling.cursor"][~second] != before["scaling.cursor"][~second]).all()


def test_infinity_is_flagged_and_changes_nothing(monkeypatch):
    te_stand_in.install(monkeypatch)
    decoder = build()
    train(decoder, [0])
    before = scales(decoder)
    decoder.layers[0].attention.q_proj(torch.full((2, 32), torch.inf))
    report = precision.update_scales(decoder)
    assert report.flagged == ("layers.0.attention.input",)
    column = precision.scaling_state(decoder).names.index("layers.0.attention.input")
    assert torch.equal(scales(decoder)["scaling.scale"][column], before["scaling.scale"][column])


@pytest.mark.parametrize("source", BACKENDS)
@pytest.mark.parametrize("target", BACKENDS)
def test_t9_checkpoints_cross_between_backends(monkeypatch, source, target):
    te_stand_in.install(monkeypatch)
    first = build(source)
    train(first, range(3))
    saved = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    second, third = build(target), build(target)
    train(third, range(2))  # one that has run: what Transformer Engine holds must give way
    for decoder in (second, third):
        decoder.load_state_dict(saved, strict=True)
    wanted = train(first, [3])
    for decoder in (second, third):
        torch.testing.assert_close(train(decoder, [3]), wanted, rtol=0 if source == target else 1e-5, atol=0)
        found, want = scales(decoder), scales(first)
        for name in want:
            exact = 0 if source == target else 1e-5
            torch.testing.assert_close(found[name], want[name], rtol=exact, atol=0)


def test_its_own_extra_state_is_not_stored(monkeypatch):
    te_stand_in.install(monkeypatch)
    decoder = build()
    train(decoder, [0])
    assert list(decoder.state_dict()) == list(build("reference").state_dict())


def test_a_copy_goes_on_like_the_original(monkeypatch):
    te_stand_in.install(monkeypatch)
    decoder = build()
    train(decoder, range(2))
    twin = copy.deepcopy(decoder)
    torch.testing.assert_close(train(twin, [2]), train(decoder, [2]), rtol=0, atol=0)
    assert_same(scales(twin), scales(decoder))


def test_t11_amaxes_are_reduced_over_the_group(monkeypatch):
    te_stand_in.install(monkeypatch)

    def rank_main(rank, world):
        decoder = build()
        for block in decoder.blocks():
            block.attention.q_proj(torch.full((2, 32), 8.0 if rank else 1.0))
        group = torch.distributed.group.WORLD
        precision.update_scales(decoder, group)
        together = scales(decoder)
        for block in decoder.blocks():
            block.attention.q_proj(torch.full((2, 32), 64.0 if rank else 32.0))
        precision.update_scales(decoder)
        return together, scales(decoder)

    (first, alone), (second, apart) = run_ranks(rank_main, 2)
    assert_same(first, second)
    assert first["scaling.amax_history"][0].max() == 8
    assert not torch.equal(alone["scaling.scale"], apart["scaling.scale"])


@pytest.mark.compiles
def test_compiled_layers_compute_the_same(monkeypatch):
    te_stand_in.install(monkeypatch)
    decoder, other = build(), build()
    for block in decoder.blocks():
        object.__setattr__(block, "forward", torch.compile(block.forward, backend="eager"))
    torch.testing.assert_close(train(decoder, range(2)), train(other, range(2)), rtol=0, atol=0)
    assert_same(scales(decoder), scales(other))


def test_the_watch_reads_amaxes(monkeypatch):
    te_stand_in.install(monkeypatch)
    decoder, other = build(), build("reference")
    found = []
    for model in (decoder, other):
        with precision.NumericsWatch(model, every=1).sample(1) as sample:
            loss_of(model, IDS).backward()
        found.append({r["name"]: r["amax"] for r in sample.records() if r["kind"] == "fp8"})
        precision.update_scales(model)
    assert found[0] == found[1]
    assert_same(scales(decoder), scales(other))


def test_parameters_and_files_are_those_of_the_other_backends(monkeypatch, tmp_path):
    te_stand_in.install(monkeypatch)
    decoder, other = build(), build("reference")
    want = dict(other.named_parameters())
    assert {n: p.shape for n, p in decoder.named_parameters()} == {n: p.shape for n, p in want.items()}
    save_pretrained(decoder, tmp_path)
    assert all(torch.equal(p, want[n]) for n, p in load_pretrained(tmp_path).named_parameters())


def test_under_tensor_parallelism_and_fsdp(monkeypatch):
    te_stand_in.install(monkeypatch)

    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        with torch.device("meta"):
            decoder = Decoder(CONFIG)
        precision.apply(decoder, RECIPE, backend="transformer_engine")
        apply_tensor_parallel(decoder, mesh["tp"], sequence_parallel=False)
        for module in (*decoder.layers, decoder):
            fully_shard(module, mesh=mesh["dp"])
        initialize(decoder.to_empty(device="cpu"), 3)
        loss_of(decoder, IDS).backward()
        precision.update_scales(decoder, torch.distributed.group.WORLD)
        return scales(decoder)

    other = build("reference")
    loss_of(other, IDS).backward()
    precision.update_scales(other)
    for got in run_ranks(rank_main, 2):
        for name, tensor in scales(other).items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-2, atol=1e-6)


def test_what_transformer_engine_cannot_do_is_refused(monkeypatch):
    with pytest.raises(ImportError, match=r'pip install "zgcm-model\[te\]"'):
        precision.apply(Decoder(CONFIG), DelayedScaling(), backend="transformer_engine")
    te_stand_in.install(monkeypatch)
    odd = ModelConfig(97, 32, 40, 2, 4, 2, 16, window=4, max_positions=64)
    with pytest.raises(
        ValueError, match=r"feed_forward.gate_proj has a weight of \[40, 32\].*multiples of 16"
    ):
        precision.apply(Decoder(odd), DelayedScaling(), backend="transformer_engine")
    with pytest.raises(ValueError, match="quantizes weights itself"):
        precision.gather_in_fp8(build())


# Parameter names in Transformer Engine's source at tags v2.0, v2.8, v2.9, v2.14.1 and v2.18; where versions differ,
# those that all have. Files: common/recipe/__init__.py; pytorch/fp8.py (2.0 to 2.8), pytorch/quantization.py (2.9 on);
# pytorch/module/linear.py; pytorch/module/base.py.
PUBLISHED = {
    te_stand_in.DelayedScaling: (
        "margin fp8_format amax_history_len amax_compute_algo scaling_factor_compute_algo reduce_amax fp8_dpa fp8_mha"
    ),
    te_stand_in.autocast: "enabled calibrating recipe amax_reduction_group",
    te_stand_in.fp8_autocast: "enabled calibrating fp8_recipe fp8_group",
    te_stand_in.Linear: (
        "in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker "
        "rng_tracker_name init_method bias return_bias params_dtype parallel_mode parameters_split device"
    ),
    te_stand_in.Linear.forward: "self inp is_first_microbatch fp8_output",
    te_stand_in.Linear.init_fp8_metadata: "self num_gemms",
}


@pytest.mark.parametrize("ours", PUBLISHED)
def test_the_stand_in_takes_nothing_that_is_not_published(ours):
    assert set(inspect.signature(ours).parameters) <= set(PUBLISHED[ours].split())


def test_the_scale_rule_has_the_published_signature(monkeypatch):
    te_stand_in.install(monkeypatch)
    recipe = precision.scaling_state(build())._region._recipe
    # v2.0 to v2.18, common/recipe: scaling_factor_compute(amax, old_scaling_factor, fp8_max, recipe), by position.
    assert len(inspect.signature(recipe.scaling_factor_compute_algo).parameters) == 4
    assert len(inspect.signature(recipe.amax_compute_algo).parameters) == 1
