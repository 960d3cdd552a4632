import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter

from zgcm_model import Decoder, ModelConfig, initialize
from zgcm_model.norm import RmsNorm, rms_norm
from zgcm_model.rotary import rotary_angles, rotate


def plain_forward(decoder, ids):
    """The published equations, written out with no part of the model but its weights."""
    config, x = decoder.config, decoder.embed_tokens.weight[ids].double()
    time, half = ids.shape[1], config.rotary_dim // 2
    distance = torch.arange(time)[:, None] - torch.arange(time)
    angle = torch.arange(time)[:, None] * config.rotary_base ** (
        -torch.arange(half) * 2.0 / config.rotary_dim
    )
    cos, sin = angle.double().cos()[:, None], angle.double().sin()[:, None]

    def norm(v, weight):
        return v / (v.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight.double()

    def turn(v):
        a, b, rest = v[..., :half], v[..., half : 2 * half], v[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    for index, block in enumerate(decoder.layers):
        att, ff = block.attention, block.feed_forward
        a = norm(x, block.attention_norm.weight)
        q, k, v = (
            (a @ p.weight.double().T).unflatten(-1, (-1, config.head_dim))
            for p in (att.q_proj, att.k_proj, att.v_proj)
        )
        q, k = turn(norm(q, att.q_norm.weight)), turn(norm(k, att.k_norm.weight))
        k, v = (t.repeat_interleave(config.num_heads // config.num_kv_heads, 2) for t in (k, v))
        scores = torch.einsum("binh,bjnh->bnij", q, k) / config.head_dim**0.5
        is_global = (index + 1) % 6 == 0
        seen = (distance >= 0) & (is_global | (distance < config.window))
        out = torch.einsum("bnij,bjnh->binh", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(2)
        if not is_global:
            out = out * torch.sigmoid(a @ att.g_proj.weight.double().T)
        x = x + out @ att.o_proj.weight.double().T
        m = norm(x, block.feed_forward_norm.weight)
        gate, up = m @ ff.gate_proj.weight.double().T, m @ ff.up_proj.weight.double().T
        x = x + (F.silu(gate) * up) @ ff.down_proj.weight.double().T
    return norm(x, decoder.norm.weight)


def scrambled(config, **kwargs):
    """A decoder whose norm scales are no ones, so that a swapped norm shows."""
    decoder = initialize(Decoder(config, **kwargs), 3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in decoder.modules():
            if isinstance(module, RmsNorm):
                module.weight.add_(torch.randn(module.weight.shape, generator=generator) * 0.3)
            elif isinstance(module, nn.Linear):
                module.weight.mul_(4)
    return decoder


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_decoder_equals_the_published_equations(toy, kernel):
    decoder = scrambled(toy, kernel=kernel)
    ids = torch.randint(0, 97, (2, 70))
    torch.testing.assert_close(decoder(ids).double(), plain_forward(decoder, ids), atol=2e-5, rtol=1e-5)


def test_m10_qk_norm_over_head_dim_before_rotation(toy):
    decoder, ids = scrambled(toy), torch.randint(0, 97, (1, 20))
    assert decoder.layers[0].attention.q_norm.weight.shape == (16,)
    before = decoder.logits(decoder(ids))
    with torch.no_grad():
        for block in decoder.blocks():
            block.attention.q_proj.weight.mul_(10)
    torch.testing.assert_close(decoder.logits(decoder(ids)), before, atol=2e-4, rtol=1e-4)


def test_m22_norm_scale_is_multiplied_before_the_cast():
    x = torch.randn(64, 128).bfloat16()
    weight = torch.full((128,), 1.003)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert torch.equal(rms_norm(x, weight, 1e-6), exact.float().bfloat16())


def test_norm_gradients():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    plain = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    upstream = torch.randn(3, 5, dtype=torch.float64)
    expected = torch.autograd.grad(plain, (x, weight), upstream)
    got = torch.autograd.grad(rms_norm(x, weight, 1e-6), (x, weight), upstream)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_rotation_pairs_j_with_j_plus_half_in_float32():
    x = torch.zeros(1, 2, 1, 128, dtype=torch.bfloat16)
    x[0, 1, 0, 3] = 1.0
    cos, sin = rotary_angles(torch.tensor([0, 50_000]), 42, 5e6)
    assert cos.dtype == torch.float32
    out = rotate(x, cos, sin)[0, 1, 0]
    angle = torch.tensor(50_000.0) * (1.0 / 5e6 ** (torch.tensor(6.0) / 42))
    assert out.nonzero().flatten().tolist() == [3, 24]
    assert out[3] == angle.cos().bfloat16()
    assert out[24] == angle.sin().bfloat16()


def test_rotation_gradient_is_the_opposite_rotation():
    x = torch.randn(1, 4, 2, 16, requires_grad=True)
    cos, sin = rotary_angles(torch.arange(4), 10, 100.0)
    upstream = torch.randn(1, 4, 2, 16)
    (grad,) = torch.autograd.grad(rotate(x, cos, sin), x, upstream)
    torch.testing.assert_close(rotate(grad, cos, sin), upstream)


def test_m7_meta_build_equals_direct_build(toy):
    poison = [torch.full((1 << 16,), float("nan")) for _ in range(50)]
    del poison
    with torch.device("meta"):
        decoder = Decoder(toy)
    initialize(decoder.to_empty(device="cpu"), 11)
    direct, ids = initialize(Decoder(toy), 11), torch.randint(0, 97, (1, 9))
    assert torch.equal(decoder(ids), direct(ids))
    assert list(decoder.buffers()) == []


def test_bfloat16_module_rotates_in_float32(toy):
    decoder = scrambled(toy)
    low, ids = copy.deepcopy(decoder).bfloat16(), torch.randint(0, 97, (1, 100))
    assert low(ids).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        mixed = decoder(ids)
    for got in (low(ids).float(), mixed):
        error = (got - decoder(ids)).norm() / decoder(ids).norm()
        assert error < 0.05


def test_documents_are_isolated_on_all_layers(toy):
    decoder, ids = scrambled(toy), torch.randint(0, 97, (1, 30))
    documents = (torch.arange(30) >= 13).long()[None]
    packed = decoder(ids, document_ids=documents)
    torch.testing.assert_close(packed[:, :13], decoder(ids[:, :13]), atol=1e-5, rtol=1e-5)
    # Rotary attention depends on distances alone, so the second document may start anywhere.
    torch.testing.assert_close(packed[:, 13:], decoder(ids[:, 13:]), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(packed[:, 13:], decoder(ids)[:, 13:], atol=1e-3)


def test_injected_linear_makes_every_layer_projection_but_not_the_head(toy):
    class Counted(nn.Linear):
        pass

    decoder = Decoder(toy, linear=Counted)
    assert sum(isinstance(m, Counted) for m in decoder.modules()) == 7 * 7 + 6
    assert type(decoder.lm_head) is nn.Linear
    assert decoder.get_output_embeddings() is decoder.lm_head
    assert decoder.get_input_embeddings() is decoder.embed_tokens


def test_single_batch_overfits():
    config = ModelConfig(31, 32, 64, 6, 4, 2, 8, window=4, init_std=0.1, rotary_percent=0.5)
    decoder = initialize(Decoder(config), 0)
    optimizer = torch.optim.Adam(decoder.parameters(), 3e-3)
    ids, mask = torch.randint(0, 31, (2, 21)), torch.ones(2, 20, dtype=torch.bool)
    for _ in range(60):
        total, count = decoder.lm_terms(decoder(ids[:, :-1]), ids[:, 1:], mask)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    assert (total / count).item() < 0.1


@pytest.mark.parametrize("bad", [-1, 97])
def test_token_ids_outside_the_vocabulary(toy, bad):
    with pytest.raises(ValueError, match=rf"token_ids holds {bad}, outside the vocabulary \[0, 97\)"):
        Decoder(toy)(torch.tensor([[1, bad]]))


def test_other_bad_input(toy, refuses):
    decoder, ids = Decoder(toy), torch.zeros(1, 513, dtype=torch.int64)
    with pytest.raises(ValueError, match="position 513, past max_positions=512"):
        decoder(ids)
    with refuses("document_ids has shape"):
        decoder(ids[:, :4], document_ids=torch.zeros(1, 5, dtype=torch.int64))
    with refuses("integer ids"):
        decoder(torch.zeros(1, 4))


@pytest.mark.compiles
@pytest.mark.parametrize("kernel", ["auto", "banded"])
def test_compiled_layers_are_whole_programs_with_every_kernel(kernel, caplog):
    torch.compiler.reset()
    config = ModelConfig(97, 32, 48, 3, 4, 2, 16, window=4, global_every=2, max_positions=64)
    decoder = initialize(Decoder(config, kernel=kernel), 3)
    counter = CompileCounter()
    for block in decoder.blocks():
        # An error where a layer would fall into parts.
        whole = torch.compile(block.forward, backend=counter, fullgraph=True)
        object.__setattr__(block, "forward", whole)
    ids = torch.arange(26).reshape(2, 13)
    with caplog.at_level("INFO", logger="zgcm_model"):
        for _ in range(3):
            decoder(ids).sum().backward()
    assert counter.frame_count <= 2  # window layers and global ones
    assert len(caplog.records) == (kernel == "auto")
