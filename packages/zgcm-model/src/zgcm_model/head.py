"""From hidden states to logits or to the loss; swapped from outside where the head is split over ranks."""

from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor

from zgcm_model.loss import chunked_lm_terms


@runtime_checkable
class OutputHead(Protocol):
    """Applies the weight of the output head."""

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return [..., V] scores of the ids that are no padding, from [..., D]."""
        ...

    def lm_terms(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, loss_mask: Tensor, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss sum and the count of loss tokens; targets are not shifted."""
        ...


class WholeHead:
    """A head whose rows are all at hand.

    Args:
        rows: leading rows of the weight that are no padding.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return [..., V] scores."""
        return F.linear(hidden, weight[: self.rows])

    def lm_terms(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, loss_mask: Tensor, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss sum and the count of loss tokens."""
        return chunked_lm_terms(hidden, weight[: self.rows], targets, loss_mask, z_loss=z_loss)
