"""Window attention in blocks over PyTorch's own fused attention: time and memory linear in T.

Queries are cut into blocks at least as long as the look-back (window - 1), so a block sees itself and the
end of the block before it, never more. The first block, whose look-back may be short, goes alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from zgcm_model.kernels.blocks import block_views, cut_blocks
from zgcm_model.kernels.fused import fused_attention
from zgcm_model.kernels.mask import additive, end_aligned, visible
from zgcm_model.kernels.protocol import Documents
from zgcm_model.kernels.segments import attend_segments, find_segments

_SMALLEST_BLOCK = 64


class BandedKernel:
    """Blocks for window layers, fused causal attention for global ones; any T, any window."""

    name = "banded"

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, documents: Documents | None
    ) -> Tensor:
        """Attend as :class:`~zgcm_model.kernels.protocol.AttentionKernel` says."""
        if window is None or window >= key.shape[1]:
            return _attend_all(query, key, value, documents)
        if query.shape[1] <= _block_length(window):
            return _attend_masked(query, key, value, window, documents)
        return _attend_blocks(query, key, value, window, documents)


def _block_length(window: int) -> int:
    return max(_SMALLEST_BLOCK, -(-(window - 1) // 16) * 16)


def _attend_all(query: Tensor, key: Tensor, value: Tensor, documents: Documents | None) -> Tensor:
    square = query.shape[1] == key.shape[1]
    if documents is None and (square or query.shape[1] == 1):
        return fused_attention(query, key, value, causal=square)
    if documents is not None and square:
        ids = documents.query_ids
        if lengths := documents.derive("segments", lambda: find_segments(ids)):
            return attend_segments(query, key, value, lengths)
    return _attend_masked(query, key, value, None, documents)


def _attend_masked(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, documents: Documents | None
) -> Tensor:
    if window is not None and (surplus := key.shape[1] - query.shape[1] - window + 1) > 0:
        key, value = key[:, surplus:], value[:, surplus:]
    mask = end_aligned(query.shape[1], key.shape[1], window, query.device)
    if documents is None:
        return fused_attention(query, key, value, mask=additive(mask, query.dtype))

    def build() -> Tensor:
        same = documents.query_ids.unsqueeze(-1) == documents.keys(key.shape[1]).unsqueeze(-2)
        return additive((mask & same).unsqueeze(1), query.dtype)

    name = ("masked", window, key.shape[1], query.dtype)
    return fused_attention(query, key, value, mask=documents.derive(name, build))


def _attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, window: int, documents: Documents | None
) -> Tensor:
    block, lookback = _block_length(window), window - 1
    first = key.shape[1] - query.shape[1] + block
    leading_key, keys = cut_blocks(key, first, block, lookback)
    leading_value, values = cut_blocks(value, first, block, lookback)
    leading, rest = query.split((block, query.shape[1] - block), dim=1)
    leading_documents = None if documents is None else _leading_documents(documents, block, first)
    head = _attend_masked(leading, leading_key, leading_value, window, leading_documents)
    missing = -rest.shape[1] % block
    queries = F.pad(rest, (0, 0, 0, 0, 0, missing)) if missing else rest
    queries = queries.unflatten(1, (-1, block)).flatten(0, 1)
    tail = fused_attention(queries, keys, values, mask=_block_mask(window, first, documents, queries))
    tail = tail.unflatten(0, (query.shape[0], -1)).flatten(1, 2)[:, : rest.shape[1]]
    return torch.cat((head, tail), dim=1)


def _leading_documents(documents: Documents, block: int, first: int) -> Documents:
    def build() -> Documents:
        keys = documents.keys(documents.query_ids.shape[1] + first - block)
        return Documents(documents.query_ids[:, :block], keys[:, :first])

    return documents.derive(("leading", block, first), build)


def _block_mask(window: int, first: int, documents: Documents | None, queries: Tensor) -> Tensor:
    """Return the additive mask of all blocks but the first: [S, S + L], or one per block with documents."""
    block, lookback = queries.shape[1], window - 1
    keys = torch.arange(lookback + block, device=queries.device)
    band = visible(keys[lookback:], keys, window)
    if documents is None:
        return additive(band, queries.dtype)

    def build() -> Tensor:
        key_ids = documents.keys(documents.query_ids.shape[1] + first - block)
        own_queries, _ = block_views(documents.query_ids, block, block, 0)
        own_keys, before = block_views(key_ids, first, block, lookback)
        # Positions that only pad carry zeros on both sides, so that each of their queries still sees itself.
        same = own_queries.unsqueeze(-1) == torch.cat((before, own_keys), dim=2).unsqueeze(-2)
        return additive((band & same).flatten(0, 1).unsqueeze(1), queries.dtype)

    return documents.derive(("blocks", window, first, queries.dtype), build)
