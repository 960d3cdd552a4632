"""What a fused attention kernel allocates, without attending."""

from typing import Any

import torch
from torch import Tensor

from zgcm_model.kernels import Documents


class FusedShapes:
    """An attention kernel that allocates and saves what fused GPU kernels do and computes nothing.

    Kept for the backward pass: queries, keys, values, output, and one float32 per query and head.
    """

    name = "fused shapes"

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, documents: Documents | None
    ) -> Tensor:
        """Return an output of the right shape; its values mean nothing."""
        out: Tensor = _FusedShapes.apply(query, key, value)
        return out


class _FusedShapes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return tuple(torch.empty_like(x) for x in (query, key, value))
