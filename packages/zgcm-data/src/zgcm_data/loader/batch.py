"""One micro batch, as it reaches the trainer."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Batch:
    """Rows of one micro step of one data-parallel rank, with exact counts for the ledger.

    Attributes:
        tokens: int64 ``[B, T+1]``; inputs are ``tokens[:, :-1]``, targets ``tokens[:, 1:]``.
        loss_mask: bool ``[B, T]``, true where the target counts in the loss.
        document_ids: int64 ``[B, T]`` of the inputs: 0, 1, 2, ... in each row, -1 for padding.
        rows: int64 ``[B]``, positions in the stage's order, -1 for a row that only fills up the last batch.
        source_tokens: int64 ``[S]``, targets of each source.
        source_loss_tokens: int64 ``[S]``, targets of each source that count in the loss.
        source_documents: int64 ``[S]``, documents of each source whose end is a target of these rows.
        source_rows: int64 ``[S]``, rows in which the source has a target.
    """

    tokens: Tensor
    loss_mask: Tensor
    document_ids: Tensor
    rows: Tensor
    source_tokens: Tensor
    source_loss_tokens: Tensor
    source_documents: Tensor
    source_rows: Tensor

    def to(self, device: torch.device | str) -> "Batch":
        """Move what the model reads to a device, without waiting; counts and rows stay on the CPU."""
        return dataclasses.replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            loss_mask=self.loss_mask.to(device, non_blocking=True),
            document_ids=self.document_ids.to(device, non_blocking=True),
        )
