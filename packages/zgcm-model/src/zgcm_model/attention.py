"""Grouped-query attention with a window of keys, or over everything before it.

Layer n, counted from 1, is global when n is a multiple of 6; every other layer sees the current token and
the 127 before it and multiplies its output by a sigmoid gate.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from zgcm_model.cache import LayerCache
from zgcm_model.config import ModelConfig
from zgcm_model.kernels import AttentionKernel, Documents, make_kernel
from zgcm_model.linear import LinearFactory, SharedInput
from zgcm_model.norm import RmsNorm
from zgcm_model.rotary import rotate


def attention(
    query: Float[Tensor, "batch time heads width"],
    key: Float[Tensor, "batch keys kv_heads width"],
    value: Float[Tensor, "batch keys kv_heads width"],
    *,
    window: int | None = None,
    document_ids: Int[Tensor, "batch time"] | None = None,
    kernel: str | AttentionKernel = "auto",
) -> Float[Tensor, "batch time heads width"]:
    """Attend causally, through a window or over everything, inside documents if they are given.

    Args:
        query: queries; with fewer of them than keys they stand at the end.
        key: keys; query head n reads key head ``n // (heads // kv_heads)``.
        value: values.
        window: visible keys per query, its own included; None for all.
        document_ids: document of each position; needs as many keys as queries.
        kernel: a kernel or its name.

    Returns:
        The attended values of each query.

    Raises:
        ValueError: the window is below 1, the heads do not divide, or there are fewer keys than queries.
    """
    _check(query, key, window, document_ids)
    documents = None if document_ids is None else Documents(document_ids)
    return make_kernel(kernel)(query, key, value, window=window, documents=documents)


def _check(query: Tensor, key: Tensor, window: int | None, document_ids: Tensor | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window={window} cannot be used; set at least 1 (a query sees itself) or None")
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"query heads={query.shape[2]} is no multiple of key heads={key.shape[2]}; make the heads divide"
        )
    if key.shape[1] < query.shape[1]:
        raise ValueError(f"keys={key.shape[1]} is below queries={query.shape[1]}; pass every query's own key")
    if document_ids is not None and document_ids.shape[1] != key.shape[1]:
        raise ValueError(
            f"document_ids has {document_ids.shape[1]} positions for {key.shape[1]} keys; pass one id per key"
        )


class Attention(nn.Module):
    """Project, normalize, rotate, attend, gate, project.

    Args:
        config: the model's.
        layer: 0-based index; decides window and gate.
        kernel: does the attending; replaced from outside by context parallelism.
        linear: makes each projection.
    """

    def __init__(
        self, config: ModelConfig, layer: int, kernel: AttentionKernel, linear: LinearFactory
    ) -> None:
        super().__init__()
        hidden, query, kv = config.hidden_size, config.query_size, config.kv_size
        self.kernel = kernel
        self.window = config.layer_window(layer)
        self.head_dim = config.head_dim
        self.q_proj = linear(hidden, query, bias=False)
        self.k_proj = linear(hidden, kv, bias=False)
        self.v_proj = linear(hidden, kv, bias=False)
        self.g_proj = None if self.window is None else linear(hidden, query, bias=False)
        self.o_proj = linear(query, hidden, bias=False)
        self.q_norm = RmsNorm(config.head_dim, config.norm_eps)
        self.k_norm = RmsNorm(config.head_dim, config.norm_eps)

    def forward(
        self,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        documents: Documents | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend over the sequence.

        Args:
            hidden: [B, T, D], already normalized.
            angles: float32 cosines and sines of the positions.
            documents: what to keep apart.
            cache: extended by the new keys and values.

        Returns:
            [B, T, D].
        """
        shared = SharedInput(hidden)
        query, key, value = (self._heads(shared.into(p)) for p in (self.q_proj, self.k_proj, self.v_proj))
        query, key = rotate(self.q_norm(query), *angles), rotate(self.k_norm(key), *angles)
        if cache is not None:
            key, value = cache.extend(key, value)
        out = self.kernel(query, key, value, window=self.window, documents=documents).flatten(2)
        if self.g_proj is not None:
            # Sigmoid in float32, product in the activations' dtype: the published inference rounding.
            out = out * torch.sigmoid(shared.into(self.g_proj).float()).to(out.dtype)
        projected: Tensor = self.o_proj(out)
        return projected

    def _heads(self, flat: Tensor) -> Tensor:
        heads: Tensor = flat.unflatten(-1, (-1, self.head_dim))
        return heads
