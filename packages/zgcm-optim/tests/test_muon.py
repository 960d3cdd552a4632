"""Muon on plain tensors: against a float64 reference, torch.optim.Muon and the faults of others."""

import copy

import pytest
import torch
from optim_reference import SIMPLE, adam_step, muon_step
from torch import Tensor, nn

from zgcm_optim import Muon, orthogonalize, route_parameters

SHAPES = [(6, 6), (4, 9), (12, 5), (4, 9)]


def parameters(
    shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def set_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(
            parameter.dtype
        )


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_ten_steps_match_the_float64_reference(nesterov: bool, method: str) -> None:
    params = parameters()
    optimizer = Muon(params, 0.03, momentum=0.9, nesterov=nesterov, dtype=torch.float64, method=method)
    options = {"lr": 0.03, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    expected = [parameter.detach().clone() for parameter in params]
    averages = [torch.zeros_like(weight) for weight in expected]
    for step in range(10):
        set_gradients(params, step)
        for index, parameter in enumerate(params):
            assert parameter.grad is not None
            pair = muon_step(expected[index], parameter.grad, averages[index], options)
            expected[index], averages[index] = pair
        optimizer.step()
    torch.testing.assert_close([p.detach() for p in params], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("nesterov", [False, True])
def test_same_weights_as_torch_muon_in_float32(nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = parameters(dtype=torch.float32), parameters(dtype=torch.float32)
    # torch fixes its body at bfloat16; the comparison of the rule itself needs it in float32.
    monkeypatch.setattr(Tensor, "bfloat16", lambda self: self.clone())
    mine = Muon(ours, 1e-3, nesterov=nesterov, coefficients="simple", scale="shape", dtype=torch.float32)
    torchs = torch.optim.Muon(theirs, lr=1e-3, nesterov=nesterov, weight_decay=0.1, momentum=0.95)
    for step in range(10):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        mine.step()
        torchs.step()
    torch.testing.assert_close([p.data for p in ours], [p.data for p in theirs], atol=1e-6, rtol=0)


@pytest.mark.parametrize("scale", ["match_rms_adamw", "shape"])
def test_close_to_torch_muon_in_bfloat16(scale: str) -> None:
    shapes = [(96, 96), (128, 512), (512, 128), (48, 200)]
    ours, theirs = parameters(shapes, torch.float32), parameters(shapes, torch.float32)
    mine = Muon(ours, 1e-2, coefficients="simple", scale=scale, weight_decay=0.0)
    adjust = "original" if scale == "shape" else scale
    torchs = torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.0, momentum=0.95, adjust_lr_fn=adjust)
    start = [p.detach().clone() for p in ours]
    set_gradients(ours, 0)
    set_gradients(theirs, 0)
    mine.step()
    torchs.step()
    for before, one, other in zip(start, ours, theirs, strict=True):
        moved, expected = one.detach() - before, other.detach() - before
        assert (moved - expected).norm() <= 0.04 * expected.norm()


def test_adam_groups_match_the_float64_reference_and_torch_adamw() -> None:
    params, other = parameters([(7,), (3, 5)]), parameters([(7,), (3, 5)])
    options = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = Muon([{"params": params, "algorithm": "adam"}], 0.02)
    torchs = torch.optim.AdamW(other, **options)
    expected, states = [p.detach().clone() for p in params], [{}, {}]
    for step in range(10):
        set_gradients(params, step)
        set_gradients(other, step)
        expected = [
            adam_step(w, p.grad, s, options) for w, p, s in zip(expected, params, states, strict=True)
        ]
        optimizer.step()
        torchs.step()
    torch.testing.assert_close([p.detach() for p in params], expected, atol=1e-12, rtol=0)
    torch.testing.assert_close([p.detach() for p in params], [p.detach() for p in other], atol=1e-12, rtol=0)


def test_blocks_are_orthogonalized_and_scaled_apart() -> None:
    whole = parameters([(18, 10)])
    kinds = [
        torch.cat([torch.arange(9 * g + a, 9 * g + b) for g in range(2)]) for a, b in ((0, 4), (4, 8), (8, 9))
    ]
    apart = [nn.Parameter(whole[0].detach()[rows].clone()) for rows in kinds]
    fused = Muon([{"params": whole, "blocks": (4, 4, 1)}], 0.1, dtype=torch.float64)
    single = Muon(apart, 0.1, dtype=torch.float64)
    for step in range(3):
        set_gradients(whole, step)
        for rows, part in zip(kinds, apart, strict=True):
            part.grad = whole[0].grad[rows]
        fused.step()
        single.step()
    for rows, part in zip(kinds, apart, strict=True):
        torch.testing.assert_close(whole[0].detach()[rows], part.detach(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_number_of_blocks_equals_that_many_matrices(dim: int) -> None:
    whole = parameters([(8, 12)])
    apart = [nn.Parameter(part.clone()) for part in whole[0].detach().chunk(2, dim)]
    fused = Muon([{"params": whole, "blocks": 2, "block_dim": dim}], 0.1, dtype=torch.float64)
    set_gradients(whole, 0)
    for part, gradient in zip(apart, whole[0].grad.chunk(2, dim), strict=True):
        part.grad = gradient.clone()
    fused.step()
    Muon(apart, 0.1, dtype=torch.float64).step()
    torch.testing.assert_close(
        whole[0].detach(), torch.cat([p.detach() for p in apart], dim), atol=1e-12, rtol=0
    )


def test_a_fused_gate_and_up_projection_is_whole_unless_it_is_cut() -> None:
    fused = parameters([(12, 5)])[0]
    start, halves = fused.detach().clone(), [nn.Parameter(part.clone()) for part in fused.detach().chunk(2)]
    fused.grad = torch.randn(12, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for half, gradient in zip(halves, fused.grad.chunk(2), strict=True):
        half.grad = gradient.clone()
    Muon([{"params": [fused], "blocks": (6, 6)}], 0.1, dtype=torch.float64).step()
    Muon(halves, 0.1, dtype=torch.float64).step()
    apart = torch.cat([half.detach() for half in halves])
    torch.testing.assert_close(fused.detach(), apart, atol=1e-12, rtol=0)
    whole = nn.Parameter(start)
    whole.grad = fused.grad
    Muon([whole], 0.1, dtype=torch.float64).step()
    assert (whole.detach() - apart).abs().max() > 1e-3


def test_a_spectral_rate_equals_five_times_itself_matched_to_adamw() -> None:
    spectral, matched = parameters([(6, 9), (9, 4)]), parameters([(6, 9), (9, 4)])
    one = Muon(spectral, 2e-4, weight_decay=0.5)
    other = Muon(matched, 1e-3, weight_decay=0.1, scale="match_rms_adamw")
    for step in range(3):
        set_gradients(spectral, step)
        set_gradients(matched, step)
        one.step()
        other.step()
    torch.testing.assert_close(
        [p.detach() for p in spectral], [p.detach() for p in matched], atol=1e-12, rtol=0
    )


def test_adam_without_a_fused_kernel_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, apart = parameters([(7,), (3, 5)]), parameters([(7,), (3, 5)])
    one, other = (Muon([{"params": params, "algorithm": "adam"}], 0.02) for params in (fused, apart))
    for step in range(3):
        set_gradients(fused, step)
        set_gradients(apart, step)
        one.step()
        with monkeypatch.context() as patch:
            patch.setattr("zgcm_optim.adam._FUSED", ())
            other.step()
    torch.testing.assert_close([p.detach() for p in fused], [p.detach() for p in apart], atol=1e-12, rtol=0)


def test_gated_and_ungated_layouts_live_in_one_optimizer() -> None:
    gated, ungated = parameters([(20, 6)]), parameters([(12, 6)])
    groups = [{"params": gated, "blocks": (4, 4, 1, 1)}, {"params": ungated, "blocks": (4, 1, 1)}]
    optimizer = Muon(groups, 0.1)
    set_gradients(gated + ungated, 0)
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in gated + ungated)
    with pytest.raises(ValueError, match="group of their own"):
        Muon([{"params": gated + ungated, "blocks": (4, 4, 1, 1)}], 0.1)


def test_o8_zero_and_tiny_gradients() -> None:
    zero, normal, tiny = parameters([(5, 8)] * 3, torch.float32)
    normal.data.copy_(zero.data)
    tiny.data.copy_(zero.data)
    start = zero.detach().clone()
    optimizer = Muon([zero, normal, tiny], 0.1, weight_decay=0.0, dtype=torch.float32)
    zero.grad = torch.zeros(5, 8)
    normal.grad = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
    tiny.grad = normal.grad * 1e-9
    optimizer.step()
    assert torch.equal(zero.detach(), start)
    torch.testing.assert_close(tiny.detach(), normal.detach(), atol=1e-5, rtol=0)


def test_o8_empty_matrices_do_not_crash() -> None:
    empty = nn.Parameter(torch.zeros(0, 4))
    empty.grad = torch.zeros(0, 4)
    Muon([empty], 0.1).step()


@pytest.mark.parametrize("algorithm", ["muon", "adam"])
@pytest.mark.parametrize("shape", [(4, 4), (2, 9), (9, 2)])
def test_o9_decay_uses_the_plain_learning_rate(algorithm: str, shape: tuple[int, int]) -> None:
    params = parameters([shape])
    start = params[0].detach().clone()
    optimizer = Muon([{"params": params, "algorithm": algorithm}], 0.1, weight_decay=0.1)
    params[0].grad = torch.zeros(shape, dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), 0.99 * start)


def test_o10_explicit_zeros_stay_zero() -> None:
    params = parameters([(4, 4)])
    start = params[0].detach().clone()
    optimizer = Muon(params, 0.0, momentum=0.0, weight_decay=0.0)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.0, 0.0, 0.0)
    set_gradients(params, 0)
    optimizer.step()
    assert torch.equal(params[0].detach(), start)
    torch.testing.assert_close(optimizer.state[params[0]]["momentum_buffer"], params[0].grad)
    Muon([{"params": params, "weight_decay": 0.0}], 0.1).step()
    zero_decay = Muon([{"params": parameters(), "weight_decay": 0.0}], 0.1, weight_decay=0.3)
    assert zero_decay.param_groups[0]["weight_decay"] == 0.0


@pytest.mark.parametrize("width", [4, 64])
def test_o11_adam_groups_use_the_scheduled_rate(width: int) -> None:
    parameter = nn.Parameter(torch.zeros(width, width))
    optimizer = Muon([{"params": [parameter], "algorithm": "adam"}], 1.0, weight_decay=0.0)
    optimizer.param_groups[0]["lr"] = 0.25
    parameter.grad = torch.full((width, width), 3.0)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((width, width), -0.25))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("steps", -1),
        ("steps", 2.5),
        ("steps", 3),
        ("momentum", 1.5),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("momentum", float("nan")),
        ("lr", -1.0),
        ("lr", float("inf")),
        ("weight_decay", -0.1),
        ("eps", -1e-8),
        ("betas", (0.9, 1.0)),
        ("betas", (0.9,)),
        ("scale", "spectrum"),
        ("coefficients", "cubic"),
        ("coefficients", "deepseek_v4"),
        ("coefficients", [(1.0, 2.0)] * 5),
        ("coefficients", SIMPLE[:4]),
        ("sharded", "sometimes"),
        ("dtype", torch.float16),
        ("method", "fast"),
        ("extra_scale", float("nan")),
    ],
)
def test_o17_invalid_settings_are_refused(field: str, value: object) -> None:
    settings = {"lr": 0.1, field: value}
    with pytest.raises(ValueError, match=field):
        Muon(parameters(), **settings)
    with pytest.raises(ValueError, match=field):
        Muon([{"params": parameters(), field: value}], 0.1)


