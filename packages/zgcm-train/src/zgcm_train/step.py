"""One optimizer update, as pure functions with explicit process groups.

The loss of an update is the sum of token losses over all micro-batches and data-parallel ranks, divided once by the
number of loss tokens over the same set.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from zgcm_data import Batch
from zgcm_model import Decoder, precision
from zgcm_model.outliers import collect_block_outputs, tweo_terms
from zgcm_model.parallel import shard_sequence
from zgcm_optim import clip_grad_norm_
from zgcm_train.pipeline import MicroBatch, Pipeline, autocast

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Penalty:
    """A penalty on extreme layer outputs, added to the loss that is learned from.

    Attributes:
        weight: of the mean penalty beside the mean token loss.
        tau: magnitude from which it is felt.
        power: how steeply it grows.
        positions: the axis that splits the positions of layer outputs (sequence parallelism); None for none.

    Source: TWEO, arXiv:2511.23225.
    """

    weight: float
    tau: float
    power: float
    positions: DeviceMesh | None = None


@dataclass(frozen=True)
class StepSettings:
    """How an update is computed.

    Attributes:
        compute: dtype of matrix products; weights and sums stay float32.
        clip_norm: global gradient norm that is allowed; 0 turns clipping off.
        isolate_documents: attention stops at document boundaries.
        device: where the model is.
        group: the ranks whose losses add up: data- and context-parallel ones; None for one.
        context: the context-parallel axis; this rank computes its stretch of every row.
        pipeline: runs the micro-batches over the stages of which this rank is one; None for no pipeline.
        sync_every: sharded gradients are reduced after every micro-batch, which holds a shard of their sum; else
            after the last one only, which holds the whole sum.
        reduce: dtype of gradients on the wire; they are always summed over micro-batches in float32.
        everyone: all ranks, whose largest values decide the FP8 scales; None for one.
        outliers: the penalty on extreme layer outputs; None for none.
    """

    compute: torch.dtype = torch.float32
    clip_norm: float = 1.0
    isolate_documents: bool = False
    device: torch.device = CPU
    group: ProcessGroup | None = None
    context: DeviceMesh | None = None
    pipeline: Pipeline | None = None
    sync_every: bool = False
    reduce: torch.dtype = torch.float32
    everyone: ProcessGroup | None = None
    outliers: Penalty | None = None


@dataclass(frozen=True)
class StepResult:
    """What an update did; sums are global.

    Attributes:
        loss_sum: sum of token losses, in nats.
        loss_tokens: number of targets in that sum.
        grad_norm: global gradient norm before clipping.
        applied: whether the weights were updated; False when something was not finite, or the loss was refused.
        scales: what the update did to the FP8 scales; None without FP8. Reading it waits for the device.
    """

    loss_sum: float
    loss_tokens: int
    grad_norm: float
    applied: bool
    scales: precision.UpdateReport | None = None


def read_batch(batch: Batch, settings: StepSettings) -> MicroBatch:
    """Return this rank's stretch of every row of a micro-batch, on the device.

    Args:
        batch: tokens ``[B, T+1]``; inputs and targets are its two shifted views, the only shift there is. They are
            shifted before they are cut into stretches, so no target is lost at a cut.
        settings: how to cut, and whether documents are told apart.
    """
    tokens = batch.tokens.to(settings.device, non_blocking=True)
    return MicroBatch(
        inputs=cut(tokens[:, :-1], settings),
        targets=cut(tokens[:, 1:], settings),
        mask=cut(batch.loss_mask.to(settings.device, non_blocking=True), settings),
        documents=cut(batch.document_ids.to(settings.device), settings)
        if settings.isolate_documents
        else None,
    )


def loss_terms(decoder: Decoder, batch: Batch, settings: StepSettings) -> tuple[Tensor, Tensor]:
    """Return two sums over one micro-batch and this rank's stretch of every row: token losses, and what to minimize.

    Args:
        decoder: the model.
        batch: one micro-batch.
        settings: how to compute; without a penalty the two are one.
    """
    read, penalty = read_batch(batch, settings), settings.outliers
    with contextlib.ExitStack() as stack:
        stack.enter_context(autocast(settings.device, settings.compute))
        outputs = [] if penalty is None else stack.enter_context(collect_block_outputs(decoder))
        hidden = decoder(read.inputs, document_ids=read.documents)
        loss_sum, _ = decoder.lm_terms(hidden, read.targets, read.mask)
    if penalty is None:
        return loss_sum, loss_sum
    mask = read.mask if penalty.positions is None else shard_sequence(read.mask, penalty.positions)
    extra, _ = tweo_terms(outputs, loss_mask=mask, tau=penalty.tau, p=penalty.power)
    return loss_sum, loss_sum + penalty.weight * extra


def cut(x: Tensor, settings: StepSettings) -> Tensor:
    """Return this rank's stretch of whole rows ``[B, T]``."""
    return x if settings.context is None else shard_sequence(x, settings.context)


