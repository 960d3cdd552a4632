"""What an evaluation asks of a language model.

Every evaluation of this package talks to a model through these two protocols, so a model of any library can
be measured once someone writes the few methods. ``zgcm_eval.adapters`` holds the ready ones.

Shapes: B rows, T token ids of a row. Log-probabilities are natural logarithms (nats), float32 or wider.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor


class TokenScores(NamedTuple):
    """How a model rated each given token but the first of every row."""

    log_probabilities: Float[Tensor, "B S"]
    """Natural logarithm of the probability of ``token_ids[:, 1:]``."""
    greedy: Bool[Tensor, "B S"]
    """Whether the given token is the most probable one."""


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model with its tokenizer."""

    @property
    def prefix_id(self) -> int:
        """The end-of-document id, which stands before the first token of every document."""
        ...

    @property
    def max_length(self) -> int:
        """The longest input in tokens, the prefix included."""
        ...

    def log_probabilities(self, token_ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T-1"]:
        """Rate each token given those before it in its row.

        Args:
            token_ids: rows padded at the right with any valid id; at most ``max_length + 1`` wide.

        Returns:
            Log-probability of ``token_ids[:, 1:]`` in nats.
        """
        ...

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Continue each prompt with its most probable tokens.

        Args:
            prompts: token ids, each with one prefix id in front where a document starts.
            max_new_tokens: upper bound of a continuation's length.

        Returns:
            The new ids of each prompt, ended before ``prefix_id`` if the model produces it.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Turn text into token ids and add none: neither a beginning nor an end of document."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn token ids back into text."""
        ...


@runtime_checkable
class ScoringModel(LanguageModel, Protocol):
    """A language model that also says whether a token was its first choice."""

    def token_scores(self, token_ids: Int[Tensor, "B T"]) -> TokenScores:
        """Rate each token as ``log_probabilities`` does and mark the most probable ones."""
        ...
