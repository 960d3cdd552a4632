"""What the adapters share: log-probabilities in chunks, quiet evaluation mode, plain token ids."""

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
