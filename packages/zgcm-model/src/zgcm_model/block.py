"""One decoder layer: attention and feed-forward network, each normalized before and added after."""

from torch import Tensor, nn

from zgcm_model.attention import Attention
from zgcm_model.cache import LayerCache
from zgcm_model.config import ModelConfig
from zgcm_model.feed_forward import FeedForward
from zgcm_model.kernels import AttentionKernel, Documents
from zgcm_model.linear import LinearFactory
from zgcm_model.norm import RmsNorm


class Block(nn.Module):
    """A pre-norm layer.

    Args:
        config: the model's.
        layer: 0-based index.
        kernel: attention kernel.
        linear: makes each projection.
    """

    def __init__(
        self, config: ModelConfig, layer: int, kernel: AttentionKernel, linear: LinearFactory
    ) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, layer, kernel, linear)
        self.feed_forward_norm = RmsNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config, linear)

    def forward(
        self,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        documents: Documents | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Map the residual stream [B, T, D] to the next layer's."""
        hidden = hidden + self.attention(self.attention_norm(hidden), angles, documents, cache)
        out: Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        return out
