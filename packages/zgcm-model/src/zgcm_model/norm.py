"""RMS norm, computed in float32 up to one final cast."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


class _RmsNorm(torch.autograd.Function):
    """x * rsqrt(mean(x^2) + eps) * weight; keeps the input and one number per row for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        out: Tensor = (wide * scale).mul_(weight.float()).to(x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad, width = grads[0].float(), x.shape[-1]
        normed = x.float() * scale
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        projection = (product * weight.float()).sum(-1, keepdim=True).div_(width)
        grad_x = (grad * weight.float()).addcmul_(normed, projection, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


def rms_norm(
    x: Float[Tensor, "*rows width"], weight: Float[Tensor, " width"], eps: float
) -> Float[Tensor, "*rows width"]:
    """Divide each row by its root mean square and scale it, in float32 with one cast at the end.

    Args:
        x: rows to normalize.
        weight: scale of each element; multiplied before the cast.
        eps: added to the mean square.

    Returns:
        The normalized rows, in the dtype of ``x``.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    out: Tensor = _RmsNorm.apply(x, weight, eps)
    return out


class RmsNorm(nn.Module):
    """RMS norm with a plain learned scale that starts at 1.

    Args:
        width: elements of a row.
        eps: added to the mean square.
        device: where the scale lives.
        dtype: of the scale.
    """

    def __init__(
        self, width: int, eps: float, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim of ``x``."""
        return rms_norm(x, self.weight, self.eps)
