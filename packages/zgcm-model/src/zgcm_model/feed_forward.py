"""The gated feed-forward network: down(silu(gate(x)) * up(x))."""

import torch.nn.functional as F
from torch import Tensor, nn

from zgcm_model.config import ModelConfig
from zgcm_model.linear import LinearFactory, SharedInput


class FeedForward(nn.Module):
    """SwiGLU feed-forward network without biases.

    Args:
        config: widths.
        linear: makes each projection from (in, out, bias=False).

    Source: Shazeer 2020, "GLU Variants Improve Transformer".
    """

    def __init__(self, config: ModelConfig, linear: LinearFactory) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        shared = SharedInput(hidden)
        out: Tensor = self.down_proj(F.silu(shared.into(self.gate_proj)) * shared.into(self.up_proj))
        return out
