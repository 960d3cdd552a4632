"""FP8 products and the projections that use them."""

import copy

import pytest
import torch
from torch import nn

from zgcm_model import Decoder, ModelConfig, generate, initialize, precision
from zgcm_model.precision import DelayedScaling, HighPrecision
from zgcm_model.precision.linear import ScaledLinear, transposed
from zgcm_model.precision.reference import ReferenceProducts
from zgcm_model.precision.roles import projections
from zgcm_model.precision.scaled_mm import ScaledMmProducts
from zgcm_model.precision.scaling import quantize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPE = DelayedScaling(amax_history_len=4)


def edge_values(dtype):
    """All finite values of a format: powers of two, subnormals, the largest ones, both zeros."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype)
    return values[values.float().isfinite()]


def random(rows, columns, dtype, spread=1.0):
    return quantize(torch.randn(rows, columns) * spread, torch.tensor(1.0), dtype)


def adversarial(rows, columns, dtype):
    values = edge_values(dtype)
    return values[torch.randint(len(values), (rows, columns))]


def constant(rows, columns, dtype, value):
    return torch.full((rows, columns), value).to(dtype)


FORMATS = [(E4M3, E4M3), (E5M2, E4M3)]


def assert_within_one_ulp_of_the_sum(left, right, inverses, dtype):
    got = ScaledMmProducts()(left, right, inverses, dtype, fast=True)
    want = ReferenceProducts()(left, right, inverses, dtype, fast=True)
    assert got.dtype == want.dtype == dtype
    assert got.shape == want.shape
    # The unit in the last place of a sum is that of what was added up, not of what is left after cancellation.
    magnitude = (left.double().abs() @ right.double().abs().t()) * (inverses[0] * inverses[1]).double()
    # A single row is added up in another order, so both sums may be off by one.
    unit = magnitude * torch.finfo(torch.float32).eps * (2 if len(left) == 1 else 1)
    if dtype == torch.bfloat16:
        unit = unit + 2.0 ** want.double().abs().clamp(min=1e-300).log2().floor() * 2.0**-7
    assert ((got.double() - want.double()).abs() <= unit).all()
    exact = (left.double() @ right.double().t()) * (inverses[0] * inverses[1]).double()
    assert ((want.double() - exact).abs() <= unit * left.shape[1] ** 0.5).all()


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [random, adversarial])
@pytest.mark.parametrize("shape", [(32, 64, 48), (5, 3, 7), (16, 33, 16), (1, 128, 20), (257, 40, 33)])
def test_scaled_mm_equals_the_reference(formats, dtype, make, shape):
    rows, summed, columns = shape
    left, right = make(rows, summed, formats[0]), make(columns, summed, formats[1])
    assert_within_one_ulp_of_the_sum(left, right, (torch.tensor(0.37), torch.tensor(1.7)), dtype)


@pytest.mark.parametrize("formats", FORMATS)
def test_scaled_mm_equals_the_reference_on_constants(formats):
    one = torch.tensor(1.0)
    for value in (0.0, -0.0, 448.0, -448.0, 2.0**-9, 2.0**-6, 1.0):
        right = constant(16, 32, formats[1], value)
        for other in (
            0.0,
            448.0,
            -448.0,
            *([57344.0, -57344.0, 2.0**-16] if formats[0] == E5M2 else [2.0**-9]),
        ):
            left = constant(16, 32, formats[0], other)
            assert_within_one_ulp_of_the_sum(left, right, (one, one), torch.float32)
            got = ScaledMmProducts()(left, right, (one, one), torch.float32, fast=False)
            assert torch.equal(got, torch.full((16, 16), 32 * value * other))


@pytest.mark.parametrize("backend", ["reference", "scaled_mm"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_projection_is_three_products_of_quantized_matrices(toy, backend, autocast):
    decoder = precision.apply(Decoder(toy), RECIPE, backend=backend)
    linear = initialize(decoder, 1).layers[0].feed_forward.gate_proj
    state, place = precision.scaling_state(decoder), linear.place
    for slot, value in ((place.input, 7.0), (place.weight, 900.0), (place.gradient, 3e4)):
        state.scale[slot.column] = value
        state.scale_inv[slot.column] = 1 / value
    x, grad = torch.randn(2, 5, 32, requires_grad=True), torch.randn(2, 5, 48)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = linear(x)
    out.backward(grad.to(out.dtype))

    def back(values, dtype, scale):
        return quantize(values, torch.tensor(scale), dtype).double() / scale

    xq, wq = back(x.detach().flatten(0, 1), E4M3, 7.0), back(linear.weight.detach(), E4M3, 900.0)
    gq = back(grad.to(out.dtype).flatten(0, 1), E5M2, 3e4)
    assert out.dtype == (torch.bfloat16 if autocast else torch.float32)
    assert linear.weight.grad.dtype == x.grad.dtype == torch.float32
    rounding = 2**-8 if autocast else 1e-6
    close = {"rtol": rounding, "atol": 1e-6}
    torch.testing.assert_close(out.detach().double().flatten(0, 1), xq @ wq.t(), **close)
    torch.testing.assert_close(x.grad.double().flatten(0, 1), gq @ wq, **close)
    # The weight gradient is summed and kept in float32 whatever autocast computes in.
    torch.testing.assert_close(linear.weight.grad.double(), gq.t() @ xq, rtol=1e-6, atol=1e-6)


def test_gradients_of_e4m3_recipes_are_e4m3(toy):
    decoder = precision.apply(Decoder(toy), DelayedScaling(format="e4m3"))
    assert {p.module.place.gradient.dtype for p in projections(decoder)} == {E4M3}
    hybrid = precision.apply(Decoder(toy), DelayedScaling())
    assert {p.module.place.gradient.dtype for p in projections(hybrid)} == {E5M2}


def test_a_frozen_weight_or_input_gets_no_gradient(toy):
    linear = initialize(precision.apply(Decoder(toy), RECIPE), 1).layers[0].feed_forward.up_proj
    linear.weight.requires_grad_(False)
    x = torch.randn(3, 32, requires_grad=True)
    linear(x).sum().backward()
    assert x.grad is not None
    assert linear.weight.grad is None
    linear.weight.requires_grad_(True)
    linear(x.detach()).sum().backward()
    assert linear.weight.grad is not None


def test_a_gradient_of_any_strides_gives_the_same_numbers(toy):
    linear = (
        initialize(precision.apply(Decoder(toy), RECIPE, backend="scaled_mm"), 1).layers[0].attention.q_proj
    )
    grad, x = torch.randn(64, 20).t(), torch.randn(32, 20).t()
    state, grads = linear.place.state, []
    for make in (torch.Tensor.contiguous, lambda strided: strided):
        linear.weight.grad = None
        linear(make(x)).backward(make(grad))
        grads.append(linear.weight.grad)
    assert torch.equal(*grads)
    assert state.quantize(grad, linear.place.gradient).is_contiguous()


def test_transposed_is_contiguous():
    matrix = adversarial(5, 7, E4M3)
    turned = transposed(matrix)
    assert turned.is_contiguous()
    assert torch.equal(turned.view(torch.uint8), matrix.view(torch.uint8).t())


def train(decoder, steps=8, micro=2):
    optimizer = torch.optim.SGD(decoder.parameters(), 0.5)
    losses = []
    for index in range(steps):
        for part in range(micro):
            ids = torch.randint(
                0, 97, (2, 25), generator=torch.Generator().manual_seed(index % 2 * 10 + part)
            )
            total, count = decoder.lm_terms(decoder(ids[:, :-1]), ids[:, 1:], torch.ones(2, 24) > 0)
            (total / count / micro).backward()
            losses.append((total / count).detach())
        optimizer.step()
        optimizer.zero_grad()
        if precision.is_applied(decoder):
            precision.update_scales(decoder)
    return torch.stack(losses)


@pytest.mark.parametrize("backend", ["reference", "scaled_mm"])
def test_training_follows_the_float32_run(toy, backend):
    plain = train(initialize(Decoder(toy), 3))
    scaled = train(initialize(precision.apply(Decoder(toy), RECIPE, backend=backend), 3))
    assert plain[-1] < plain[0] - 0.5
    torch.testing.assert_close(scaled, plain, rtol=0.015, atol=0)
    assert not torch.equal(scaled, plain)


def test_backends_share_checkpoints_and_agree(toy):
    first = initialize(precision.apply(Decoder(toy), RECIPE, backend="reference"), 3)
    train(first, steps=3)
    second = precision.apply(Decoder(toy), RECIPE, backend="scaled_mm")
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(train(second, 2), train(first, 2), rtol=1e-3, atol=0)


def test_generation_with_a_cache_in_fp8(toy):
    decoder = initialize(precision.apply(Decoder(toy), RECIPE, backend="scaled_mm"), 3)
    train(decoder, 3)
    decoder.eval()
    ids = torch.randint(0, 97, (2, 6))
    before = copy.deepcopy(decoder.state_dict())
    assert generate(decoder, ids, 9).shape == (2, 15)
    assert all(torch.equal(before[name], value) for name, value in decoder.state_dict().items())


def test_a_copy_has_scales_of_its_own(toy):
    decoder = initialize(precision.apply(Decoder(toy), RECIPE), 3)
    train(decoder, 2)
    other = copy.deepcopy(decoder)
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    train(other, 2)
    assert all(torch.equal(before[name], value) for name, value in decoder.state_dict().items())
    assert other.scaling.cursor.tolist() == [0] * len(other.scaling.names)
    assert other.layers[0].attention.q_proj.place.state is other.scaling


# --- What stays in high precision -------------------------------------------------------------------------------------


def test_the_table_of_high_precision_is_kept_and_printed(toy):
    table = HighPrecision(roles=("v",), layers={"down": range(-4, 0), "g": (0, 1)})
    decoder = precision.apply(Decoder(toy), RECIPE, backend="reference", high_precision=table)
    scaled = {(p.role, p.layer) for p in projections(decoder) if isinstance(p.module, ScaledLinear)}
    every = {(p.role, p.layer) for p in projections(decoder)}
    kept = (
        {("v", layer) for layer in range(7)}
        | {("down", layer) for layer in (3, 4, 5, 6)}
        | {("g", 0), ("g", 1)}
    )
    assert every - scaled == kept
    assert ("g", 5) not in every  # the global layer has no gate
    fp8 = "FP8 E4M3 forward, E5M2 gradients (reference)"
    assert precision.describe(decoder) == [
        ("q", "0-6", fp8),
        ("k", "0-6", fp8),
        ("v", "0-6", "high precision"),
        ("g", "0-1", "high precision"),
        ("g", "2-4, 6", fp8),
        ("o", "0-6", fp8),
        ("gate", "0-6", fp8),
        ("up", "0-6", fp8),
        ("down", "0-2", fp8),
        ("down", "3-6", "high precision"),
        ("embedding", "all", "high precision"),
        ("norms", "all", "high precision"),
        ("attention core", "all", "high precision"),
        ("head", "all", "high precision"),
    ]
    assert {row.format for row in precision.describe(Decoder(toy))} == {"high precision"}


def test_keeping_everything_is_the_high_precision_model_to_the_bit(toy):
    kept = precision.apply(Decoder(toy), RECIPE, high_precision=HighPrecision(roles=precision.ROLES))
    assert torch.equal(train(initialize(kept, 3), 2), train(initialize(Decoder(toy), 3), 2))
    assert not isinstance(Decoder(toy).lm_head, ScaledLinear)
    assert type(kept.lm_head) is nn.Linear


def test_wrong_settings_are_refused(toy, refuses):
    for match, options in (
        ("format='e5m2' is unknown; choose one of hybrid, e4m3", {"format": "e5m2"}),
        ("amax_compute='mean' is unknown", {"amax_compute": "mean"}),
        ("amax_history_len=0 cannot be used", {"amax_history_len": 0}),
        ("margin=-1 cannot be used", {"margin": -1}),
        ("margin=True cannot be used", {"margin": True}),
    ):
        with refuses(match):
            DelayedScaling(**options)
    with refuses("role='w1' is unknown; choose one of q, k, v, g, o, gate, up, down"):
        HighPrecision(roles=("w1",))
    with refuses(r"names layer 7 of a model with 7; use indices from -7 to 6"):
        precision.apply(Decoder(toy), RECIPE, high_precision=HighPrecision(layers={"down": (7,)}))
    with refuses("backend='fp4' is unknown"):
        precision.apply(Decoder(toy), RECIPE, backend="fp4")
    decoder = precision.apply(Decoder(toy), RECIPE)
    with refuses("applied to this decoder already"):
        precision.apply(decoder, RECIPE)
    with refuses("no FP8 state"):
        precision.update_scales(Decoder(toy))
    with refuses("without a linear class of its own"):
        precision.apply(Decoder(toy, linear=_Own), RECIPE)


class _Own(nn.Linear):
    pass


def test_auto_is_the_reference_without_fp8_units(toy, monkeypatch):
    decoder = precision.apply(Decoder(toy), RECIPE)
    assert decoder.layers[0].attention.q_proj.place.products.name == "reference"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, name in (((8, 0), "reference"), ((8, 9), "scaled_mm"), ((9, 0), "scaled_mm")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        decoder = precision.apply(Decoder(toy), RECIPE)
        assert decoder.layers[0].attention.q_proj.place.products.name == name


@pytest.mark.slow
def test_compiled_it_is_one_graph_with_the_same_numbers_and_scales():
    config = ModelConfig(97, 32, 48, 2, 4, 2, 16, window=4, global_every=2, max_positions=512)

    def make():
        return initialize(precision.apply(Decoder(config), RECIPE, backend="scaled_mm"), 3)

    eager, compiled = make(), make()
    for block in compiled.layers:
        block.feed_forward.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(train(compiled, 3), train(eager, 3), rtol=1e-6, atol=0)
    one, two = precision.scaling_state(eager), precision.scaling_state(compiled)
    assert torch.equal(one.cursor, two.cursor)
    torch.testing.assert_close(two.amax_history, one.amax_history, rtol=1e-5, atol=0)
    torch.testing.assert_close(two.scale, one.scale, rtol=1e-5, atol=0)
