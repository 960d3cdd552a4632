"""Small language models whose every probability is known."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from zgcm_eval import HeldoutDocument, HeldoutSet, TokenScores


class TableModel:
    """Bytes as tokens, id 256 ends a document; a hash of the last ``order`` picks a row of logits."""

    prefix_id = 256
    vocab_size = 257

    def __init__(self, max_length: int = 64, order: int = 3, seed: int = 0) -> None:
        self.max_length = max_length
        self.order = order
        self.table = torch.randn(997, self.vocab_size, generator=torch.Generator().manual_seed(seed))
        self.seen: list[Tensor] = []

    def logits(self, token_ids: Tensor) -> Tensor:
        state = torch.zeros_like(token_ids)
        for back in range(self.order):
            earlier = torch.roll(token_ids, back, dims=1) + 1
            earlier[:, :back] = 0
            state = (state * 263 + earlier) % 997
        return self.table[state]

    def token_scores(self, token_ids: Tensor) -> TokenScores:
        assert token_ids.shape[1] <= self.max_length + 1
        self.seen.append(token_ids)
        logits, targets = self.logits(token_ids[:, :-1]), token_ids[:, 1:]
        values = logits.log_softmax(-1).gather(2, targets.unsqueeze(2)).squeeze(2)
        return TokenScores(values, logits.argmax(-1) == targets)

    def log_probabilities(self, token_ids: Tensor) -> Tensor:
        return self.token_scores(token_ids).log_probabilities

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        results = []
        for prompt in prompts:
            token_ids = list(prompt)
            for _ in range(max_new_tokens):
                token_id = int(self.logits(torch.tensor([token_ids]))[0, -1].argmax())
                if token_id == self.prefix_id:
                    break
                token_ids.append(token_id)
            results.append(token_ids[len(prompt) :])
        return results

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


class UniformModel(TableModel):
    """Gives each of ``choices`` tokens the same probability."""

    def __init__(self, choices: int) -> None:
        super().__init__(max_length=1024)
        self.choices = choices

    def token_scores(self, token_ids: Tensor) -> TokenScores:
        shape = (token_ids.shape[0], token_ids.shape[1] - 1)
        return TokenScores(torch.full(shape, -math.log(self.choices)), torch.zeros(shape, dtype=torch.bool))


class WindowDecoder(nn.Module):
    """Causal decoder with the interface of ``zgcm_model.Decoder``; token i sees the four ids up to i."""

    def __init__(self, vocab_size: int = 257, width: int = 16) -> None:
        super().__init__()
        self.config = type("Config", (), {"max_positions": 64})()
        self.embedding = nn.Embedding(vocab_size, width)
        self.mixing = nn.Conv1d(width, width, 4)
        self.dropout = nn.Dropout(0.5)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        states = nn.functional.pad(self.embedding(token_ids).transpose(1, 2), (3, 0))
        return self.dropout(torch.tanh(self.mixing(states).transpose(1, 2)))


@pytest.fixture
def table_model() -> TableModel:
    return TableModel()


@pytest.fixture
def uniform_model():
    return UniformModel


@pytest.fixture
def table_model_class():
    return TableModel


@pytest.fixture
def decoder() -> WindowDecoder:
    torch.manual_seed(7)
    return WindowDecoder()


@pytest.fixture
def heldout_sets() -> list[HeldoutSet]:
    code = [f"def f_{n}(x):\n    return x * {n}\n" * (n % 4 + 1) for n in range(10)]
    prose = ["Ein kurzer Satz.", "Größe läßt sich messen.", "a", "lang " * 60, "Ende"]
    return [
        HeldoutSet("code", tuple(HeldoutDocument(f"code/{n}", text) for n, text in enumerate(code))),
        HeldoutSet("prose", tuple(HeldoutDocument(f"prose/{n}", text) for n, text in enumerate(prose))),
    ]
