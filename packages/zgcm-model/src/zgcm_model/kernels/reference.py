"""Attention by its definition: one explicit mask, float32, quadratic. The measure of every other kernel."""

import torch
from torch import Tensor

from zgcm_model.kernels.mask import end_aligned
from zgcm_model.kernels.protocol import Documents


class ReferenceKernel:
    """Explicit scores, mask and softmax in float32 (float64 for float64 inputs)."""

    name = "reference"

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, documents: Documents | None
    ) -> Tensor:
        """Attend as :class:`~zgcm_model.kernels.protocol.AttentionKernel` says."""
        wide = torch.promote_types(query.dtype, torch.float32)
        group = query.shape[2] // key.shape[2]
        mask = end_aligned(query.shape[1], key.shape[1], window, query.device)
        if documents is not None:
            same = documents.query_ids.unsqueeze(-1) == documents.keys(key.shape[1]).unsqueeze(-2)
            mask = mask & same.unsqueeze(1)
        with torch.autocast(query.device.type, enabled=False):
            keys = key.to(wide).repeat_interleave(group, dim=2)
            values = value.to(wide).repeat_interleave(group, dim=2)
            scores = torch.einsum("bqnh,bknh->bnqk", query.to(wide), keys) * query.shape[-1] ** -0.5
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            return torch.einsum("bnqk,bknh->bqnh", weights, values).to(query.dtype)
