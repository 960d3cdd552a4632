"""The schedule of amaxes and scales (cases T8 to T12), and the rounding itself."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from zgcm_model import Decoder, initialize, precision, save_pretrained
from zgcm_model.precision import DelayedScaling
from zgcm_model.precision.roles import projections
from zgcm_model.precision.scaling import SCALE_LIMIT, ScalingState, amax, quantize
from zgcm_testing import run_ranks

RECIPE = DelayedScaling(amax_history_len=4)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def fp8(config, recipe=RECIPE, seed=3, **options):
    with torch.device("meta"):
        decoder = Decoder(config)
    precision.apply(decoder, recipe, **options)
    return initialize(decoder.to_empty(device="cpu"), seed)


def batch(seed=0, rows=2, time=12):
    return torch.randint(0, 97, (rows, time + 1), generator=torch.Generator().manual_seed(seed))


def loss_of(decoder, ids):
    total, count = decoder.lm_terms(decoder(ids[:, :-1]), ids[:, 1:], torch.ones_like(ids[:, 1:]) > 0)
    return total / count


def step(decoder, optimizer, *batches, group=None):
    losses = [loss_of(decoder, ids) for ids in batches]
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach() for loss in losses], precision.update_scales(decoder, group)


def scales(decoder):
    state = precision.scaling_state(decoder)
    return {name: value.clone() for name, value in state.named_buffers()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def one_tensor(recipe=RECIPE, tensors=1):
    state = ScalingState(recipe, "reference")
    slots = [state.add(f"t{index}", E4M3) for index in range(tensors)]
    state.allocate(torch.device("cpu"))
    return state, slots


def feed(state, slot, *amaxes, group=None):
    for value in amaxes:
        state.record(slot, amax(torch.tensor([value])))
        report = state.update(group)
    return report


# --- Rounding -----------------------------------------------------------------------------------------------------


def nearest(values, dtype):
    """Round by looking among all finite values of a format: nearest, ties to the even bit pattern."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    real = codes.double()
    keep = real.isfinite() & ~((real == 0) & (torch.arange(256) > 127))
    table, patterns = real[keep], torch.arange(256)[keep]
    table, order = table.sort()
    patterns = patterns[order]
    wide = values.double().clamp(table[0], table[-1])
    above = torch.searchsorted(table, wide).clamp(1, len(table) - 1)
    low, high = wide - table[above - 1], table[above] - wide
    up = (high < low) | ((high == low) & (patterns[above] % 2 == 0))
    return torch.where(up, table[above], table[above - 1]).float()


def adversarial(dtype):
    limit, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    powers = torch.tensor([2.0**e for e in range(-20, 20)])
    edges = torch.tensor([limit, 448.0, 57344.0, tiny, tiny / 2, tiny * 1.5, torch.finfo(dtype).tiny, 0.0])
    near = torch.cat([edges, powers])
    grown = [near * (1 + delta) for delta in (0, 2**-3, 2**-4, 2**-23, -(2**-23), 2**-2, -(2**-5))]
    values = torch.cat(grown)
    return torch.cat([values, -values])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantized_values_are_torch_casts_bit_for_bit_and_the_nearest_ones(dtype):
    limit = torch.finfo(dtype).max
    values = torch.cat([adversarial(dtype), torch.randn(20_000) * 100, torch.randn(20_000) * 2**-9])
    scale = torch.tensor(1.0)
    got = quantize(values, scale, dtype)
    assert got.dtype == dtype
    assert torch.equal(got.view(torch.uint8), values.clamp(-limit, limit).to(dtype).view(torch.uint8))
    assert torch.equal(got.float(), nearest(values, dtype))
    scaled = quantize(values, torch.tensor(0.37), dtype)
    assert torch.equal(scaled.float(), nearest(values * torch.tensor(0.37), dtype))


