"""Runs with the extra [huggingface] installed: ``pytest packages/zgcm-eval/tests/extras/check_huggingface.py``."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from zgcm_eval import HeldoutOptions, ScoringModel, evaluate_heldout
from zgcm_eval.adapters.specification import load_model


@pytest.fixture
def saved(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    fast.save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_model_is_measured_and_batches_do_not_matter(saved, heldout_sets):
    model = load_model(f"hf:{saved}")
    assert isinstance(model, ScoringModel)
    assert (model.prefix_id, model.max_length) == (256, 64)
    reports = [
        evaluate_heldout(model, heldout_sets, HeldoutOptions(context=48, tokens_per_batch=size))
        for size in (1, 4096)
    ]
    assert reports[0].total.tokens == reports[0].total.bytes
    for one, many in zip(reports[0].total.documents, reports[1].total.documents, strict=True):
        assert one.nats == pytest.approx(many.nats, abs=1e-4, rel=1e-6)


def test_the_end_of_a_document_written_in_a_text_is_text(saved):
    model = load_model(f"hf:{saved}")
    text = "a<|endoftext|>b"
    assert 256 not in model.encode(text)
    assert model.decode(model.encode(text)) == text


def test_generation_is_the_argmax_of_each_step(saved):
    model = load_model(f"hf:{saved}")
    prompt = [256, *model.encode("def f")]
    (new,) = model.generate([prompt], 6)
    token_ids = torch.tensor([[*prompt, *new, 0]])
    assert model.token_scores(token_ids).greedy[0, len(prompt) - 1 : len(prompt) - 1 + len(new)].all()
