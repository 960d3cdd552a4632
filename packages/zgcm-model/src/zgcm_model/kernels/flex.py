"""PyTorch's FlexAttention: compiled block-sparse attention, for GPUs."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zgcm_model.kernels.banded import BandedKernel
from zgcm_model.kernels.protocol import Documents

FEW_QUERIES = 16
"""Up to here fused attention with a mask is used: decoding would compile anew at every length."""
_KEPT_MASKS = 16

_Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class FlexKernel:
    """Block-sparse attention that skips what window, causality and documents hide.

    Args:
        compiled: compile the kernel, without which nothing is skipped and all scores are materialized; False
            is for comparing it on a CPU.
    """

    name = "flex"

    def __init__(self, compiled: bool = True) -> None:
        self._attend = _flex_attention(compiled)
        self._few = BandedKernel()
        self._masks: dict[tuple[int, int, int | None, torch.device], Any] = {}

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, documents: Documents | None
    ) -> Tensor:
        """Attend as :class:`~zgcm_model.kernels.protocol.AttentionKernel` says."""
        if query.shape[1] <= FEW_QUERIES:
            return self._few(query, key, value, window=window, documents=documents)
        mask = self._mask(query, key, window, documents)
        out: Tensor = self._attend(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            block_mask=mask,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.transpose(1, 2)

    def _mask(self, query: Tensor, key: Tensor, window: int | None, documents: Documents | None) -> Any:
        lengths = (query.shape[1], key.shape[1])
        rule = visibility_rule(lengths[1] - lengths[0], window)
        if documents is not None:
            ids = (documents.query_ids, documents.keys(lengths[1]))
            name = ("flex", window, *lengths)
            return documents.derive(
                name, lambda: _block_mask(inside_documents(rule, *ids), len(ids[0]), query, key)
            )
        place = (*lengths, window, query.device)
        if place not in self._masks:
            if len(self._masks) == _KEPT_MASKS:
                self._masks.clear()
            self._masks[place] = _block_mask(rule, None, query, key)
        return self._masks[place]


def visibility_rule(past: int, window: int | None) -> _Rule:
    """Return the causal rule, through a window or not, in FlexAttention's form.

    Args:
        past: keys in front of the first query's own.
        window: visible keys per query; None for all.

    Returns:
        A function of batch, head, query and key index.
    """

    if window is None:
        return lambda batch, head, query, key: query + past >= key
    return lambda batch, head, query, key: (query + past >= key) & (query + past - key < window)


def inside_documents(rule: _Rule, query_ids: Tensor, key_ids: Tensor) -> _Rule:
    """Narrow a rule to keys of the query's own document.

    Args:
        rule: what to narrow.
        query_ids: int [B, Tq].
        key_ids: int [B, Tk].

    Returns:
        The narrower rule.
    """

    return lambda batch, head, query, key: (
        rule(batch, head, query, key) & (query_ids[batch, query] == key_ids[batch, key])
    )


def _block_mask(rule: _Rule, batch: int | None, query: Tensor, key: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(rule, batch, None, query.shape[1], key.shape[1], device=query.device)


@cache
def _flex_attention(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention
