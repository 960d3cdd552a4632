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


def score_targets(logits: Float[Tensor, "N V"], targets: Int[Tensor, "N"]) -> TokenScores:
    """Rate targets by logits, in float32 whatever the logits' type.

    Args:
        logits: one row of logits per target.
        targets: the given tokens.

    Returns:
        The scores, flat.
    """
    logits = logits.float()
    chosen = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    return TokenScores(chosen - logits.logsumexp(dim=1), logits.argmax(dim=1) == targets)


def score_in_chunks(
    hidden: Float[Tensor, "B S D"], head_weight: Float[Tensor, "V D"], targets: Int[Tensor, "B S"], chunk: int
) -> TokenScores:
    """Rate targets without ever holding the logits of the whole batch.

    Args:
        hidden: the model's last hidden states.
        head_weight: weight of the output head.
        targets: token that follows each position.
        chunk: positions whose logits are held at once.

    Returns:
        The scores of every target.
    """
    states, flat = hidden.flatten(0, 1), targets.flatten()
    weight = head_weight.to(states.dtype)
    parts = [
        score_targets(states[start : start + chunk] @ weight.T, flat[start : start + chunk])
        for start in range(0, len(flat), chunk)
    ]
    shape = targets.shape
    return TokenScores(
        torch.cat([part.log_probabilities for part in parts]).view(shape),
        torch.cat([part.greedy for part in parts]).view(shape),
    )


def whole(weight: Tensor) -> Tensor:
    """The full weight of a sharded one (a collective call); any other weight as it is."""
    gather = getattr(weight, "full_tensor", None)
    return weight if gather is None else gather()


def plain_ids(encoding: Any) -> list[int]:
    """The token ids in whatever ``encode`` of a tokenizer gave back: a list, an array or an ``Encoding``."""
    return [int(token_id) for token_id in getattr(encoding, "ids", encoding)]