@pytest.mark.parametrize("blocks", [0, -2, 5, (), (3, 0), (5, 2), True, "ab"])
def test_o17_blocks_that_do_not_fit_are_refused(blocks: object) -> None:
    with pytest.raises(ValueError, match="blocks"):
        Muon([{"params": parameters([(6, 6)]), "blocks": blocks}], 0.1)


def test_a_refused_group_leaves_the_optimizer_as_it_was() -> None:
    optimizer = Muon(parameters(), 0.1)
    with pytest.raises(ValueError, match="momentum"):
        optimizer.add_param_group({"params": parameters(), "momentum": 2.0})
    assert len(optimizer.param_groups) == 1


def test_vectors_and_flattened_weights_are_refused_by_muon() -> None:
    with pytest.raises(ValueError, match="fully_shard"):
        Muon([nn.Parameter(torch.zeros(12))], 0.1)


def test_closure_is_called_with_gradients_enabled() -> None:
    params = parameters([(3, 3)])
    optimizer = Muon(params, 0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss.item()

    start = closure()
    assert optimizer.step(closure) == start
    assert closure() < start


def test_step_without_gradients_changes_nothing() -> None:
    params = parameters()
    before = copy.deepcopy([p.detach() for p in params])
    Muon(params, 0.1).step()
    assert all(torch.equal(p.detach(), b) for p, b in zip(params, before, strict=True))


def test_published_update_has_an_rms_near_one() -> None:
    for shape in ((128, 128), (64, 512), (512, 64)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        rms = orthogonalize(matrix).square().mean().sqrt() * max(shape) ** 0.5
        assert 0.93 <= rms <= 1.05


def test_bfloat16_weights_and_transposed_memory() -> None:
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randn(12, 20, generator=generator) for _ in range(2)]
    params = [nn.Parameter(w.bfloat16()) for w in whole] + [
        nn.Parameter(w.t().contiguous().t()) for w in whole
    ]
    exact = [nn.Parameter(w.clone()) for w in whole]
    for parameter in (*params, *exact):
        parameter.grad = torch.arange(240.0).reshape(12, 20).cos().to(parameter.dtype)
    optimizer = Muon(params, 0.01, dtype=torch.float32)
    optimizer.step()
    Muon(exact, 0.01, dtype=torch.float32).step()
    assert optimizer.state[params[0]]["momentum_buffer"].dtype == torch.bfloat16
    for low, strided, one in zip(params[:2], params[2:], exact, strict=True):
        torch.testing.assert_close(strided.detach(), one.detach(), atol=1e-6, rtol=0)
        torch.testing.assert_close(low.detach().float(), one.detach(), atol=0.02, rtol=0.02)


def test_a_model_learns() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = Muon(route_parameters(model), 3e-3)
    inputs, targets = torch.randn(64, 16), torch.randn(64, 4)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