@pytest.mark.parametrize(("dtype", "limit"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_values_beyond_the_format_saturate(dtype, limit):
    values = torch.tensor([limit, limit * 1.01, 1e30, torch.inf, -torch.inf, -limit * 2])
    want = torch.tensor([1, 1, 1, 1, -1, -1]) * limit
    assert torch.equal(quantize(values, torch.tensor(1.0), dtype).float(), want)
    assert quantize(torch.tensor([torch.nan]), torch.tensor(1.0), dtype).float().isnan().all()


# --- Scales -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 3])
def test_scales_follow_the_window_of_amaxes(compute, margin):
    recipe = DelayedScaling(amax_history_len=3, amax_compute=compute, margin=margin)
    state, (slot,) = one_tensor(recipe)
    seen = [4.0, 1.0, 2.0, 0.5, 0.25, 8.0]
    for count, value in enumerate(seen, 1):
        feed(state, slot, value)
        window = seen[max(0, count - 3) : count]
        largest = max(window) if compute == "max" else window[-1]
        assert state.scale.item() == pytest.approx(448 / largest / 2**margin, rel=1e-6)
        assert state.scale_inv.item() == pytest.approx(1 / state.scale.item(), rel=1e-6)
        assert state.cursor.item() == count % 3


def test_t10_zero_keeps_the_scale_tiny_stays_finite_nan_is_flagged():
    state, (slot,) = one_tensor(DelayedScaling(amax_history_len=1))
    feed(state, slot, 2.0)
    before = state.scale.clone()
    report = feed(state, slot, 0.0)
    assert report.rolled == ("t0",)
    assert torch.equal(state.scale, before)
    feed(state, slot, 1e-40)
    assert state.scale.item() == SCALE_LIMIT
    assert 0 < state.scale_inv.item() < math.inf
    assert torch.finfo(torch.float32).tiny <= state.scale_inv.item()
    feed(state, slot, 3e38)
    assert state.scale.item() > 0
    assert state.scale_inv.isfinite().all()
    held = {name: value.clone() for name, value in state.named_buffers()}
    for wrong in (torch.nan, torch.inf, -torch.inf):
        report = feed(state, slot, wrong)
        assert report.flagged == ("t0",)
        assert report.rolled == ()
        assert_same(dict(state.named_buffers()), held)


def test_t10_a_nonfinite_tensor_of_a_model_is_named(toy):
    decoder = fp8(toy)
    with torch.no_grad():
        decoder.layers[2].feed_forward.down_proj.weight[0, 0] = torch.nan
    before = scales(decoder)
    with torch.no_grad():
        decoder.layers[6].attention.o_proj.weight[3, 1] = torch.inf
    loss_of(decoder, batch()).backward()
    report = precision.update_scales(decoder)
    assert "layers.2.feed_forward.down_proj.weight" in report.flagged
    assert "layers.6.attention.o_proj.weight" in report.flagged
    assert "layers.0.attention.input" not in report.flagged
    names = precision.scaling_state(decoder).names
    for name in report.flagged:
        index = names.index(name)
        after = scales(decoder)
        assert after["scale"][index] == before["scale"][index]
        assert after["cursor"][index] == 0
    assert all(value.isfinite().all() for value in scales(decoder).values())


def test_t11_amaxes_are_reduced_over_the_group_in_one_collective():
    calls = []

    def rank_main(rank, world):
        state, slots = one_tensor(tensors=5)
        real = dist.all_reduce
        dist.all_reduce = lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs))[1]
        try:
            for slot in slots:
                state.record(slot, amax(torch.tensor([1.0, 8.0][rank])))
            state.update(dist.group.WORLD)
        finally:
            dist.all_reduce = real
        return len(calls), state.amax_history[0], state.scale

    for collectives, history, scale in run_ranks(rank_main, 2):
        assert collectives == 1
        assert torch.equal(history, torch.full((5,), 8.0))
        assert torch.equal(scale, torch.full((5,), 448 / 8.0))


