"""The adapter against a stand-in called like a ``transformers`` model; tests/extras checks the real one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from zgcm_eval import LanguageModel, ScoringModel
from zgcm_eval.adapters import huggingface
from zgcm_eval.adapters.huggingface import HuggingFaceLanguageModel


class StandIn(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder
        self.config = SimpleNamespace(max_position_embeddings=64, vocab_size=257)
        self.calls = []

    def forward(self, input_ids, use_cache):
        self.calls.append(tuple(input_ids.shape))
        return SimpleNamespace(logits=self.decoder(input_ids) @ self.decoder.lm_head.weight.T)

    def generate(self, *, input_ids, attention_mask, eos_token_id, max_new_tokens, **settings):
        assert settings == {"do_sample": False, "num_beams": 1, "pad_token_id": 256}
        assert attention_mask.all()
        new = torch.tensor([[65, 66, eos_token_id[-1], 67]])[:, :max_new_tokens]
        return torch.cat([input_ids, new], dim=1)


class Tokenizer:
    bos_token_id = 256
    eos_token_id = 255

    def encode(self, text, *, add_special_tokens, split_special_tokens):
        assert not add_special_tokens
        assert split_special_tokens
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode()


@pytest.fixture
def stand_in(decoder):
    return StandIn(decoder)


@pytest.mark.parametrize("at_once", [1, 257 * 40, 2**27])
def test_scores_equal_the_log_softmax_however_many_rows_go_at_once(stand_in, monkeypatch, at_once):
    monkeypatch.setattr(huggingface, "LOGITS_AT_ONCE", at_once)
    model = HuggingFaceLanguageModel(stand_in, Tokenizer())
    token_ids = torch.randint(0, 257, (4, 20), generator=torch.Generator().manual_seed(1))
    stand_in.eval()
    logits = stand_in(token_ids[:, :-1], use_cache=False).logits
    stand_in.train()
    scores = model.token_scores(token_ids)
    assert stand_in.decoder.dropout.training
    expected = logits.log_softmax(-1).gather(2, token_ids[:, 1:, None])[..., 0].detach()
    torch.testing.assert_close(scores.log_probabilities, expected)
    torch.testing.assert_close(model.log_probabilities(token_ids), expected)
    assert torch.equal(scores.greedy, logits.argmax(-1) == token_ids[:, 1:])
    assert len(stand_in.calls) - 1 == 2 * {1: 4, 257 * 40: 2, 2**27: 1}[at_once]


def test_it_is_a_language_model_and_stops_at_the_end_of_sequence(stand_in):
    model = HuggingFaceLanguageModel(stand_in, Tokenizer())
    assert isinstance(model, LanguageModel)
    assert isinstance(model, ScoringModel)
    assert model.generate([[256, 1], [256, 2]], 4) == [[65, 66], [65, 66]]
    assert model.decode(model.encode("Größe")) == "Größe"


def test_e4_the_prefix_is_the_beginning_of_sequence_or_else_its_end(stand_in):
    tokenizer = Tokenizer()
    assert HuggingFaceLanguageModel(stand_in, tokenizer).prefix_id == 256
    tokenizer.bos_token_id = None
    assert HuggingFaceLanguageModel(stand_in, tokenizer).prefix_id == 255
    assert HuggingFaceLanguageModel(stand_in, tokenizer, prefix_id=0, max_length=9).prefix_id == 0
    tokenizer.eos_token_id = None
    with pytest.raises(ValueError, match="do not say prefix_id; pass it"):
        HuggingFaceLanguageModel(stand_in, tokenizer)
