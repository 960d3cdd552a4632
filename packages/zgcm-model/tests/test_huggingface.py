import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from zgcm_model import Decoder, ModelConfig, initialize, load_pretrained, load_weights, save_pretrained


@pytest.fixture
def saved(toy, tmp_path):
    decoder = initialize(Decoder(toy), 2)
    save_pretrained(decoder, tmp_path)
    return decoder, tmp_path


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_published_names_and_exact_round_trip(saved):
    decoder, folder = saved
    names = set(load_file(folder / "model.safetensors"))
    assert len(names) == 3 + 7 * 11 + 6
    assert "model.layers.0.post_attention_layernorm.weight" in names
    assert "model.layers.0.post_feedforward_layernorm.weight" in names
    assert "model.layers.0.self_attn.g_proj.weight" in names
    assert "model.layers.5.self_attn.g_proj.weight" not in names
    assert not any("input_layernorm" in name for name in names)
    loaded = load_pretrained(folder)
    for a, b in zip(decoder.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_the_full_size_has_the_published_shapes():
    from zgcm_model.interchange.names import published_parameters

    with torch.device("meta"):
        shapes = {
            k: tuple(v.shape)
            for k, v in published_parameters(Decoder(ModelConfig.preset("zgcm-1-7b-published"))).items()
        }
    assert len(shapes) == 382
    assert shapes["lm_head.weight"] == shapes["model.embed_tokens.weight"] == (155_136, 4096)
    assert shapes["model.layers.31.self_attn.k_proj.weight"] == (1024, 4096)
    assert shapes["model.layers.31.self_attn.g_proj.weight"] == (4096, 4096)
    assert shapes["model.layers.31.mlp.down_proj.weight"] == (4096, 11_008)
    assert shapes["model.layers.31.self_attn.q_norm.weight"] == (128,)


def test_m19_round_trip_at_positions_0_and_50(saved):
    decoder, folder = saved
    ids = torch.randint(0, 97, (1, 51))
    loaded = load_pretrained(folder)
    ours, theirs = decoder.logits(decoder(ids)), loaded.logits(loaded(ids))
    assert torch.equal(ours[:, 0], theirs[:, 0])
    assert torch.equal(ours[:, 50], theirs[:, 50])


def test_sharded_files_with_an_index(toy, tmp_path):
    decoder = initialize(Decoder(toy), 2).bfloat16()
    save_pretrained(decoder, tmp_path, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == 2 * toy.num_parameters()
    loaded = load_pretrained(tmp_path)
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), loaded.parameters(), strict=True))
    assert load_pretrained(tmp_path, dtype=torch.float32).lm_head.weight.dtype == torch.float32


def test_m16_gate_on_a_global_layer_or_missing_on_a_window_layer(saved):
    _, folder = saved
    extra = "model.layers.5.self_attn.g_proj.weight"
    edit(folder, lambda t: t.update({extra: torch.zeros(64, 32)}))
    with pytest.raises(ValueError, match=f"unexpected: {extra}"):
        load_pretrained(folder)
    gone = "model.layers.0.self_attn.g_proj.weight"
    edit(folder, lambda t: (t.pop(extra), t.pop(gone)))
    with pytest.raises(ValueError, match=f"missing: {gone}; unexpected: none"):
        load_pretrained(folder)


def test_another_vocabulary_is_refused(saved):
    _, folder = saved
    edit(folder, lambda t: t.update({"lm_head.weight": torch.zeros(98, 32)}))
    with pytest.raises(ValueError, match=r"lm_head.weight is stored with shape \[98, 32\].*\[97, 32\]"):
        load_pretrained(folder)


def test_truncated_or_missing_files_are_named(saved):
    _, folder = saved
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors is truncated"):
        load_pretrained(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"model.safetensors does not exist"):
        load_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is no JSON"):
        load_pretrained(folder)


def test_m4_vocabulary_padding_never_changes_the_loss(toy, saved):
    decoder, folder = saved
    ids, mask = torch.randint(0, 97, (2, 20)), torch.ones(2, 19, dtype=torch.bool)
    expected = decoder.lm_terms(decoder(ids[:, :-1]), ids[:, 1:], mask)[0]
    padded = load_pretrained(folder, vocab_rows=128)
    assert padded.config.vocab_padding == 31
    assert padded.lm_head.weight.shape[0] == 128
    got = padded.lm_terms(padded(ids[:, :-1]), ids[:, 1:], mask)[0]
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    assert padded.logits(padded(ids)).shape[-1] == 97
    with pytest.raises(ValueError, match="token_ids holds 97"):
        padded(torch.tensor([[97]]))
    save_pretrained(padded, folder / "again")
    assert load_pretrained(folder / "again").config == toy
    load_weights(padded, folder / "again")
    with pytest.raises(ValueError, match="vocab_rows=50"):
        load_pretrained(folder, vocab_rows=50)