def test_t11_without_reduction_ranks_differ_and_each_state_is_kept(tmp_path):
    def rank_main(rank, world):
        state, (slot,) = one_tensor()
        feed(state, slot, [1.0, 8.0][rank])
        torch.distributed.checkpoint.save(
            {f"{rank}.{name}": value for name, value in state.state_dict().items()}, checkpoint_id=tmp_path
        )
        fresh, _ = one_tensor()
        target = {f"{rank}.{name}": value for name, value in fresh.state_dict().items()}
        torch.distributed.checkpoint.load(target, checkpoint_id=tmp_path)
        assert_same(fresh.state_dict(), state.state_dict())
        return fresh.scale

    import torch.distributed.checkpoint

    assert [scale.item() for scale in run_ranks(rank_main, 2)] == [448.0, 56.0]


def test_a_rank_that_saw_nothing_follows_the_others():
    def rank_main(rank, world):
        state, (slot, _) = one_tensor(tensors=2)
        if rank == 1:
            state.record(slot, amax(torch.tensor([2.0])))
        report = state.update(dist.group.WORLD)
        return report.rolled, state.scale, state.cursor

    for rolled, scale, cursor in run_ranks(rank_main, 2):
        assert rolled == ("t0",)
        assert scale.tolist() == [224.0, 1.0]
        assert cursor.tolist() == [1, 0]


# --- The schedule of a model ----------------------------------------------------------------------------------------


def test_t8_one_roll_for_each_step_whatever_the_micro_batches(toy):
    decoder = fp8(toy)
    optimizer = torch.optim.SGD(decoder.parameters(), 0.1)
    state = precision.scaling_state(decoder)
    for index in range(1, 4):
        before = scales(decoder)
        for micro in range(3):
            loss_of(decoder, batch(seed=10 * index + micro)).backward()
            now = scales(decoder)
            # All micro-batches of a step use the same scales.
            assert_same(
                {k: now[k] for k in before if k != "pending"},
                {k: before[k] for k in before if k != "pending"},
            )
        optimizer.step()
        optimizer.zero_grad()
        report = precision.update_scales(decoder)
        assert report.rolled == tuple(state.names)
        assert state.cursor.tolist() == [index % 4] * len(state.names)


def test_t8_the_amax_is_that_of_all_micro_batches(toy):
    seen = {}

    def watch(name, values, rounded, scale):
        seen[name] = max(seen.get(name, 0.0), values.abs().max().item())

    decoder = fp8(toy)
    state = precision.scaling_state(decoder)
    state.observer = watch
    for seed in range(3):
        loss_of(decoder, batch(seed)).backward()
    precision.update_scales(decoder)
    assert sorted(seen) == sorted(state.names)
    for name, value in seen.items():
        assert state.amax_history[0, state.names.index(name)].item() == value, name


def losses_of_a_run(decoder, *, evaluate=False, steps=4):
    optimizer = torch.optim.SGD(decoder.parameters(), 0.3)
    losses = []
    for index in range(steps):
        if evaluate:
            decoder.eval()
            with torch.no_grad():
                loss_of(decoder, batch(seed=500) * 0 + 5)
            loss_of(decoder, batch(seed=501))  # evaluation that forgets no_grad
            decoder.train()
            with torch.no_grad():
                loss_of(decoder, batch(seed=502))
        got, _ = step(decoder, optimizer, *(batch(seed=10 * index + micro) for micro in range(3)))
        losses += got
    return losses, scales(decoder), {n: p.detach().clone() for n, p in decoder.named_parameters()}


def recompute(decoder, reentrant=False):
    import functools

    for block in decoder.layers:
        again = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
        object.__setattr__(block, "forward", again)
    return decoder


def assert_same_run(left, right):
    assert all(torch.equal(a, b) for a, b in zip(left[0], right[0], strict=True))
    assert_same(left[1], right[1])
    assert_same(left[2], right[2])


