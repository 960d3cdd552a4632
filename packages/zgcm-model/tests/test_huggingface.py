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


def published_forward(folder, ids):
    """Read a published folder with nothing of this package and follow the published equations."""
    config = json.loads((folder / "config.json").read_text())
    weights = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}
    head, eps, time = config["head_dim"], config["rms_norm_eps"], ids.shape[1]
    half = int(head * config["partial_rotary_factor"]) // 2
    angle = torch.arange(time)[:, None] * config["rope_theta"] ** (-torch.arange(half).double() / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    distance = torch.arange(time)[:, None] - torch.arange(time)

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weights[name + ".weight"]

    def turn(x):
        a, b = x[..., :half], x[..., half : 2 * half]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), -1)

    x = weights["model.embed_tokens.weight"][ids]
    for layer, kind in enumerate(config["layer_types"]):
        name = f"model.layers.{layer}."
        a = norm(x, name + "post_attention_layernorm")  # before attention, whatever its name says
        q, k, v = (
            (a @ weights[f"{name}self_attn.{p}_proj.weight"].T).unflatten(-1, (-1, head)) for p in "qkv"
        )
        q, k = turn(norm(q, name + "self_attn.q_norm")), turn(norm(k, name + "self_attn.k_norm"))
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
        seen = (distance >= 0) & ((kind == "full_attention") | (distance < config["sliding_window"]))
        scores = torch.einsum("binh,bjnh->bnij", q, k) / head**0.5
        out = torch.einsum("bnij,bjnh->binh", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(2)
        if config["attention_gate_layers"][layer]:
            out = out * torch.sigmoid(a @ weights[name + "self_attn.g_proj.weight"].T)
        x = x + out @ weights[name + "self_attn.o_proj.weight"].T
        m = norm(x, name + "post_feedforward_layernorm")
        gate, up = (m @ weights[f"{name}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ weights[name + "mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ weights["lm_head.weight"].T


def test_m17_norm_names_survive_an_independent_reader(toy, tmp_path):
    decoder = initialize(Decoder(toy), 2)
    with torch.no_grad():
        for block in decoder.blocks():  # scales that differ, or a swap would not show
            block.attention_norm.weight.mul_(1.7)
            block.feed_forward_norm.weight.mul_(0.4)
    save_pretrained(decoder, tmp_path)
    ids = torch.randint(0, 97, (2, 60))
    expected = published_forward(tmp_path, ids)
    torch.testing.assert_close(decoder.logits(decoder(ids)).double(), expected, atol=1e-5, rtol=0)


def test_end_of_document_id_is_written_for_other_programs(toy, tmp_path):
    save_pretrained(initialize(Decoder(toy), 2), tmp_path, eos_id=3)
    content = json.loads((tmp_path / "config.json").read_text())
    assert (content["model_type"], content["eos_token_id"], content["pad_token_id"]) == ("zgcm", 3, 3)
    assert load_pretrained(tmp_path).config == toy


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
