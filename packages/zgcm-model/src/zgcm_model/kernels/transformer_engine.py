"""Transformer Engine's fused attention, where it is installed."""

from typing import Any

from torch import Tensor

from zgcm_model._te import load_te
from zgcm_model.kernels.packed import packed_lengths, require_half_precision
from zgcm_model.kernels.protocol import Documents


class TransformerEngineKernel:
    """DotProductAttention with a window and packed documents; bfloat16 or float16 on a GPU.

    Raises:
        ImportError: Transformer Engine is missing; names the extra to install.
    """

    name = "transformer_engine"

    def __init__(self) -> None:
        self._te = load_te()
        self._modules: dict[tuple[int, int, int], Any] = {}

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, documents: Documents | None
    ) -> Tensor:
        """Attend as :class:`~zgcm_model.kernels.protocol.AttentionKernel` says."""
        require_half_precision(query.dtype, self.name)
        module = self._module(query.shape[2], key.shape[2], query.shape[3])
        reach = (-1, 0) if window is None else (window - 1, 0)
        if documents is None:
            out: Tensor = module(
                query,
                key,
                value,
                qkv_format="bshd",
                # Queries stand at the end of the keys when there is a halo or a cache.
                attn_mask_type="causal_bottom_right",
                window_size=reach,
            )
            return out.view_as(query)
        packed = packed_lengths(documents, self.name)
        flat: Tensor = module(
            *(x.flatten(0, 1) for x in (query, key, value)),
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=packed.cumulative,
            cu_seqlens_kv=packed.cumulative,
            max_seqlen_q=packed.longest,
            max_seqlen_kv=packed.longest,
            window_size=reach,
        )
        return flat.view_as(query)

    def _module(self, heads: int, kv_heads: int, width: int) -> Any:
        shape = (heads, kv_heads, width)
        if shape not in self._modules:
            self._modules[shape] = self._te.DotProductAttention(heads, width, num_gqa_groups=kv_heads)
        return self._modules[shape]
