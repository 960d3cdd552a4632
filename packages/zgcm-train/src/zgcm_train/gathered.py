"""A sharded decoder seen as a whole one, for evaluation."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

from zgcm_model import Decoder
from zgcm_model.parallel import shard_sequence
from zgcm_train.mesh import Layout


class GatheredDecoder(nn.Module):
    """Takes whole rows and returns whole hidden states, whatever the layout of the decoder inside.

    Args:
        decoder: perhaps split over tensor- and context-parallel ranks.
        layout: how it is split.
    """

    def __init__(self, decoder: Decoder, layout: Layout) -> None:
        """Hold the decoder; nothing is copied."""
        super().__init__()
        self.decoder = decoder
        self.config = decoder.config
        self.layout = layout

    @property
    def lm_head(self) -> nn.Linear:
        """The decoder's output head."""
        return self.decoder.lm_head

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return hidden states ``[B, T, D]`` for token ids ``[B, T]`` of any length, on every rank.

        Rows are padded at the right to a length that divides; causal attention keeps padding out of what is before.
        """
        length, context = token_ids.shape[1], self.layout.context
        stretch = (context.size() if context else 1) * (
            self.layout.tensor.size() if self.layout.tensor else 1
        )
        padded = F.pad(token_ids, (0, -length % stretch))
        if context is None:
            whole: Tensor = self.decoder(padded)
        else:
            part = self.decoder(shard_sequence(padded, context)).contiguous()
            whole = torch.cat(all_gather(part, group=context.get_group()), dim=1)
        return whole[:, :length]
