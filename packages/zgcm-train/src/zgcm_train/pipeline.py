"""Pipeline parallelism: a decoder cut into stages of consecutive layers, and the schedule that runs them.

The first stage embeds, the last one normalizes, applies the head and takes the loss. A stage holds its own parameters
only, under the names they have in the whole decoder, so initial weights, optimizer state and checkpoints do not know
how many stages there are. The micro-batches of an update are the micro-batches of the pipeline.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from zgcm_model import Decoder, precision
from zgcm_model.cache import DecoderCache
from zgcm_model.decoder import check_token_ids
from zgcm_model.kernels import AutoKernel, Documents
from zgcm_model.rotary import rotary_angles

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
NOT_COUNTED = -100
"""Stands for a target that the loss mask leaves out; a schedule takes one tensor of targets."""


class MicroBatch(NamedTuple):
    """What one forward pass reads: this rank's stretch of every row, on its device.

    Attributes:
        inputs: token ids ``[B, T]``.
        targets: the token after each, ``[B, T]``.
        mask: which targets count, bool ``[B, T]``.
        documents: document ids ``[B, T]`` where attention stops at their borders, else None.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor
    documents: Tensor | None


def autocast(device: torch.device, compute: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """Compute matrix products in a dtype; None or float32 leaves them as they are."""
    if compute is None or compute is torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=compute)


def layer_spans(layers: int, stages: int) -> list[range]:
    """Return the consecutive layers of each stage; the first ones take what does not divide.

    The last stage has the head and the loss beside its layers, so it never gets more layers than another.

    Args:
        layers: of the whole decoder.
        stages: at most ``layers``.
    """
    least, more = divmod(layers, stages)
    sizes = [least + (stage < more) for stage in range(stages)]
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


class LayerSpan(nn.ModuleList):
    """Some layers, under the numbers that they have in the whole decoder.

    Args:
        layers: by number, from 0.
    """

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        """Register each layer under its number."""
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)


@dataclass(frozen=True)
class Place:
    """Which stage this is.

    Attributes:
        index: number of the stage, from 0.
        count: number of stages.
        split: ranks over which positions are split between layers: the tensor-parallel ones under sequence
            parallelism, else 1.
    """

    index: int
    count: int
    split: int = 1

    @property
    def first(self) -> bool:
        """Whether token ids enter here."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether the loss is taken here."""
        return self.index == self.count - 1


class DecoderStage(Decoder):
    """The part of a decoder that one pipeline stage computes.

    Args:
        whole: gives up its modules; tensor and context parallelism are applied already, and its weights are still on
            the meta device.
        place: which part.
    """

    def __init__(self, whole: Decoder, place: Place) -> None:
        """Take over the layers of this stage, and the embedding, norm and head where they belong."""
        nn.Module.__init__(self)
        self.place = place
        self.config, self.kernel, self.head = whole.config, whole.kernel, whole.head
        self.first_position = whole.first_position
        blocks = whole.blocks()
        self.layers = LayerSpan({n: blocks[n] for n in layer_spans(len(blocks), place.count)[place.index]})
        if precision.is_applied(whole):
            # Every stage holds the scales of all, kept equal by one reduction, so a checkpoint knows no stages.
            self.scaling = precision.scaling_state(whole)
        if place.first:
            self.embed_tokens = whole.embed_tokens
        if place.last:
            self.norm, self.lm_head = whole.norm, whole.lm_head

    @property
    def output_head_modules(self) -> list[nn.Module]:
        """The head, for the optimizer's routing; a module without parameters where it is another stage's.

        Never empty: without a head to point at, routing would take any layer as wide as the vocabulary for one.
        """
        return [self.lm_head if self.place.last else nn.Module()]

    def forward(
        self,
        token_ids: Tensor,
        *,
        document_ids: Tensor | None = None,
        cache: DecoderCache | None = None,
        compute: torch.dtype | None = None,
    ) -> Tensor:
        """Run the layers of this stage.

        Args:
            token_ids: ``[B, T]`` on the first stage; elsewhere the hidden states ``[B, T / split, D]`` of the
                previous one.
            document_ids: int ``[B, T]``, on every stage; None for one document.
            cache: not for stages.
            compute: dtype of matrix products; None leaves autocast as it is.

        Returns:
            Hidden states for the next stage, or, on the last one, those after the final norm.

        Raises:
            ValueError: a cache was given, or an id is outside the vocabulary.
        """
        if cache is not None:
            raise ValueError("a cache cannot be used in a pipeline stage; generate on an unsharded decoder")
        with autocast(token_ids.device, compute):
            return self._run(token_ids, None if document_ids is None else Documents(document_ids))

    def _run(self, hidden: Tensor, documents: Documents | None) -> Tensor:
        if isinstance(self.kernel, AutoKernel):
            self.kernel.pick(hidden.device)
        length = hidden.shape[1] * (1 if self.place.first else self.place.split)
        start = self.first_position(length)
        positions = torch.arange(start, start + length, device=hidden.device)
        angles = rotary_angles(positions, self.config.rotary_dim, self.config.rotary_base)
        if self.place.first:
            check_token_ids(hidden, self.config.real_vocab_size)
            hidden = self.embed_tokens(hidden)
        for block in self.blocks():
            hidden = block(hidden, angles, documents)
        if self.place.last:
            hidden = self.norm(hidden)
        return hidden.contiguous()


