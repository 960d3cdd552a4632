"""Rotary positions: dim j of the rotated part turns together with dim j + half, always in float32.

Nothing is stored: the angles are a function of the positions, so no cast, no meta-device build and no
checkpoint can leave a wrong table behind.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


def rotary_angles(
    positions: Int[Tensor, "*batch time"], rotary_dim: int, base: float
) -> tuple[Float[Tensor, "*batch time half"], Float[Tensor, "*batch time half"]]:
    """Compute the cosine and sine of each position and frequency in float32.

    Args:
        positions: position of each token, the same for all rows or one line per row.
        rotary_dim: rotated dims of a head, even.
        base: frequency i is ``base ** (-2 i / rotary_dim)``.

    Returns:
        Cosines and sines, float32, ``rotary_dim / 2`` of each per position.

    Source: Su et al. 2021, "RoFormer".
    """
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float32) / rotary_dim
    angles = positions.to(torch.float32).unsqueeze(-1) * (1.0 / base**exponents)
    return angles.cos(), angles.sin()


class _Rotate(torch.autograd.Function):
    """Rotation by an angle; its backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = cos.shape[-1]
    out = x.clone(memory_format=torch.contiguous_format)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    out[..., :half] = torch.addcmul(first * cos, second, sin, value=-sign)
    out[..., half : 2 * half] = torch.addcmul(second * cos, first, sin, value=sign)
    return out


def rotate(
    x: Float[Tensor, "batch time heads width"],
    cos: Float[Tensor, "*rows time half"],
    sin: Float[Tensor, "*rows time half"],
) -> Float[Tensor, "batch time heads width"]:
    """Turn the first ``2 * half`` dims of each head; the others pass through.

    Args:
        x: queries or keys.
        cos: float32 cosines from :func:`rotary_angles`.
        sin: float32 sines.

    Returns:
        The rotated heads: computed in float32, then cast to the dtype of ``x``.
    """
    out: Tensor = _Rotate.apply(x, cos.unsqueeze(-2), sin.unsqueeze(-2))
    return out
