"""zgcm_eval measures a real zgcm_model decoder with a real tokenizer."""

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zgcm_eval import HeldoutDocument, HeldoutOptions, HeldoutSet, evaluate_heldout
from zgcm_eval.adapters.specification import load_model
from zgcm_eval.adapters.zgcm import ZgcmLanguageModel
from zgcm_model import Decoder, ModelConfig, initialize, save_pretrained
from zgcm_model.parallel import apply_tensor_parallel
from zgcm_testing import run_ranks

END = "<|endoftext|>"


@pytest.fixture
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    result = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([END])
    return result


@pytest.fixture
def decoder():
    config = ModelConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        window=8,
        max_positions=96,
    )
    result = Decoder(config)
    initialize(result, seed=1)
    return result


@pytest.fixture
def sets():
    texts = [f"def f_{n}(x):\n    return x + {n}\n" * (1 + n % 5) for n in range(8)]
    texts.append(f"the text may hold {END} as text")
    return [HeldoutSet("code", tuple(HeldoutDocument(str(n), text) for n, text in enumerate(texts)))]


def test_held_out_nats_equal_the_log_softmax_of_each_document(decoder, tokenizer, sets):
    model = ZgcmLanguageModel(decoder, tokenizer)
    report = evaluate_heldout(model, sets, HeldoutOptions(context=96))
    for document, score in zip(sets[0].documents, report.domains[0].documents, strict=True):
        token_ids = torch.tensor([[256, *model.encode(document.text)]])[:, :97]
        with torch.no_grad():
            logits = decoder.logits(decoder(token_ids[:, :-1])).log_softmax(-1)
        expected = -logits.gather(2, token_ids[:, 1:, None]).sum().item()
        assert model.decode(token_ids[0, 1:].tolist()) == document.text[:96]
        assert score.tokens == score.bytes
        if score.tokens <= 96:
            assert score.nats == pytest.approx(expected, rel=1e-5)


def test_the_batch_size_changes_nothing(decoder, tokenizer, sets):
    model = ZgcmLanguageModel(decoder, tokenizer)
    alone, together = (
        evaluate_heldout(model, sets, HeldoutOptions(context=40, tokens_per_batch=size))
        for size in (1, 10_000)
    )
    for one, many in zip(alone.total.documents, together.total.documents, strict=True):
        assert one.nats / one.tokens == pytest.approx(many.nats / many.tokens, abs=1e-5)


def test_a_saved_model_is_loaded_by_name_and_measures_the_same(decoder, tokenizer, sets, tmp_path):
    save_pretrained(decoder, tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    expected = evaluate_heldout(ZgcmLanguageModel(decoder, tokenizer), sets)
    assert evaluate_heldout(load_model(f"zgcm:{tmp_path}"), sets) == expected


def test_generation_takes_the_most_probable_token_of_each_step(decoder, tokenizer):
    model = ZgcmLanguageModel(decoder, tokenizer)
    prompts = [[256, *model.encode("def f")], [256, *model.encode("x")]]
    for prompt, new in zip(prompts, model.generate(prompts, 12), strict=True):
        assert 256 not in new
        scores = model.token_scores(torch.tensor([[*prompt, *new]]))
        assert scores.greedy[0, len(prompt) - 1 :].all()


def test_evaluation_in_the_middle_of_training_changes_nothing(decoder, tokenizer, sets):
    def losses(evaluate):
        torch.manual_seed(0)
        initialize(decoder, seed=1)
        optimizer = torch.optim.SGD(decoder.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            if evaluate:
                evaluate_heldout(ZgcmLanguageModel(decoder, tokenizer), sets)
            token_ids = torch.randint(0, 257, (2, 33))
            loss = torch.nn.functional.cross_entropy(
                decoder.logits(decoder(token_ids[:, :-1])).flatten(0, 1), token_ids[:, 1:].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses(evaluate=True) == losses(evaluate=False)


def assert_same(report, expected):
    for one, other in zip(report.total.documents, expected.total.documents, strict=True):
        assert (one.id, one.tokens) == (other.id, other.tokens)
        assert one.nats / one.tokens == pytest.approx(other.nats / other.tokens, abs=1e-5)


def test_e6_a_fully_sharded_decoder_measures_the_same(decoder, tokenizer, sets):
    options = HeldoutOptions(context=40, tokens_per_batch=100)
    expected = evaluate_heldout(ZgcmLanguageModel(decoder, tokenizer), sets, options)

    def on_rank(rank, world):
        for block in decoder.blocks():
            fully_shard(block)
        fully_shard(decoder)
        model = ZgcmLanguageModel(decoder, tokenizer)
        return [evaluate_heldout(model, sets, options, group=dist.group.WORLD) for _ in range(2)]

    for reports in run_ranks(on_rank, 2):
        for report in reports:
            assert_same(report, expected)


def test_e6_a_tensor_parallel_decoder_measures_the_same(decoder, tokenizer, sets):
    expected = evaluate_heldout(ZgcmLanguageModel(decoder, tokenizer), sets)

    def on_rank(rank, world):
        apply_tensor_parallel(decoder, init_device_mesh("cpu", (world,)))
        return evaluate_heldout(ZgcmLanguageModel(decoder, tokenizer, length_multiple=world), sets)

    for report in run_ranks(on_rank, 2):
        assert_same(report, expected)
