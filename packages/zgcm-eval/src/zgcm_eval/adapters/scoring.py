"""What the adapters share: log-probabilities in chunks, quiet evaluation mode, plain token ids."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from zgcm_eval.protocol import TokenScores


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluate without gradients and put every submodule back into the mode it was in.

    ``no_grad`` and not ``inference_mode``: a tensor that a module caches under inference mode could not
    take part in the next training step.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def rate_targets(logits: Float[Tensor, "N V"], targets: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Log-probability of each target in nats, computed in float32 whatever the logits' type."""
    logits = logits.float()
    return logits.gather(1, targets.unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=1)


def score_targets(logits: Float[Tensor, "N V"], targets: Int[Tensor, "N"]) -> TokenScores:
    """Rate targets by logits and say which are the most probable ones.

    Args:
        logits: one row of logits per target.
        targets: the given tokens.

    Returns:
        The scores, flat.
    """
    return TokenScores(rate_targets(logits, targets), logits.argmax(dim=1) == targets)


class LogitScorer(ABC):
    """Rates tokens by logits that a subclass yields part by part.

    Args:
        model: the module that computes them.
        prefix_id: id that stands before the first token of a document.
        max_length: longest input in tokens.
    """

    def __init__(self, model: nn.Module, prefix_id: int, max_length: int) -> None:
        # Any: torch types every attribute of a module as Tensor | Module.
        self._model: Any = model
        self._prefix_id, self._max_length = prefix_id, max_length

    @property
    def prefix_id(self) -> int:
        """The id before the first token of a document."""
        return self._prefix_id

    @property
    def max_length(self) -> int:
        """The longest input in tokens."""
        return self._max_length

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        parameter: Tensor = next(self._model.parameters())
        return parameter.device

    def token_scores(self, token_ids: Int[Tensor, "B T"]) -> TokenScores:
        """Rate ``token_ids[:, 1:]`` and mark the most probable ones.

        Args:
            token_ids: rows padded at the right.

        Returns:
            The scores, on the model's device.
        """
        with evaluation_mode(self._model):
            parts = [score_targets(*part) for part in self._logits(token_ids)]
        shape = token_ids[:, 1:].shape
        return TokenScores(
            torch.cat([part.log_probabilities for part in parts]).view(shape),
            torch.cat([part.greedy for part in parts]).view(shape),
        )

    def log_probabilities(self, token_ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T-1"]:
        """Rate ``token_ids[:, 1:]`` in nats.

        Args:
            token_ids: rows padded at the right.

        Returns:
            Log-probabilities, on the model's device.
        """
        with evaluation_mode(self._model):
            parts = [rate_targets(*part) for part in self._logits(token_ids)]
        return torch.cat(parts).view(token_ids[:, 1:].shape)

    @abstractmethod
    def _logits(self, token_ids: Int[Tensor, "B T"]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits [N, V] and targets [N] of the next positions, row after row."""


def logits_in_chunks(
    hidden: Float[Tensor, "B S D"], head_weight: Float[Tensor, "V D"], targets: Int[Tensor, "B S"], chunk: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and targets of some positions at a time, so that the whole batch's are never held.

    Args:
        hidden: the model's last hidden states.
        head_weight: weight of the output head.
        targets: token that follows each position.
        chunk: positions whose logits are held at once.

    Yields:
        Logits [N, V] and targets [N] of the next positions, row after row.
    """
    states, flat = hidden.flatten(0, 1), targets.flatten()
    weight = head_weight.to(states.dtype)
    for start in range(0, len(flat), chunk):
        yield states[start : start + chunk] @ weight.T, flat[start : start + chunk]


def whole(weight: Tensor) -> Tensor:
    """The full weight of a sharded one (a collective call); any other weight as it is."""
    gather = getattr(weight, "full_tensor", None)
    return weight if gather is None else gather()


def plain_ids(encoding: Any) -> list[int]:
    """The token ids in whatever ``encode`` of a tokenizer gave back: a list, an array or an ``Encoding``."""
    return [int(token_id) for token_id in getattr(encoding, "ids", encoding)]
