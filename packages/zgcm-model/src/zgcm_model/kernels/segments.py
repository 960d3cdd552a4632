"""Global attention over packed documents, one fused call per document: no mask, no wasted score."""

import torch
from torch import Tensor

from zgcm_model.kernels.fused import fused_attention


def find_segments(ids: Tensor) -> list[int] | None:
    """Return the lengths of the documents of all rows in order, if each document is one run.

    Args:
        ids: int [B, T], document of each position.

    Returns:
        Lengths that sum to B * T, none reaching over a row's end; None when a row returns to an earlier
        document.
    """
    lengths: list[int] = []
    for row in ids:
        values, counts = torch.unique_consecutive(row, return_counts=True)
        if values.unique().numel() != values.numel():
            return None
        lengths.extend(counts.tolist())
    return lengths


def attend_segments(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Attend causally inside each segment.

    Args:
        query: [B, T, N, H].
        key: [B, T, K, H].
        value: [B, T, K, H].
        lengths: of the segments, over the rows laid end to end.

    Returns:
        [B, T, N, H].
    """
    parts = zip(*(x.flatten(0, 1).split(lengths) for x in (query, key, value)), strict=True)
    outputs = [fused_attention(q[None], k[None], v[None], causal=True)[0] for q, k, v in parts]
    return torch.cat(outputs).view_as(query)
