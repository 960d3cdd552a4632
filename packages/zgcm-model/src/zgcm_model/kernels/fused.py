"""PyTorch's fused attention with time before heads, as the rest of this package lays tensors out."""

import torch.nn.functional as F
from torch import Tensor


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Call ``scaled_dot_product_attention``.

    Args:
        query: [B, Tq, N, H].
        key: [B, Tk, K, H].
        value: [B, Tk, K, H].
        mask: added to the scores, broadcastable to [B, N, Tq, Tk]; None for none.
        causal: mask by position from the start; needs Tq == Tk.

    Returns:
        [B, Tq, N, H].
    """
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2)