@dataclass(frozen=True)
class PipelineOptions:
    """How a pipeline runs.

    Attributes:
        schedule: ``1f1b`` keeps as many micro-batches in flight as there are stages; ``gpipe`` all of them.
        micro_batches: of one update, at least as many as stages.
        shape: rows and positions of a micro-batch on this rank.
        compute: dtype of matrix products.
        device: of this rank.
    """

    schedule: str
    micro_batches: int
    shape: tuple[int, int]
    compute: torch.dtype
    device: torch.device


class Pipeline:
    """Runs forward and backward of an update's micro-batches over the stages.

    Where the stage is sharded, its gradients are reduced once, after the last micro-batch.

    Args:
        decoder: this rank's stage, sharded or not.
        mesh: the pipeline axis.
        options: how.
    """

    def __init__(self, decoder: DecoderStage, mesh: DeviceMesh, options: PipelineOptions) -> None:
        """Build the schedule; nothing is sent before the first update.

        Attributes:
            group: the ranks of the pipeline, one per stage.
        """
        self.decoder, self.options = decoder, options
        self.group: ProcessGroup = mesh.get_group()
        self._loss_tokens, self._total = 1, self._zero()
        place, (rows, length) = decoder.place, options.shape
        whole = torch.empty(rows, length, decoder.config.hidden_size, device="meta")
        between = whole[:, : length // place.split]
        token_ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
        # Shapes are given, so that no stage computes anything to find them out.
        stage = PipelineStage(
            decoder,
            place.index,
            place.count,
            options.device,
            input_args=token_ids if place.first else _boundary(between),
            output_args=whole if place.last else _boundary(between),
            group=self.group,
        )
        self.schedule = SCHEDULES[options.schedule](
            stage, n_microbatches=options.micro_batches, loss_fn=self._loss, scale_grads=False
        )

    def accumulate(self, batches: Sequence[MicroBatch], loss_tokens: int) -> Tensor:
        """Add the gradient of the update's loss to this stage's parameters.

        Args:
            batches: all micro-batches of the update, equal in shape; the same rows on every stage.
            loss_tokens: number of loss tokens of the whole update.

        Returns:
            float64 sum of the token losses of this rank's rows on the last stage, 0 on the others.
        """
        self._loss_tokens, self._total = max(loss_tokens, 1), self._zero()
        place = self.decoder.place
        keywords: dict[str, Any] = {
            "compute": self.options.compute,
            "document_ids": _joined_documents(batches),
        }
        inputs = [torch.cat([batch.inputs for batch in batches])] if place.first else []
        labels = torch.cat([batch.targets.masked_fill(~batch.mask, NOT_COUNTED) for batch in batches])
        self.schedule.step(*inputs, target=labels if place.last else None, return_outputs=False, **keywords)
        return self._total

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.options.device)

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        with autocast(hidden.device, self.options.compute):
            loss_sum, _ = self.decoder.lm_terms(hidden, labels, labels != NOT_COUNTED)
        self._total += loss_sum.detach()
        # Divided by the global count, not the local one: means of unequal parts must not be averaged.
        return loss_sum / self._loss_tokens


def _joined_documents(batches: Sequence[MicroBatch]) -> Tensor | None:
    ids = [batch.documents for batch in batches if batch.documents is not None]
    return torch.cat(ids) if ids else None


def _boundary(hidden: Tensor) -> Tensor:
    """Return a tensor like the contiguous hidden states between stages, which carry gradients."""
    return torch.empty(hidden.shape, dtype=hidden.dtype, device="meta", requires_grad=True)


@torch.no_grad()
def run_stages(decoder: DecoderStage, token_ids: Tensor, mesh: DeviceMesh) -> Tensor:
    """Run all stages forward, one after the other.

    Args:
        decoder: this rank's stage.
        token_ids: ``[B, T]``, the same on every stage.
        mesh: the pipeline axis.

    Returns:
        Hidden states ``[B, T, D]`` after the final norm, on every stage.
    """
    place, group = decoder.place, mesh.get_group()
    rows, length = token_ids.shape
    width = decoder.config.hidden_size
    hidden = token_ids
    if not place.first:
        hidden = torch.empty(rows, length // place.split, width, device=token_ids.device)
        dist.recv(hidden, group=group, group_src=place.index - 1)
    out: Tensor = decoder(hidden)
    if not place.last:
        dist.send(out, group=group, group_dst=place.index + 1)
        out = torch.empty(rows, length, width, device=token_ids.device)
    return broadcast_from_last(out, mesh)


def broadcast_from_last(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the last stage's tensor on every stage, in place; the others pass one of its shape."""
    group = mesh.get_group()
    dist.broadcast(value, group=group, group_src=group.size() - 1)
    return value