def count_loss_tokens(batches: Sequence[Batch], settings: StepSettings) -> int:
    """Return the number of loss tokens of an update, over all its micro-batches and replicas."""
    masks = [cut(batch.loss_mask, settings).sum(dtype=torch.int64) for batch in batches]
    return int(_summed(torch.stack(masks).sum(), settings))


def accumulate_gradients(
    decoder: Decoder,
    batches: Sequence[Batch],
    loss_tokens: int,
    settings: StepSettings,
) -> float:
    """Add the gradient of the update's loss to the parameters and return the global loss sum.

    Args:
        decoder: its gradients should be empty.
        batches: the micro-batches of this rank.
        loss_tokens: from ``count_loss_tokens``; 0 gives zero gradients.
        settings: how to compute.
    """
    if settings.pipeline is not None:
        read = [read_batch(batch, settings) for batch in batches]
        total = _summed(settings.pipeline.accumulate(read, loss_tokens), settings)
        dist.all_reduce(total, group=settings.pipeline.group)
        return float(total)
    # On the device, which nothing waits for before the update is computed.
    total = torch.zeros((), dtype=torch.float64, device=settings.device)
    for index, batch in enumerate(batches):
        _choose_reductions(decoder, index == len(batches) - 1, settings)
        loss_sum, objective = loss_terms(decoder, batch, settings)
        # Divided by the global count, not the local one: means of unequal parts must not be averaged.
        (objective / max(loss_tokens, 1)).backward()
        total += loss_sum.detach()
    return float(_summed(total, settings))


def apply_update(
    optimizer: Optimizer, clip_norm: float, loss_sum: float, stages: ProcessGroup | None = None
) -> tuple[float, bool]:
    """Clip, check and update; a gradient or loss that is not finite leaves weights and moments unchanged.

    Args:
        optimizer: holds every parameter of the model, or of this pipeline stage.
        clip_norm: allowed global norm; 0 turns clipping off.
        loss_sum: the update's loss sum, checked as well; the same on every rank. NaN leaves the update out.
        stages: the ranks that hold the other stages' parameters, whose gradients belong to the norm.

    Returns:
        The gradient norm before clipping, and whether the update was made.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = float(clip_grad_norm_(parameters, clip_norm if clip_norm > 0 else math.inf, stages=stages))
    finite = math.isfinite(norm) and math.isfinite(loss_sum)
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, finite


def _nothing(loss: float) -> bool:
    return False


def train_step(
    decoder: Decoder,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    settings: StepSettings,
    refuse: Callable[[float], bool] = _nothing,
) -> StepResult:
    """Make one optimizer update from the micro-batches of this rank.

    Args:
        decoder: the model, in training mode.
        optimizer: its learning rate is already set.
        batches: the micro-batches of this rank.
        settings: how to compute.
        refuse: told the mean loss before the update, says whether to leave it out; the same on every rank.

    Returns:
        What the update did.
    """
    loss_tokens = count_loss_tokens(batches, settings)
    loss_sum = accumulate_gradients(decoder, batches, loss_tokens, settings)
    stages = None if settings.pipeline is None else settings.pipeline.group
    refused = refuse(loss_sum / max(loss_tokens, 1))
    norm, applied = apply_update(optimizer, settings.clip_norm, math.nan if refused else loss_sum, stages)
    # Once per update, made or left out: its micro-batches have shown how large the values are.
    scales = precision.update_scales(decoder, settings.everyone) if precision.is_applied(decoder) else None
    return StepResult(loss_sum, loss_tokens, norm, applied, scales)


def _summed(value: Tensor, settings: StepSettings) -> Tensor:
    if settings.group is not None:
        value = value.to(settings.device)
        dist.all_reduce(value, group=settings.group)
    return value


def _choose_reductions(decoder: Decoder, last: bool, settings: StepSettings) -> None:
    """Tell FSDP what to reduce after this micro-batch.

    Replicas are reduced after the last one alone, unless partial sums would then be kept in a narrow type, as FSDP
    keeps them in the type of the wire.
    """
    if isinstance(decoder, FSDPModule):
        decoder.set_is_last_backward(last)
        decoder.set_requires_gradient_sync(last or settings.sync_every)
        if settings.sync_every:
            decoder.set_requires_all_reduce(last or settings.reduce is not torch.float32)
