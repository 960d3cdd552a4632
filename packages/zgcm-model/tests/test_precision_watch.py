"""The numerics watch: its figures, its events, and that it changes nothing."""

import copy
import functools
import json

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from zgcm_model import Decoder, ModelConfig, initialize, precision
from zgcm_model.precision.watch import NumericsSample, NumericsWatch, kurtosis, rounds_past
from zgcm_testing import run_ranks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CONFIG = ModelConfig(97, 32, 48, 2, 4, 2, 16, window=4, global_every=2, max_positions=64)


def batch(rows=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 97, (rows, 13), generator=generator)


def fp8_decoder(backend="reference", config=CONFIG):
    decoder = precision.apply(Decoder(config), precision.DelayedScaling(), backend=backend)
    return initialize(decoder, 3).train()


def passes(decoder, ids):
    decoder.zero_grad()
    total, count = decoder.lm_terms(
        decoder(ids[:, :-1]), ids[:, 1:], torch.ones(len(ids), 12, dtype=torch.bool)
    )
    (total / count).backward()
    return [total.detach(), *(p.grad.clone() for p in decoder.parameters())]


def by_kind(records, kind):
    return {r["name"]: r for r in records if r["kind"] == kind}


def test_limits_are_those_of_rounding():
    for dtype in (E4M3, E5M2):
        edge = rounds_past(dtype)
        assert edge > torch.finfo(dtype).max
        grid = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        grid = grid[grid.isfinite() & (grid >= 0)].sort().values
        # The spacing at the top, once more above the largest value.
        assert edge == grid[-1] + (grid[-1] - grid[-2]) / 2


def test_saturated_and_flushed_shares_are_counted_by_element():
    values = torch.tensor([0.0, 1e-6, -1e-6, 1.0, -500.0, 463.0, 465.0, 448.0])
    scale = torch.tensor(1.0)
    rounded = values.clamp(-448, 448).to(E4M3)
    sample = NumericsSample(7, 0.2)
    sample.tensor("layers.1.attention.input", values, rounded, scale)
    tensor, event = sample.records()
    assert tensor == {
        "kind": "fp8",
        "step": 7,
        "name": "layers.1.attention.input",
        "layer": 1,
        "amax": 500.0,
        "format": "e4m3",
        "scale": 1.0,
        "saturated": 2 / 8,
        "flushed": 2 / 8,
        "elements": 8,
        "finite": True,
    }
    assert (event["kind"], event["event"], event["step"], event["layer"]) == ("event", "fp8_saturation", 7, 1)
    assert event["saturated"] == 0.25
    assert event["threshold"] == 0.2
    assert "25.00% of layers.1.attention.input" in event["message"]


def test_non_finite_values_are_flagged_and_stay_json():
    sample = NumericsSample(1, 0.5)
    values = torch.tensor([[1.0, torch.nan, torch.inf]])
    sample.tensor("layers.0.x", values, values.clamp(-448, 448).to(E4M3), torch.tensor(2.0))
    sample.block(0, values)
    tensor, block = sample.records()
    assert (tensor["amax"], tensor["finite"]) == (1.0, False)
    assert (block["kurtosis"], block["finite"], block["amax"]) == (None, False, None)
    json.dumps([tensor, block], allow_nan=False)


def test_kurtosis_is_the_textbook_one():
    sample = NumericsSample(1, 0.5)
    x = torch.randn(3, 50, 40, dtype=torch.float64) + 0.5
    x[0, 0, :5] = 30.0
    sample.block(4, x)
    centered = x.float().double() - x.float().double().mean()
    expected = (centered**4).mean() / (centered**2).mean() ** 2
    (record,) = sample.records()
    assert record["kurtosis"] == pytest.approx(float(expected), rel=1e-5)
    assert (record["kind"], record["layer"], record["elements"], record["amax"]) == ("block", 4, 6000, 30.0)
    assert kurtosis([4.0, 4.0, 4.0, 4.0, 4.0]) is None
    assert kurtosis([0.0] * 5) is None


