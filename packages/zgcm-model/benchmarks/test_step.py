"""A training step of this model against transformers' Qwen3 with the same sizes and window pattern.

Our model does a little more work: its ten window layers carry gates, which Qwen3 does not have.
"""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from zgcm_model import Decoder, ModelConfig, initialize

CONFIG = ModelConfig(8192, 512, 1376, 12, 8, 2, 64)


def our_step(time, config=CONFIG):
    decoder = initialize(Decoder(config), 0)
    row, mask = torch.randint(0, 8192, (1, time + 1)), torch.ones(1, time, dtype=torch.bool)

    def work():
        decoder.zero_grad()
        total, count = decoder.lm_terms(decoder(row[:, :-1]), row[:, 1:], mask)
        (total / count).backward()

    return work


def qwen3_step(time, config):
    kinds = [
        "full_attention" if config.is_global(i) else "sliding_attention" for i in range(config.num_layers)
    ]
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            use_sliding_window=True,
            sliding_window=config.window,
            layer_types=kinds,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
            use_cache=False,
        )
    )
    ids = torch.randint(0, 8192, (1, time))

    def work():
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()

    return work


# At 16,384 positions twelve layers of Qwen3 need more than 20 GiB, so both sides have six there.
@pytest.mark.parametrize(
    ("time", "layers", "wanted", "rounds"), [(1024, 12, 1.1, 4), (4096, 12, 1.6, 2), (16384, 6, 3.0, 1)]
)
def test_step_against_qwen3(time, layers, wanted, rounds, race, report):
    config = replace(CONFIG, num_layers=layers)
    ours, theirs = race(our_step(time, config), qwen3_step(time, config), rounds=rounds)
    ratio = theirs / ours
    report(
        f"T={time}: {time / ours:,.0f} tokens/s, Qwen3 {time / theirs:,.0f}, ratio {ratio:.2f}",
        ours=time / ours,
        theirs=time / theirs,
        ratio=ratio,
    )
    assert ratio >= wanted


def test_peak_memory_of_a_step_is_linear_in_length(peak_bytes, report, benchmark):
    sizes = {time: peak_bytes(our_step(time)) for time in (1024, 2048, 4096)}
    benchmark.pedantic(lambda: None, rounds=1)
    first, second = sizes[2048] - sizes[1024], sizes[4096] - sizes[2048]
    line = ", ".join(f"T={time}: {size / 2**20:.0f} MiB" for time, size in sizes.items())
    report(
        f"peak memory of a step {line}; slope ratio {second / first:.2f} (2 is linear)", ratio=second / first
    )
    assert second / first <= 2.2
