"""The visibility rule, once: every kernel that needs a mask builds it here."""

import torch
from torch import Tensor


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Say which keys each query may see, by position alone.

    Args:
        query_positions: int [..., Tq].
        key_positions: int [..., Tk].
        window: visible keys per query, its own included; None for all that precede.

    Returns:
        bool [..., Tq, Tk].
    """
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def end_aligned(query_length: int, key_length: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask of queries that stand at the end of the keys.

    Args:
        query_length: Tq.
        key_length: Tk, at least Tq.
        window: visible keys per query; None for all.
        device: where the mask lives.

    Returns:
        bool [Tq, Tk].
    """
    keys = torch.arange(key_length, device=device)
    return visible(keys[key_length - query_length :], keys, window)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a bool mask into zeros and minus infinities that are added to the scores.

    Args:
        mask: bool, True where a key is visible.
        dtype: of the scores.

    Returns:
        A tensor of the same shape.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
