import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zgcm_model import Decoder, DecoderCache, ModelConfig, Sampling, generate, initialize, left_pad
from zgcm_model.generate import choose


@pytest.fixture
def decoder(toy):
    return initialize(Decoder(toy), 9)


def test_m18_one_token_at_a_time_equals_one_forward_past_the_window(decoder):
    ids = torch.randint(0, 97, (2, 12))
    whole = decoder.logits(decoder(ids))
    cache = DecoderCache(decoder.config)
    for t in range(12):
        step = decoder.logits(decoder(ids[:, t : t + 1], cache=cache))
        torch.testing.assert_close(step[:, 0], whole[:, t], atol=1e-6, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=6), window=st.sampled_from([1, 4, 7, 100]))
def test_any_cut_into_chunks_equals_one_forward(cuts, window):
    config = ModelConfig(97, 32, 48, 6, 4, 2, 16, window=window, global_every=2)
    decoder = initialize(Decoder(config), 9)
    ids, cache = torch.randint(0, 97, (1, sum(cuts))), DecoderCache(config)
    parts = [decoder(part, cache=cache) for part in ids.split(cuts, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), decoder(ids), atol=1e-5, rtol=1e-5)


def test_cache_keeps_the_window_and_everything_on_global_layers(decoder):
    cache = DecoderCache(decoder.config)
    decoder(torch.randint(0, 97, (2, 30)), cache=cache)
    lengths = [layer.key.shape[1] for layer in cache.layers]
    assert lengths == [3, 3, 3, 3, 3, 30, 3]
    per_token = 2 * 2 * 2 * 16 * 4  # rows, key and value, heads, width, bytes
    assert cache.num_bytes() == per_token * sum(lengths)
    assert cache.layers[0].key.untyped_storage().nbytes() == per_token // 2 * 3


def test_full_size_cache_costs_20_kib_per_token_against_128():
    config = ModelConfig.preset("zgcm-1-7b")
    layer = 2 * config.kv_size * 2  # key and value in two bytes
    assert layer * config.num_global_layers == 20 * 1024
    assert layer * config.num_layers == 128 * 1024


def test_greedy_equals_argmax_of_full_forwards(decoder):
    ids = torch.randint(0, 97, (2, 3))
    expected = ids
    for _ in range(10):
        logits = decoder.logits(decoder(expected)[:, -1])
        expected = torch.cat((expected, logits.argmax(-1, keepdim=True)), 1)
    assert torch.equal(generate(decoder, ids, 10), expected)
    assert torch.equal(generate(decoder, ids, 0), ids)


def test_left_padding_changes_nothing(decoder):
    prompts = [[5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 3, 3, 8]]
    ids, padding = left_pad(prompts, pad_id=7)
    assert ids[0].tolist() == [7] * 8 + [5]
    together = generate(decoder, ids, 12, padding=padding)
    for row, prompt in enumerate(prompts):
        alone = generate(decoder, torch.tensor([prompt]), 12)
        assert together[row, padding[row] :].tolist() == alone[0].tolist()
    cache = DecoderCache(decoder.config, padding)
    batched = decoder.logits(decoder(ids, cache=cache)[:, -1])
    single = decoder.logits(decoder(torch.tensor([prompts[2]])))[0, -1]
    torch.testing.assert_close(batched[2], single, atol=1e-6, rtol=1e-5)


def test_stop_ids_end_rows_apart(decoder):
    ids = torch.randint(0, 97, (2, 3))
    free = generate(decoder, ids, 8)
    stop = int(free[0, 5])
    stopped = generate(decoder, ids, 8, stop_ids=[stop])
    first = free[0, 3:].tolist().index(stop) + 3
    assert stopped[0, : first + 1].tolist() == free[0, : first + 1].tolist()
    assert set(stopped[0, first:].tolist()) == {stop}
    assert generate(decoder, ids[:1], 8, stop_ids=[stop]).shape[1] == first + 1


def test_sampling_follows_temperature_and_top_p():
    logits = torch.tensor([[0.6, 0.3, 0.1]]).log().expand(4000, 3)
    random = torch.Generator().manual_seed(0)
    counts = choose(logits, Sampling(1.0), random).bincount(minlength=3) / 4000
    torch.testing.assert_close(counts, torch.tensor([0.6, 0.3, 0.1]), atol=0.03, rtol=0)
    cut = choose(logits, Sampling(1.0, top_p=0.65), random).bincount(minlength=3) / 4000
    torch.testing.assert_close(cut, torch.tensor([2 / 3, 1 / 3, 0.0]), atol=0.03, rtol=0)
    assert choose(logits, Sampling(1.0, top_p=0.01), random).unique().tolist() == [0]
    hot = choose(logits, Sampling(100.0), random).bincount(minlength=3) / 4000
    torch.testing.assert_close(hot, torch.full((3,), 1 / 3), atol=0.03, rtol=0)


def test_seed_repeats_sampling(decoder):
    ids = torch.randint(0, 97, (2, 3))
    first, again, other = (generate(decoder, ids, 20, sampling=Sampling(1.0, seed=s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.slow
def test_m21_compiled_model_generates_the_same_ids_and_gradients():
    # In a process of its own: checked shapes and compilation do not go together.
    script = Path(__file__).with_name("compiled_equals_eager.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "same 64 ids" in done.stdout
    assert "same gradients" in done.stdout


def test_bad_input(decoder):
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"max_new_tokens=600 need 603 positions, past max_positions=512"):
        generate(decoder, ids, 600)
    with pytest.raises(ValueError, match="max_new_tokens=-1"):
        generate(decoder, ids, -1)
    with pytest.raises(ValueError, match="empty prompts"):
        generate(decoder, ids[:, :0], 1)
    with pytest.raises(ValueError, match=r"padding=\[3\]"):
        generate(decoder, ids, 1, padding=torch.tensor([3]))
    with pytest.raises(ValueError, match="temperature=-1"):
        Sampling(-1.0)
    with pytest.raises(ValueError, match="top_p=0"):
        Sampling(1.0, top_p=0.0)
    with pytest.raises(ValueError, match="empty prompt"):
        left_pad([[1], []])
    with pytest.raises(ValueError, match="cannot be used with a cache"):
        decoder(ids, document_ids=ids, cache=DecoderCache(decoder.config))