@pytest.mark.parametrize("backend", ["none", "reference", "scaled_mm"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_watching_changes_no_bit(backend, recomputed):
    decoder = initialize(Decoder(CONFIG), 3).train() if backend == "none" else fp8_decoder(backend)
    if recomputed:
        for block in decoder.blocks():
            again = functools.partial(checkpoint, block.forward, use_reentrant=False)
            object.__setattr__(block, "forward", again)
    ids, watch = batch(), NumericsWatch(decoder, every=1)
    for step in (1, 2):
        state = copy.deepcopy(decoder.state_dict())
        expected = passes(decoder, ids)
        if backend != "none":
            pending = decoder.scaling.pending.clone()
            decoder.load_state_dict(state)
            decoder.scaling.pending.fill_(-1.0)
        with watch.sample(step) as sample:
            got = passes(decoder, ids)
        assert sample.records()
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        if backend != "none":
            assert torch.equal(decoder.scaling.pending, pending)
            precision.update_scales(decoder)
    assert not any(block._forward_hooks for block in decoder.blocks())


def test_every_fp8_tensor_and_every_layer_is_reported():
    decoder, ids = fp8_decoder(), batch()
    passes(decoder, ids)
    precision.update_scales(decoder)
    state = decoder.scaling
    with torch.no_grad():
        decoder.embed_tokens.weight.mul_(2)
    with NumericsWatch(decoder, every=5).sample(10) as sample:
        passes(decoder, ids)
    # The scales change after the sample and before its records are read.
    scales, pending = state.scale.clone(), state.pending.clone()
    precision.update_scales(decoder)
    records = sample.records()
    tensors, blocks = by_kind(records, "fp8"), by_kind(records, "block")
    assert set(tensors) == set(state.names)
    assert list(blocks) == ["layers.0", "layers.1"]
    for index, name in enumerate(state.names):
        record = tensors[name]
        assert record["scale"] == scales[index].item()
        assert record["amax"] == pytest.approx(pending[index].item(), rel=1e-6)
        assert record["format"] == ("e5m2" if name.endswith("gradient") else "e4m3")
        assert 0 <= record["saturated"] <= 1
        assert 0 <= record["flushed"] <= 1
    assert tensors["layers.1.feed_forward.input"]["elements"] == 2 * 12 * 32
    json.dumps(records, allow_nan=False)


def test_values_that_outgrow_their_scale_make_an_event():
    decoder, ids = fp8_decoder(), batch()
    passes(decoder, ids)
    precision.update_scales(decoder)
    with NumericsWatch(decoder, every=1).sample(1) as quiet:
        passes(decoder, ids)
    assert not by_kind(quiet.records(), "event")
    with torch.no_grad():
        decoder.layers[1].feed_forward.up_proj.weight.mul_(50)
    with NumericsWatch(decoder, every=1, saturation_threshold=0.01).sample(2) as loud:
        passes(decoder, ids)
    events = by_kind(loud.records(), "event")
    assert "layers.1.feed_forward.up_proj.weight" in events
    assert "layers.1.feed_forward.down_proj.input" in events
    assert all(e["saturated"] > 0.01 for e in events.values())


def test_steps_that_are_not_due_see_and_touch_nothing():
    decoder, ids = fp8_decoder(), batch()
    watch = NumericsWatch(decoder, every=100)
    with watch.sample(99) as sample:
        assert decoder.scaling.observer is None
        assert not any(block._forward_hooks for block in decoder.blocks())
        passes(decoder, ids)
    assert sample.records() == []
    assert [step for step in range(1, 301) if watch.due(step)] == [100, 200, 300]


def test_an_error_inside_leaves_no_hook_behind():
    decoder = fp8_decoder()
    with pytest.raises(ValueError, match="outside the vocabulary"), NumericsWatch(decoder, every=1).sample(1):
        decoder(torch.full((1, 4), 1000))
    assert decoder.scaling.observer is None
    assert not any(block._forward_hooks for block in decoder.blocks())


def test_compiled_layers_report_what_the_state_knows():
    decoder = fp8_decoder()
    # Not run: compiling is not needed to see that a look inside is left out.
    for block in decoder.blocks():
        block.compile(backend="eager")
    with NumericsWatch(decoder, every=1).sample(1) as sample:
        assert decoder.scaling.observer is None
        decoder.scaling.record(decoder.layers[0].attention.q_proj.place.input, torch.tensor(3.0))
    precision.update_scales(decoder)
    tensors = by_kind(sample.records(), "fp8")
    assert set(tensors) == set(decoder.scaling.names)
    first, other = tensors["layers.0.attention.input"], tensors["layers.1.attention.input"]
    assert (first["amax"], first["scale"], first["saturated"], first["finite"]) == (3.0, 1.0, None, None)
    assert other["amax"] is None
    json.dumps(list(tensors.values()), allow_nan=False)
    plain = initialize(Decoder(CONFIG), 3)
    plain.compile(backend="eager")
    with NumericsWatch(plain, every=1).sample(1) as sample:
        pass
    assert sample.records() == []


def rank_records(rank, world):
    import torch.distributed as dist

    decoder = fp8_decoder()
    passes(decoder, batch())
    precision.update_scales(decoder, dist.group.WORLD)
    with NumericsWatch(decoder, every=1).sample(1) as sample:
        passes(decoder, batch()[rank : rank + 1])
    return sample.records(dist.group.WORLD)


def test_ranks_add_up_to_one_device():
    decoder = fp8_decoder()
    passes(decoder, batch())
    precision.update_scales(decoder)
    with NumericsWatch(decoder, every=1).sample(1) as sample:
        passes(decoder, batch())
    expected = {r["name"]: r for r in sample.records() if r["kind"] != "event"}
    first, second = run_ranks(rank_records, 2)
    assert first == second
    for record in first:
        if record["kind"] == "event" or record["name"].endswith(("weight", "gradient")):
            continue  # each rank has the whole weight, and the gradient of its own mean
        want = expected[record["name"]]
        assert record["elements"] == want["elements"]
        assert record["amax"] == pytest.approx(want["amax"], rel=1e-4)
        for share in ("saturated", "flushed", "kurtosis"):
            if share in record:
                assert record[share] == pytest.approx(want[share], rel=1e-3, abs=1e-3)


def test_settings_out_of_range_are_refused(refuses):
    decoder = Decoder(CONFIG)
    with refuses("every=0"):
        NumericsWatch(decoder, every=0)
    with refuses("is no share"):
        NumericsWatch(decoder, saturation_threshold=1.5)
