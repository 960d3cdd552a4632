import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from zgcm_model import causal_lm_terms, chunked_lm_terms, global_token_mean


def test_shifts_once_and_masks_by_the_target():
    logits = torch.zeros(1, 4, 3)
    logits[0, 0, 2] = 5.0
    ids = torch.tensor([[0, 2, 1, 1]])
    mask = torch.tensor([[False, True, False, False]])
    total, count = causal_lm_terms(logits, ids, mask)
    assert count.item() == 1
    assert count.dtype == torch.int64
    assert total.item() == pytest.approx(math.log(1 + 2 * math.exp(-5)), rel=1e-5)


def test_nan_logits_at_masked_positions_give_finite_loss_and_zero_gradient():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    broken = logits.clone()
    broken[0, 0] = float("nan")
    broken[1, 2] = float("inf")  # the last position has no target
    ids = torch.tensor([[1, -100, 2], [3, 4, 0]])
    mask = torch.tensor([[True, False, True], [True, True, True]])
    total, count = causal_lm_terms(broken, ids, mask)
    assert count.item() == 3
    assert total.isfinite()
    (grad,) = torch.autograd.grad(total, logits)
    assert grad.isfinite().all()
    assert grad[0, 0].abs().sum() == 0


def test_nothing_counts_gives_zero_and_a_usable_graph():
    logits = torch.randn(1, 3, 5, requires_grad=True)
    ids = torch.full((1, 3), -100)
    total, count = causal_lm_terms(logits, ids, torch.zeros(1, 3, dtype=torch.bool))
    assert (total.item(), count.item()) == (0.0, 0)
    total.backward()
    assert logits.grad.abs().sum() == 0
    hidden, weight = torch.randn(1, 3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    total, count = chunked_lm_terms(hidden, weight, ids, torch.zeros(1, 3, dtype=torch.bool))
    assert (total.item(), count.item()) == (0.0, 0)
    total.backward()
    assert hidden.grad.abs().sum() == 0
    assert weight.grad.abs().sum() == 0


def test_global_mean_is_not_a_mean_of_means():
    sums, counts = torch.tensor([6.0, 0.0, 2.0]), torch.tensor([3, 0, 1])
    assert global_token_mean(sums, counts).item() == 2.0
    with pytest.raises(ValueError, match="counts add up to 0"):
        global_token_mean(torch.zeros(2), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="one count per sum"):
        global_token_mean(torch.zeros(2), torch.zeros(3, dtype=torch.int64))


def naive(hidden, weight, targets, mask, z_loss):
    logits = (hidden @ weight.T).float().flatten(0, 1)
    losses = F.cross_entropy(logits, targets.clamp(0).flatten(), reduction="none")
    losses = losses + z_loss * logits.logsumexp(-1).square()
    return (losses * mask.flatten()).sum()


@settings(max_examples=40, deadline=None)
@given(
    time=st.integers(1, 9),
    vocab=st.integers(2, 40),
    chunk=st.integers(1, 30),
    z_loss=st.sampled_from([0.0, 0.01]),
    share=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_chunked_equals_naive(time, vocab, chunk, z_loss, share):
    hidden = torch.randn(2, time, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, time) < share
    targets = torch.randint(0, vocab, (2, time)).where(mask, -100)
    total, count = chunked_lm_terms(hidden, weight, targets, mask, chunk, z_loss=z_loss)
    assert count.item() == mask.sum().item()
    expected = naive(hidden, weight, targets, mask, z_loss)
    torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-5, check_dtype=False)
    got = torch.autograd.grad(total * 0.7, (hidden, weight))
    want = torch.autograd.grad(expected * 0.7, (hidden, weight))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_chunked_equals_causal_terms_on_shifted_targets():
    hidden, weight = torch.randn(2, 8, 6), torch.randn(11, 6)
    ids = torch.randint(0, 11, (2, 9))
    mask = torch.rand(2, 9) < 0.6
    expected = causal_lm_terms(torch.cat((hidden @ weight.T, torch.zeros(2, 1, 11)), 1), ids, mask)
    got = chunked_lm_terms(hidden, weight, ids[:, 1:], mask[:, 1:], chunk=3)
    torch.testing.assert_close(got[0], expected[0])
    assert got[1] == expected[1]


def test_chunked_ignores_hidden_states_that_do_not_count():
    hidden, weight = torch.randn(1, 4, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
    broken = hidden.clone()
    broken[0, 2] = float("nan")
    mask = torch.tensor([[True, True, False, True]])
    total, _ = chunked_lm_terms(broken, weight, torch.tensor([[1, 2, -100, 3]]), mask)
    grads = torch.autograd.grad(total, (hidden, weight))
    assert total.isfinite()
    assert all(g.isfinite().all() for g in grads)
    assert grads[0][0, 2].abs().sum() == 0


def test_chunked_under_autocast_and_in_bfloat16():
    hidden, weight = torch.randn(2, 40, 64), torch.randn(300, 64) * 0.1
    targets, mask = torch.randint(0, 300, (2, 40)), torch.ones(2, 40, dtype=torch.bool)
    exact, _ = chunked_lm_terms(hidden, weight, targets, mask)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _ = chunked_lm_terms(hidden, weight.requires_grad_(), targets, mask, chunk=32)
    (grad,) = torch.autograd.grad(mixed, weight)
    low, _ = chunked_lm_terms(hidden.bfloat16(), weight.detach().bfloat16(), targets, mask)
    assert grad.dtype == torch.float32
    assert mixed.dtype == low.dtype == torch.float32
    assert mixed.item() == pytest.approx(exact.item(), rel=5e-3)
    assert low.item() == pytest.approx(exact.item(), rel=5e-3)


def test_gradient_survives_a_second_backward_and_a_frozen_head():
    hidden, weight = torch.randn(1, 3, 4, requires_grad=True), torch.randn(5, 4)
    total, _ = chunked_lm_terms(hidden, weight, torch.tensor([[1, 2, 3]]), torch.ones(1, 3, dtype=torch.bool))
    first = torch.autograd.grad(total, hidden, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(2 * total, hidden)[0], 2 * first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "chunk=0"),
        ({"z_loss": -1.0}, "z_loss=-1.0"),
        ({"targets": torch.tensor([[1, 2, 5]])}, r"targets holds 5 .* outside \[0, 5\)"),
        ({"targets": torch.tensor([[1, 2]])}, "do not match"),
        ({"loss_mask": torch.ones(1, 2, dtype=torch.bool)}, "loss_mask"),
        ({"loss_mask": torch.tensor([[0.0, 0.5, 1.0]])}, "other than 0 and 1"),
    ],
)
def test_bad_input(change, message, refuses):
    arguments = {
        "hidden": torch.randn(1, 3, 4),
        "head_weight": torch.randn(5, 4),
        "targets": torch.tensor([[1, 2, 3]]),
        "loss_mask": torch.ones(1, 3, dtype=torch.bool),
    }
    with refuses(message):
        chunked_lm_terms(**(arguments | change))
