"""The probability of a continuation after a context, for any tokenizer.

A tokenizer may join the end of the context and the start of the continuation into one token. Both are
therefore encoded together, and the continuation begins at the first token that differs from the context
alone::

    context "Ans", continuation "wer"      alone [Ans]   together [Answer]   scored [Answer]
    context "A: ", continuation "yes"      the space goes to the continuation: "A:", " yes"
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from zgcm_eval.protocol import LanguageModel, ScoringModel
from zgcm_eval.windows import Batching, Progress, Window, score_windows, summed_log_probability


@dataclass(frozen=True)
class Request:
    """Token ids of a context and of the continuation to be rated."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class ContinuationScore:
    """How a model rated one continuation."""

    log_probability: float
    """Natural logarithm of the probability of the whole continuation."""
    tokens: int
    """Rated tokens."""
    greedy: bool
    """Whether every token of the continuation is the most probable one."""
    truncated: bool
    """Whether the beginning of the context was left out."""


def encode_pair(model: LanguageModel, context: str, continuation: str) -> Request:
    """Encode a context and its continuation together and cut them apart.

    Args:
        model: whose tokenizer is used.
        context: may be empty, or end in spaces, which then count to the continuation.
        continuation: what is rated.

    Returns:
        The request; its continuation has at least one token.

    Raises:
        ValueError: the continuation is empty.
    """
    if not continuation:
        raise ValueError(f"the continuation of {context[-40:]!r} is empty; an empty text has no probability")
    stripped = context.rstrip()
    together = model.encode(context + continuation)
    return split_at(together, shared_prefix(model.encode(stripped), together))


def shared_prefix(alone: Sequence[int], together: Sequence[int]) -> int:
    """Number of leading tokens that are the same, with at least one token left over in ``together``."""
    count = 0
    while count < min(len(alone), len(together) - 1) and alone[count] == together[count]:
        count += 1
    return count


def split_at(token_ids: Sequence[int], position: int) -> Request:
    """Cut token ids into context and continuation."""
    return Request(tuple(token_ids[:position]), tuple(token_ids[position:]))


def score_continuations(
    model: ScoringModel,
    requests: Sequence[Request],
    batching: Batching | None = None,
    progress: Progress | None = None,
) -> list[ContinuationScore]:
    """Rate continuations; a context that is too long loses its beginning, which the score says.

    Args:
        model: the model.
        requests: what is rated.
        batching: batch size and processes.
        progress: called with (batches done, batches in all).

    Returns:
        One score per request, in order.

    Raises:
        ValueError: a continuation alone is longer than the model's longest input.
    """
    windows = [_window(model, item, request) for item, request in enumerate(requests)]

    def score(token_ids: Int[Tensor, "B T"], scored: Bool[Tensor, "B S"]) -> Float[Tensor, "B 2"]:
        rated = model.token_scores(token_ids)
        greedy = (rated.greedy.cpu() | ~scored).all(dim=1)
        sums = summed_log_probability(rated.log_probabilities, scored)
        return torch.stack([sums, greedy.double()], dim=1)

    figures = score_windows(windows, score, model.prefix_id, batching or Batching(), progress)
    return [
        ContinuationScore(
            float(figures[item, 0]),
            len(request.continuation),
            bool(figures[item, 1]),
            len(windows[item].token_ids) < 1 + len(request.context) + len(request.continuation),
        )
        for item, request in enumerate(requests)
    ]


def _window(model: LanguageModel, item: int, request: Request) -> Window:
    count = len(request.continuation)
    if not 1 <= count <= model.max_length:
        raise ValueError(
            f"continuation {item} has {count} tokens, this model takes 1 to {model.max_length}; "
            "it would have to be cut, which changes what is measured"
        )
    # The window has max_length + 1 ids at most: the prefix, what fits of the context, the continuation.
    room = model.max_length - count
    context = request.context[-room:] if room else ()
    return Window(item, (model.prefix_id, *context, *request.continuation), 1 + len(context))
