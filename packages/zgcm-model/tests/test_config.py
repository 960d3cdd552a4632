import pytest
import torch

from zgcm_model import Decoder, ModelConfig, padded_vocab_size


def test_m3_parameter_count():
    config = ModelConfig.preset("zgcm-1-7b")
    assert config.num_parameters() == 7_392_735_232
    assert ModelConfig.preset("zgcm-1-7b-published").num_parameters() == 7_394_832_384
    assert sum(config.parameter_breakdown().values()) == config.num_parameters()
    with torch.device("meta"):
        decoder = Decoder(config)
    assert all(p.is_meta for p in decoder.parameters())
    assert sum(p.numel() for p in decoder.parameters()) == 7_392_735_232
    assert len(list(decoder.parameters())) == 382


@pytest.mark.parametrize("name", ["zgcm-1-7b", "zgcm-1-7b-published", "zgcm-1-tiny"])
def test_presets_count_what_they_build(name):
    config = ModelConfig.preset(name)
    with torch.device("meta"):
        assert sum(p.numel() for p in Decoder(config).parameters()) == config.num_parameters()


def test_global_layers_are_every_sixth():
    config = ModelConfig.preset("zgcm-1-7b")
    assert [i for i in range(32) if config.is_global(i)] == [5, 11, 17, 23, 29]
    assert config.num_global_layers == 5
    assert config.layer_window(0) == 128
    assert config.layer_window(5) is None
    assert config.rotary_dim == 42


def test_gate_on_window_layers_only(toy):
    gates = [block.attention.g_proj is not None for block in Decoder(toy).blocks()]
    assert gates == [True] * 5 + [False, True]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window", 0),
        ("num_kv_heads", 3),
        ("num_layers", 0),
        ("hidden_size", 2.5),
        ("vocab_size", True),
        ("rotary_percent", 0.0),
        ("rotary_percent", 1.5),
        ("rotary_base", 0.0),
        ("norm_eps", -1e-6),
        ("vocab_padding", 8192),
    ],
)
def test_bad_values_name_field_and_value(field, value, refuses):
    with refuses(rf"{field}={value!r}.*; set"):
        ModelConfig.preset("zgcm-1-tiny", **{field: value})


def test_unknown_preset_and_override():
    with pytest.raises(ValueError, match="zgcm-1-8b"):
        ModelConfig.preset("zgcm-1-8b")
    with pytest.raises(ValueError, match="windows"):
        ModelConfig.preset("zgcm-1-tiny", windows=3)


def test_m4_padded_vocabulary_follows_tensor_parallel():
    sizes = [padded_vocab_size(154_856, tp) for tp in (1, 2, 4, 8)]
    assert sizes == [154_880, 154_880, 155_136, 155_648]
    with pytest.raises(ValueError, match="tensor_parallel=0"):
        padded_vocab_size(10, 0)


def test_config_json_round_trip_and_refusals():
    config = ModelConfig.preset("zgcm-1-7b-published")
    content = config.to_huggingface()
    assert content["layer_types"].count("full_attention") == 5
    assert content["attention_gate_layers"][5] is False
    assert ModelConfig.from_huggingface(content) == config
    with pytest.raises(ValueError, match="layer_types has 'full_attention' at layer 0"):
        ModelConfig.from_huggingface({**content, "layer_types": ["full_attention"] * 32})
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        ModelConfig.from_huggingface({**content, "tie_word_embeddings": True})
    del content["head_dim"]
    with pytest.raises(ValueError, match="head_dim is missing"):
        ModelConfig.from_huggingface(content)
