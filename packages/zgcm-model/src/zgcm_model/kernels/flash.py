"""FlashAttention, where it is installed; the only file that imports it."""

from typing import Any

from torch import Tensor

from zgcm_model.kernels.packed import packed_lengths, require_half_precision
from zgcm_model.kernels.protocol import Documents


class FlashKernel:
    """FlashAttention with its own window and packed documents; bfloat16 or float16 on a GPU.

    Raises:
        ImportError: ``flash_attn`` is missing; names the extra to install.
    """

    name = "flash"

    def __init__(self) -> None:
        self._flash = _load_flash()

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, documents: Documents | None
    ) -> Tensor:
        """Attend as :class:`~zgcm_model.kernels.protocol.AttentionKernel` says."""
        require_half_precision(query.dtype, self.name)
        reach = (-1, -1) if window is None else (window - 1, 0)
        if documents is None:
            out: Tensor = self._flash.flash_attn_func(query, key, value, causal=True, window_size=reach)
            return out
        packed = packed_lengths(documents, self.name)
        flat: Tensor = self._flash.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (query, key, value)),
            packed.cumulative,
            packed.cumulative,
            packed.longest,
            packed.longest,
            causal=True,
            window_size=reach,
        )
        return flat.view_as(query)


def _load_flash() -> Any:
    try:
        import flash_attn
    except (ImportError, OSError) as error:
        raise ImportError(
            'FlashAttention cannot be loaded; on a machine with an NVIDIA GPU run pip install "zgcm-model[flash]"'
        ) from error
    return flash_attn
