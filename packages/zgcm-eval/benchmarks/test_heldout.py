"""Held-out scoring against lm-evaluation-harness, on one model and the same documents.

Both score every token of 64 documents of log-normal length with a small Llama model on the CPU. The harness's own
model class (``HFLM.loglikelihood_rolling``) is the peer, at three batch sizes. Run with ``nox -s bench -- eval``.
"""

import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from zgcm_eval import HeldoutDocument, HeldoutOptions, HeldoutSet, evaluate_heldout
from zgcm_eval.adapters.huggingface import HuggingFaceLanguageModel

CONTEXT = 256


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(0)
    lengths = [min(2000, int(rng.lognormvariate(5.0, 1.0)) + 5) for _ in range(64)]
    return ["".join(rng.choices("abcdefgh \n", k=length)) for length in lengths]


@pytest.fixture(scope="module")
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=256,
    )
    return LlamaForCausalLM(config).eval()


def test_zgcm_eval(benchmark, model, tokenizer, texts):
    adapter = HuggingFaceLanguageModel(model, tokenizer)
    sets = [HeldoutSet("d", tuple(HeldoutDocument(str(n), text) for n, text in enumerate(texts)))]
    options = HeldoutOptions(context=CONTEXT, overlap=0)
    report = benchmark.pedantic(evaluate_heldout, (adapter, sets, options), rounds=3, warmup_rounds=1)
    benchmark.extra_info["nats of the documents that fit"] = sum(
        score.nats for score in report.total.documents if score.tokens < CONTEXT
    )


@pytest.mark.parametrize("batch_size", [1, 8, 32])
def test_lm_evaluation_harness(benchmark, model, tokenizer, texts, batch_size):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    peer = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=CONTEXT)
    requests = [Instance("loglikelihood_rolling", {}, (text,), n) for n, text in enumerate(texts)]
    found = benchmark.pedantic(peer.loglikelihood_rolling, (requests, True), rounds=3, warmup_rounds=1)
    fitting = (value for value, text in zip(found, texts, strict=True) if len(text) < CONTEXT)
    benchmark.extra_info["nats of the documents that fit"] = -sum(fitting)