def test_t8_evaluation_every_step_changes_nothing(toy):
    assert_same_run(losses_of_a_run(fp8(toy), evaluate=True), losses_of_a_run(fp8(toy)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_t8_recomputation_counts_once_and_changes_nothing(toy, reentrant):
    assert_same_run(losses_of_a_run(recompute(fp8(toy), reentrant)), losses_of_a_run(fp8(toy)))


def test_t8_a_module_that_did_not_run_does_not_roll(toy):
    decoder = fp8(toy)
    loss_of(decoder, batch()).backward()
    precision.update_scales(decoder)
    before = scales(decoder)
    block = decoder.layers[3]
    decoder.layers[3] = _Skip()
    loss_of(decoder, batch(1)).backward()
    report = precision.update_scales(decoder)
    decoder.layers[3] = block
    state, after = precision.scaling_state(decoder), scales(decoder)
    for index, name in enumerate(state.names):
        idle = name.startswith("layers.3.")
        assert (name in report.rolled) != idle
        assert after["cursor"][index] == (1 if idle else 2)
        if idle:
            assert after["scale"][index] == before["scale"][index]


class _Skip(nn.Module):
    def forward(self, hidden, *others):
        return hidden


def test_t8_a_step_without_training_rolls_nothing(toy):
    decoder = fp8(toy)
    with torch.no_grad():
        loss_of(decoder, batch())
    decoder.eval()
    loss_of(decoder, batch()).backward()
    before = scales(decoder)
    assert precision.update_scales(decoder).rolled == ()
    assert_same(scales(decoder), before)


def test_scales_that_change_between_forward_and_backward_are_an_error(toy):
    decoder = fp8(toy)
    loss = loss_of(decoder, batch())
    precision.update_scales(decoder)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- Checkpoints ----------------------------------------------------------------------------------------------------


def test_t9_the_step_after_resume_is_bitwise_the_uninterrupted_one(toy, tmp_path):
    def make():
        decoder = fp8(toy)
        return decoder, torch.optim.SGD(decoder.parameters(), 0.3, momentum=0.9)

    decoder, optimizer = make()
    for index in range(5):
        step(decoder, optimizer, batch(index), batch(index + 50))
    torch.save({"model": decoder.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "five.pt")
    saved = scales(decoder)
    want, _ = step(decoder, optimizer, batch(5), batch(55))
    final, weights = scales(decoder), dict(decoder.named_parameters())

    resumed, optimizer = make()
    initialize(resumed, 99)
    loss_of(resumed, batch(7)).backward()  # leaves caches behind that must not be used
    resumed.zero_grad()
    precision.scaling_state(resumed).reset_state()
    stored = torch.load(tmp_path / "five.pt")
    resumed.load_state_dict(stored["model"])
    optimizer.load_state_dict(stored["optimizer"])
    assert_same(scales(resumed), saved)
    got, _ = step(resumed, optimizer, batch(5), batch(55))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert_same(scales(resumed), final)
    assert_same(dict(resumed.named_parameters()), weights)


def test_t9_a_switch_of_precision_must_be_asked_for(toy):
    plain, scaled = initialize(Decoder(toy), 3), fp8(toy)
    assert precision.find_switch(scaled.state_dict(), scaled) == "none"
    assert precision.require_same_precision(plain.state_dict(), plain) == "none"
    for saved, decoder, kind, words in (
        (plain, scaled, "to_fp8", "made in BF16"),
        (scaled, plain, "from_fp8", "made in FP8"),
    ):
        with pytest.raises(RuntimeError, match=r"scaling\.scale"):
            decoder.load_state_dict(saved.state_dict())
        with pytest.raises(ValueError, match=words):
            precision.require_same_precision(saved.state_dict(), decoder)
        assert precision.require_same_precision(saved.state_dict(), decoder, allow_switch=True) == kind
        kept = {k: v for k, v in saved.state_dict().items() if not precision.is_state_name(k)}
        decoder.load_state_dict(kept, strict=False)
    own = {name for name in scaled.state_dict() if precision.is_state_name(name)}
    assert own == {f"scaling.{name}" for name in ("amax_history", "scale", "scale_inv", "cursor")}


def test_names_and_files_are_those_of_the_high_precision_model(toy, tmp_path):
    plain, scaled = initialize(Decoder(toy), 3), fp8(toy)
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in scaled.named_parameters()]
    for folder, decoder in (("plain", plain), ("scaled", scaled)):
        save_pretrained(decoder, tmp_path / folder)
    first, second = (tmp_path / f / "model.safetensors" for f in ("plain", "scaled"))
    assert first.read_bytes() == second.read_bytes()


def test_m7_scales_are_filled_after_a_build_on_meta(toy):
    with torch.device("meta"):
        decoder = precision.apply(Decoder(toy), RECIPE)
    decoder.to_empty(device="cpu")
    state = precision.scaling_state(decoder)
    for buffer in state.buffers():
        buffer.fill_(113)
    initialize(decoder, 3)
    direct = initialize(precision.apply(Decoder(toy), RECIPE), 3)
    assert_same(scales(decoder), scales(direct))
    assert torch.equal(loss_of(decoder, batch()), loss_of(direct, batch()))


def test_moving_a_decoder_to_bfloat16_leaves_the_scales_in_float32(toy):
    decoder = fp8(toy)
    step(decoder, torch.optim.SGD(decoder.parameters(), 0.1), batch())
    before = scales(decoder)
    decoder.to(torch.bfloat16)
    assert decoder.layers[0].attention.q_proj.weight.dtype == torch.bfloat16
    assert_same(scales(decoder), before)
    loss_of(decoder, batch()).backward()
    assert decoder.layers[0].attention.q_proj.weight.grad.dtype == torch.bfloat16


# --- Weights --------------------------------------------------------------------------------------------------------


def change_in_place(weight):
    with torch.no_grad():
        weight.mul_(-1.5)


def change_the_data(weight):
    weight.data.mul_(-1.5)


def load_another(decoder):
    other = initialize(copy.deepcopy(decoder), 77)
    decoder.load_state_dict(other.state_dict())


@pytest.mark.parametrize("change", [change_in_place, change_the_data])
def test_t12_the_first_micro_batch_sees_changed_weights(toy, change):
    decoder = fp8(toy)
    loss_of(decoder, batch()).backward()
    loss_of(decoder, batch(1)).backward()
    for projection in projections(decoder):
        change(projection.module.weight)
    precision.update_scales(decoder)
    got = loss_of(decoder, batch(2))
    fresh = fp8(toy, seed=8)
    fresh.load_state_dict(decoder.state_dict())
    assert torch.equal(got, loss_of(fresh, batch(2)))


def test_t12_within_a_step_too_and_after_loading_or_replacing(toy):
    decoder, fresh = fp8(toy), fp8(toy, seed=8)
    for change in (
        lambda: change_in_place(decoder.layers[1].attention.v_proj.weight),
        lambda: load_another(decoder),
        lambda: setattr(decoder.layers[0].attention.q_proj, "weight", nn.Parameter(torch.randn(64, 32))),
    ):
        loss_of(decoder, batch())
        change()
        fresh.load_state_dict(decoder.state_dict())
        assert torch.equal(loss_of(decoder, batch()), loss_of(fresh, batch()))


def test_t12_weights_are_quantized_once_for_each_step(toy):
    decoder = fp8(toy)
    counts = {}
    precision.scaling_state(decoder).observer = lambda name, *_: counts.update(
        {name: counts.get(name, 0) + 1}
    )
    for seed in range(3):
        loss_of(decoder, batch(seed)).backward()
    weights = {name: n for name, n in counts.items() if name.endswith("weight")}
    assert len(weights) == len(projections(decoder))
    assert set(weights.values()) == {1}
    assert set(counts.values()) == {1, 3}
    # The four inputs of a layer, not one for each of its eight projections.
    assert sum(name.endswith("input") for name in counts) == 4 * toy.num_layers


def test_t12_evaluation_between_steps_does_not_hide_the_amax_of_a_weight(toy):
    decoder = fp8(toy)
    with torch.no_grad():
        loss_of(decoder, batch())
    loss_of(decoder, batch()).backward()
    assert len(precision.update_scales(decoder).rolled) == len(precision.scaling_state(decoder).names)
