import pytest
import torch

from zgcm_model import Decoder, ModelConfig, initialize
from zgcm_model.interchange.megatron import from_megatron, fuse_attention, split_attention, to_megatron


@pytest.fixture
def config():
    return ModelConfig(97, 32, 48, 7, 8, 4, 16, window=4, max_positions=512)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_m14_round_trip_is_exact(config, ranks):
    decoder = initialize(Decoder(config), 6)
    shards = to_megatron(decoder, ranks)
    state = from_megatron(shards, config)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(state.pop(name), parameter), name
    assert state == {}


@pytest.mark.parametrize("ranks", [1, 2])
def test_m14_logits_are_equal_for_four_query_and_two_key_heads(toy, ranks):
    decoder, ids = initialize(Decoder(toy), 6), torch.randint(0, 97, (1, 20))
    rebuilt = Decoder(toy)
    rebuilt.load_state_dict(from_megatron(to_megatron(decoder, ranks), toy), strict=True)
    torch.testing.assert_close(rebuilt.logits(rebuilt(ids)), decoder.logits(decoder(ids)), atol=1e-5, rtol=0)


def test_rows_follow_the_published_order():
    def rows(tag, heads):  # row value: tag * 100 + head
        return torch.tensor([[tag * 100.0 + head] for head in range(heads) for _ in range(2)])

    fused = fuse_attention(rows(1, 4), rows(2, 4), rows(3, 2), rows(4, 2), kv_heads=2)
    expected = [100, 101, 200, 201, 300, 400, 102, 103, 202, 203, 301, 401]
    assert fused[::2, 0].tolist() == expected
    query, gate, key, value = split_attention(fused, True, 4, 2)
    assert torch.equal(query, rows(1, 4))
    assert torch.equal(gate, rows(2, 4))
    assert torch.equal(key, rows(3, 2))
    assert torch.equal(value, rows(4, 2))
    plain = fuse_attention(rows(1, 4), None, rows(3, 2), rows(4, 2), kv_heads=2)
    assert plain[::2, 0].tolist() == [100, 101, 300, 400, 102, 103, 301, 401]


def test_each_rank_holds_its_own_gate_above_its_own_up(config):
    decoder = initialize(Decoder(config), 6)
    second = to_megatron(decoder, 2)[1]["decoder.layers.0.mlp.linear_fc1.weight"]
    ff = decoder.layers[0].feed_forward
    assert torch.equal(second, torch.cat((ff.gate_proj.weight[24:], ff.up_proj.weight[24:])))
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in to_megatron(decoder)[0]


def test_m4_save_at_tp2_load_at_tp4_keeps_the_loss():
    config = ModelConfig(10, 32, 48, 6, 8, 4, 16, window=4)
    decoder, ids = initialize(Decoder(config), 6), torch.randint(0, 10, (2, 12))
    mask = torch.ones(2, 11, dtype=torch.bool)
    two = to_megatron(decoder, 2, vocab_multiple=4)
    assert sum(rank["output_layer.weight"].shape[0] for rank in two) == 16
    middle = Decoder(config)
    middle.load_state_dict(from_megatron(two, config))
    again = Decoder(config)
    again.load_state_dict(from_megatron(to_megatron(middle, 4, vocab_multiple=4), config))
    before = decoder.lm_terms(decoder(ids[:, :-1]), ids[:, 1:], mask)[0]
    after = again.lm_terms(again(ids[:, :-1]), ids[:, 1:], mask)[0]
    torch.testing.assert_close(after, before, atol=1e-6, rtol=0)
    assert again.lm_head.weight.shape[0] == 10


def test_m15_fewer_key_heads_than_ranks_is_refused(toy):
    with pytest.raises(ValueError, match="num_kv_heads=2 does not divide over tensor_parallel=4"):
        to_megatron(Decoder(toy), 4)


def test_m9_drifted_norms_and_wrong_files_are_refused(toy):
    def shards():
        return to_megatron(Decoder(toy), 2)

    drifted = shards()
    name = "decoder.layers.3.self_attention.q_layernorm.weight"
    drifted[1][name] += 1e-3
    with pytest.raises(ValueError, match=f"{name} differs between ranks"):
        from_megatron(drifted, toy)
    missing = shards()
    del missing[1]["decoder.layers.2.mlp.linear_fc2.weight"]
    with pytest.raises(ValueError, match=r"linear_fc2.weight is missing on rank 1"):
        from_megatron(missing, toy)
    extra = shards()
    extra[0]["decoder.layers.7.mlp.linear_fc2.weight"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"layers.7.mlp.linear_fc2.weight is unexpected"):
        from_megatron(extra, toy)
    gated = shards()
    fused = "decoder.layers.5.self_attention.linear_qkv.weight"
    gated[0][fused] = torch.cat((gated[0][fused], torch.zeros(32, 32)))
    with pytest.raises(ValueError, match=r"layers.5.*rows instead of.*layer 5 must be global, without gate"):
        from_megatron(gated, toy)
    with pytest.raises(ValueError, match="has 256 rows, below the vocabulary of 300"):
        from_megatron(shards(), ModelConfig(300, 32, 48, 7, 4, 2, 16, window=4))
    with pytest.raises(ValueError, match="no multiple of"):
        split_attention(torch.zeros(13, 4), True, 4, 2)
