"""The penalty on extreme layer outputs: its formula, its gradient, and that it changes nothing when off."""

import functools
from dataclasses import replace

import pytest
import torch
import torch._dynamo  # once here, or every forked rank imports it again
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from zgcm_model import Decoder, ModelConfig, collect_block_outputs, initialize, tweo_terms
from zgcm_model.outliers import EPSILON
from zgcm_model.parallel import apply_tensor_parallel, shard_sequence
from zgcm_testing import run_ranks

WIDE = ModelConfig(97, 48, 60, 7, 4, 2, 16, window=4, max_positions=64)


def batch(time=12):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 97, (2, time + 1), generator=generator)
    return ids, torch.rand(2, time, generator=generator) < 0.7


def large(config):
    """A decoder whose residual stream reaches past tau."""
    decoder = initialize(Decoder(config), 3)
    decoder.embed_tokens.weight.data.mul_(150)
    return decoder


def formula(outputs, mask, tau=3.0, p=4.0):
    """What the paper says, in one line per layer."""
    return torch.stack([((x[mask].abs() / (tau + EPSILON)) ** p).mean() for x in outputs]).mean()


@pytest.mark.parametrize(("tau", "p"), [(3.0, 4.0), (0.5, 1.0), (2.0, 2.5)])
@pytest.mark.parametrize("masked", [False, True])
def test_terms_and_gradient_are_those_of_the_formula(tau, p, masked):
    outputs = [torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mask = torch.rand(2, 5) < 0.6 if masked else torch.ones(2, 5, dtype=torch.bool)
    total, count = tweo_terms(outputs, loss_mask=mask if masked else None, tau=tau, p=p)
    assert total.dtype == torch.float64
    assert count.dtype == torch.int64
    assert int(count) == int(mask.sum())
    expected = formula(outputs, mask, tau, p)
    torch.testing.assert_close(total / count, expected, atol=1e-14, rtol=1e-12)
    got = torch.autograd.grad(total / count, outputs)
    torch.testing.assert_close(got, torch.autograd.grad(expected, outputs), atol=1e-14, rtol=1e-12)


def test_gradient_is_that_of_finite_differences():
    outputs = [torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda *x: tweo_terms(x)[0], outputs)


def test_low_precision_outputs_are_raised_to_the_power_in_float32():
    x = torch.full((1, 2, 4), 200.0, dtype=torch.bfloat16, requires_grad=True)
    total, count = tweo_terms([x])
    torch.testing.assert_close(total / count, torch.tensor((200.0 / 3) ** 4), atol=0, rtol=1e-5)
    total.backward()
    assert x.grad.dtype == torch.bfloat16


def test_nothing_that_counts_gives_zero_and_a_usable_graph():
    x = torch.full((1, 2, 4), torch.inf, requires_grad=True)
    total, count = tweo_terms([x], loss_mask=torch.zeros(1, 2, dtype=torch.bool))
    total.backward()
    assert total == count == 0
    assert torch.equal(x.grad, torch.zeros_like(x))


def step(decoder, ids, mask, weight=None):
    """Loss and gradients; without a weight nothing is collected."""
    decoder.zero_grad()
    if weight is None:
        total, count = decoder.lm_terms(decoder(ids[:, :-1]), ids[:, 1:], mask)
    else:
        with collect_block_outputs(decoder) as outputs:
            hidden = decoder(ids[:, :-1])
        total, count = decoder.lm_terms(hidden, ids[:, 1:], mask)
        if weight:
            total = total + weight * tweo_terms(outputs, loss_mask=mask)[0]
    (total / count).backward()
    return [total.detach() / count, *(p.grad.clone() for p in decoder.parameters())]


def test_off_or_only_collecting_gives_the_same_bits(toy):
    decoder, (ids, mask) = large(toy), batch()
    without, collecting, again = (step(decoder, ids, mask, w) for w in (None, 0.0, None))
    for other in (collecting, again):
        assert all(torch.equal(a, b) for a, b in zip(without, other, strict=True))
    with_penalty = step(decoder, ids, mask, 0.01)
    assert with_penalty[0] > without[0] + 0.01
    assert not any(torch.equal(a, b) for a, b in zip(without[1:-3], with_penalty[1:-3], strict=True))


def test_outputs_are_the_residual_stream_after_each_layer(toy):
    decoder, (ids, _) = large(toy), batch()
    with collect_block_outputs(decoder) as outputs:
        hidden = decoder(ids)
    assert len(outputs) == toy.num_layers
    assert torch.equal(decoder.norm(outputs[-1]), hidden)
    assert all(x.shape == (2, 13, toy.hidden_size) for x in outputs)


@pytest.mark.parametrize("inside", [False, True])
def test_recomputed_layers_give_the_same_bits(toy, inside):
    decoder, (ids, mask) = large(toy), batch()
    expected = step(decoder, ids, mask, 0.01)
    for block in decoder.blocks():
        if inside:
            inner = block.feed_forward
            object.__setattr__(
                inner, "forward", functools.partial(checkpoint, inner.forward, use_reentrant=False)
            )
        object.__setattr__(
            block, "forward", functools.partial(checkpoint, block.forward, use_reentrant=False)
        )
    got = step(decoder, ids, mask, 0.01)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_backward_inside_the_collection_adds_nothing_to_it(toy):
    decoder, (ids, _) = large(toy), batch()
    with collect_block_outputs(decoder) as outputs:
        # As a wrapper around the layer would: the module itself is called again.
        hidden = checkpoint(
            decoder.layers[0], decoder.embed_tokens(ids), angles(decoder, ids), use_reentrant=False
        )
        for block in decoder.blocks()[1:]:
            hidden = block(hidden, angles(decoder, ids))
        tweo_terms(outputs)[0].backward()
    assert len(outputs) == toy.num_layers


def angles(decoder, ids):
    from zgcm_model.rotary import rotary_angles

    config = decoder.config
    return rotary_angles(torch.arange(ids.shape[1]), config.rotary_dim, config.rotary_base)


def test_micro_batches_add_up_to_the_whole(toy):
    decoder, (ids, mask) = large(toy), batch()
    whole = step(decoder, ids, mask, 0.01)
    decoder.zero_grad()
    total = 0.0
    for row in range(2):
        with collect_block_outputs(decoder) as outputs:
            hidden = decoder(ids[row : row + 1, :-1])
        part = mask[row : row + 1]
        loss, _ = decoder.lm_terms(hidden, ids[row : row + 1, 1:], part)
        loss = (loss + 0.01 * tweo_terms(outputs, loss_mask=part)[0]) / mask.sum()
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(total, whole[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close([p.grad for p in decoder.parameters()], whole[1:], atol=1e-6, rtol=1e-5)


def sharded_rank(rank, world, sequence_parallel):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    decoder = apply_tensor_parallel(large(WIDE), mesh["tp"], sequence_parallel)
    for block in decoder.blocks():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(decoder, mesh=mesh["dp"])
    (ids, mask), row = batch(), mesh.get_local_rank("dp")
    ids, part = ids[row : row + 1], mask[row : row + 1]
    with collect_block_outputs(decoder) as outputs:
        hidden = decoder(ids[:, :-1])
    total, _ = decoder.lm_terms(hidden, ids[:, 1:], part)
    positions = shard_sequence(part, mesh["tp"]) if sequence_parallel else part
    penalty, count = tweo_terms(outputs, loss_mask=positions)
    # FSDP takes the mean over the two replicas.
    (2 * (total + 0.01 * penalty) / mask.sum()).backward()
    gradients = [p.grad.full_tensor() for p in decoder.parameters()]
    return penalty.detach(), count, gradients


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_r3_ranks_add_up_to_one_device(sequence_parallel):
    ids, mask = batch()
    decoder = large(WIDE)
    expected = step(decoder, ids, mask, 0.01)
    with collect_block_outputs(decoder) as outputs:
        decoder(ids[:, :-1])
    penalty, count = tweo_terms(outputs, loss_mask=mask)
    ranks = run_ranks(sharded_rank, 4, sequence_parallel)
    distinct = ranks if sequence_parallel else ranks[::2]
    torch.testing.assert_close(sum(r[0] for r in distinct), penalty.detach(), atol=0, rtol=1e-5)
    assert sum(int(r[1]) for r in distinct) == int(count)
    for _, _, gradients in ranks:
        torch.testing.assert_close(gradients, expected[1:], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_compiled_decoder_is_collected_when_compiled_inside(toy):
    decoder, (ids, mask) = large(replace(toy, num_layers=2)), batch()
    expected = step(decoder, ids, mask, 0.01)
    decoder.compile(backend="aot_eager", dynamic=False)
    got = step(decoder, ids, mask, 0.01)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_wrong_uses_are_refused(toy, refuses):
    decoder, (ids, _) = large(toy), batch()
    with refuses("0 of 7 layers were seen"), collect_block_outputs(decoder):
        pass
    with refuses("ran twice"), collect_block_outputs(decoder):
        decoder(ids)
        decoder(ids)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in decoder.modules())
    with refuses("outputs is empty"):
        tweo_terms([])
    x = torch.zeros(1, 2, 3)
    with refuses("p=0.5"):
        tweo_terms([x], p=0.5)
    with refuses("set a positive tau"):
        tweo_terms([x], tau=-1.0)
    with refuses("pass a bool mask"):
        tweo_terms([x], loss_mask=torch.ones(1, 2))
    with refuses("does not match the positions"):
        tweo_terms([x], loss_mask=torch.ones(1, 3, dtype=torch.bool))
