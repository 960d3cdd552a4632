import sys
from types import SimpleNamespace

import pytest
import torch

from zgcm_eval import LanguageModel, ScoringModel, evaluate_heldout
from zgcm_eval.adapters.zgcm import ZgcmLanguageModel, load_zgcm


class ByteTokenizer:
    eos_id = 256

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode(errors="replace")


@pytest.fixture
def model(decoder):
    return ZgcmLanguageModel(decoder, ByteTokenizer())


def test_it_is_a_language_model(model):
    assert isinstance(model, LanguageModel)
    assert isinstance(model, ScoringModel)
    assert (model.prefix_id, model.max_length) == (256, 64)
    assert model.decode(model.encode("Größe")) == "Größe"


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_scores_equal_the_full_log_softmax(decoder, chunk):
    model = ZgcmLanguageModel(decoder, ByteTokenizer(), chunk=chunk)
    token_ids = torch.randint(0, 257, (3, 20), generator=torch.Generator().manual_seed(1))
    logits = decoder.eval()(token_ids[:, :-1]) @ decoder.lm_head.weight.T
    expected = logits.log_softmax(-1).gather(2, token_ids[:, 1:, None])[..., 0]
    scores = model.token_scores(token_ids)
    torch.testing.assert_close(scores.log_probabilities, expected.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.log_probabilities, model.log_probabilities(token_ids))
    assert torch.equal(scores.greedy, logits.argmax(-1) == token_ids[:, 1:])


def test_inputs_are_padded_to_a_multiple_and_the_padding_is_not_scored(decoder, model):
    widths = []
    decoder.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    padded = ZgcmLanguageModel(decoder, ByteTokenizer(), length_multiple=8)
    token_ids = torch.randint(0, 257, (3, 20), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(padded.log_probabilities(token_ids), model.log_probabilities(token_ids))
    assert widths == [24, 19]


def test_evaluation_leaves_no_trace_in_training(decoder, model, heldout_sets):
    decoder.train()
    decoder.mixing.eval()
    state = torch.get_rng_state()
    first = evaluate_heldout(model, heldout_sets)
    assert torch.equal(torch.get_rng_state(), state)
    assert decoder.training
    assert decoder.dropout.training
    assert not decoder.mixing.training
    assert all(parameter.grad is None for parameter in decoder.parameters())
    decoder(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    assert evaluate_heldout(model, heldout_sets) == first


def test_modes_come_back_after_an_error(decoder, model):
    decoder.train()
    with pytest.raises(IndexError):
        model.log_probabilities(torch.full((1, 4), 9999))
    assert decoder.dropout.training


def test_generation_pads_at_the_left_and_ends_before_the_end_of_document(decoder, model, monkeypatch):
    # A stand-in for the two functions of zgcm_model; tests/integration continues with the real ones.
    def left_pad(prompts, pad_id):
        width = max(map(len, prompts))
        rows = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        return torch.tensor(rows), torch.tensor([width - len(prompt) for prompt in prompts])

    def generate(given, token_ids, max_new_tokens, *, stop_ids, padding):
        assert given is decoder
        assert not decoder.training
        assert (stop_ids, padding.tolist()) == ((256,), [0, 1])
        assert token_ids.tolist() == [[256, 1], [256, 256]]
        return torch.cat([token_ids, torch.tensor([[5, 6, 7], [5, 256, 256]])[:, :max_new_tokens]], dim=1)

    monkeypatch.setitem(sys.modules, "zgcm_model", SimpleNamespace(left_pad=left_pad, generate=generate))
    decoder.train()
    assert model.generate([[256, 1], [256]], 3) == [[5, 6, 7], [5]]
    assert decoder.training
    assert model.generate([], 3) == []


def test_a_tokenizer_without_an_end_of_document_needs_an_id(decoder):
    class Nameless(ByteTokenizer):
        eos_id = None

    with pytest.raises(ValueError, match="pass eos_id"):
        ZgcmLanguageModel(decoder, Nameless())
    assert ZgcmLanguageModel(decoder, Nameless(), eos_id=256).prefix_id == 256


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is missing"):
        load_zgcm(tmp_path / "nowhere", tmp_path / "tokenizer.json")


def test_a_missing_tokenizer_is_named(decoder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.json is missing; give the tokenizer\.json"):
        ZgcmLanguageModel(decoder, tmp_path / "none.json")


class SpecialTokenizer(ByteTokenizer):
    """Reads "<|endoftext|>" in a text as the end of a document unless told not to, as ``tokenizers`` does."""

    eos_id = None
    encode_special_tokens = False

    def token_to_id(self, token):
        return 256 if token == "<|endoftext|>" else None

    def no_truncation(self):
        self.truncation = None

    def no_padding(self):
        self.padding = None

    def encode(self, text):
        if self.encode_special_tokens:
            return super().encode(text)
        parts = [super(SpecialTokenizer, self).encode(part) for part in text.split("<|endoftext|>")]
        return [token_id for part in parts for token_id in [*part, 256]][:-1]


def test_the_end_of_a_document_written_in_a_text_is_text(decoder):
    tokenizer = SpecialTokenizer()
    assert tokenizer.encode("a<|endoftext|>b") == [97, 256, 98]
    model = ZgcmLanguageModel(decoder, tokenizer)
    assert model.prefix_id == 256
    assert model.encode("a<|endoftext|>b") == list(b"a<|endoftext|>b")
    assert tokenizer.encode("a<|endoftext|>b") == [97, 256, 98]
