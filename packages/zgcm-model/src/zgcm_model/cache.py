"""Keys and values of earlier tokens: everything for global layers, only the window for the others."""

import torch
from torch import Tensor

from zgcm_model.config import ModelConfig


class LayerCache:
    """Keys and values that later queries of one layer may still see.

    Args:
        window: visible keys per query; None keeps everything.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values, and forget what no later query can see.

        Args:
            key: [B, T, K, H], of the new tokens.
            value: [B, T, K, H].

        Returns:
            The keys and values that the new tokens may see, theirs at the end.
        """
        if self.key is not None and self.value is not None:
            key, value = torch.cat((self.key, key), dim=1), torch.cat((self.value, value), dim=1)
        keep = key.shape[1] if self.window is None else min(self.window - 1, key.shape[1])
        start = key.shape[1] - keep
        # A clone, or the small tail would keep the whole tensor alive.
        self.key, self.value = (key[:, start:].clone(), value[:, start:].clone()) if start else (key, value)
        return key, value

    def num_bytes(self) -> int:
        """Return the bytes held."""
        return sum(x.numel() * x.element_size() for x in (self.key, self.value) if x is not None)


class DecoderCache:
    """The caches of all layers and the count of tokens seen.

    Args:
        config: the model's.
        padding: int64 [B], how many leading tokens of each row only pad; None for none.
    """

    def __init__(self, config: ModelConfig, padding: Tensor | None = None) -> None:
        self.layers = [LayerCache(config.layer_window(i)) for i in range(config.num_layers)]
        self.padding = padding
        self.length = 0

    def num_bytes(self) -> int:
        """Return the bytes held by all layers."""
        return sum(layer.num_bytes() for layer in self.layers)
