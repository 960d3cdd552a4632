"""A sharded decoder seen as a whole one, for evaluation."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zgcm_model import Decoder
from zgcm_model.parallel import shard_sequence
from zgcm_model.parallel.collectives import gather
from zgcm_train.mesh import Layout
from zgcm_train.pipeline import DecoderStage, broadcast_from_last, run_stages


class GatheredDecoder(nn.Module):
    """Takes whole rows and returns whole hidden states, whatever the layout of the decoder inside.

    Args:
        decoder: perhaps split over tensor- and context-parallel ranks, perhaps a pipeline stage. Its weights must not
            change while this object is used.
        layout: how it is split.
    """

    def __init__(self, decoder: Decoder, layout: Layout) -> None:
        """Hold the decoder; nothing is copied."""
        super().__init__()
        self.decoder = decoder
        self.config = decoder.config
        self.layout = layout
        self._shared_head: nn.Linear | None = None

    @property
    def lm_head(self) -> nn.Linear:
        """The decoder's output head; in a pipeline a copy of the last stage's."""
        if self.layout.pipeline is None:
            return self.decoder.lm_head
        if self._shared_head is None:
            self._shared_head = share_head(self.decoder, self.layout.pipeline)
        return self._shared_head

    @torch.no_grad()
    def forward(self, token_ids: Tensor) -> Tensor:
        """Return hidden states ``[B, T, D]`` for token ids ``[B, T]`` of any length, on every rank, without a gradient.

        Rows are padded at the right to a length that divides; causal attention keeps padding out of what is before.
        """
        length, context = token_ids.shape[1], self.layout.context
        stretch = (context.size() if context else 1) * (
            self.layout.tensor.size() if self.layout.tensor else 1
        )
        padded = F.pad(token_ids, (0, -length % stretch))
        if context is None:
            return self._run(padded)[:, :length]
        part = self._run(shard_sequence(padded, context))
        return gather(part, 1, context.get_group())[:, :length]

    def _run(self, token_ids: Tensor) -> Tensor:
        if self.layout.pipeline is not None and isinstance(self.decoder, DecoderStage):
            return run_stages(self.decoder, token_ids, self.layout.pipeline)
        hidden: Tensor = self.decoder(token_ids)
        return hidden


@torch.no_grad()
def share_head(decoder: Decoder, pipeline: DeviceMesh) -> nn.Linear:
    """Return the last stage's output head, whole, on every stage.

    Args:
        decoder: this rank's stage.
        pipeline: the pipeline axis.
    """
    rows, width = decoder.config.vocab_size, decoder.config.hidden_size
    weight = torch.empty(rows, width, device=next(decoder.parameters()).device)
    if isinstance(decoder, DecoderStage) and decoder.place.last:
        own = decoder.lm_head.weight
        weight.copy_(own.full_tensor() if isinstance(own, DTensor) else own)
    head = nn.Linear(width, rows, bias=False, device="meta")
    head.weight = nn.Parameter(broadcast_from_last(weight, pipeline), requires_grad=False)
    return head
