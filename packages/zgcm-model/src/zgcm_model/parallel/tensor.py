"""Tensor parallelism: heads, feed-forward columns and vocabulary rows split over ranks.

Parameters become DTensors of the given axis; modules compute with their local part. With sequence parallelism
the residual stream between the layers is split along the positions, so norms and additions are split too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from zgcm_model.block import Block
from zgcm_model.config import check_tensor_parallel
from zgcm_model.decoder import Decoder
from zgcm_model.norm import RmsNorm
from zgcm_model.parallel.collectives import (
    partial_to_split,
    partial_to_whole,
    split_to_partial_input,
    split_to_whole,
    whole_to_partial_input,
)
from zgcm_model.parallel.context import one_axis
from zgcm_model.parallel.vocabulary import (
    VocabularyShard,
    embed,
    vocabulary_parallel_lm_terms,
    vocabulary_parallel_logits,
    vocabulary_shard,
)

_TIME = 1


def apply_tensor_parallel(decoder: Decoder, mesh: DeviceMesh, sequence_parallel: bool = True) -> Decoder:
    """Split a decoder over the ranks of a mesh axis; in place, before FSDP.

    Inputs and hidden states stay whole on every rank, and so do the gradients of the hidden states; use
    ``decoder.lm_terms`` for the loss, which then knows that the head is split.

    Args:
        decoder: replaced parameter by parameter with DTensors of this axis; may be on the meta device.
        mesh: one axis, the tensor-parallel ranks.
        sequence_parallel: split the residual stream along the positions between layers; T must then divide
            over the ranks.

    Returns:
        The decoder.

    Raises:
        ValueError: the mesh has several axes, or heads, key/value heads or feed-forward width do not divide.
    """
    group, ranks = one_axis(mesh)
    check_tensor_parallel(decoder.config, ranks)
    plan = _Plan(mesh, group, sequence_parallel)
    for block in decoder.blocks():
        _split_block(block, plan)
    plan.replicate(decoder.norm, partial_gradient=sequence_parallel)
    if sequence_parallel:
        decoder.norm.register_forward_hook(lambda module, args, out: split_to_whole(out, _TIME, group))
    _split_vocabulary(decoder, plan)
    return decoder


class _Plan:
    """What every step of the split needs: the axis, its group, and whether positions are split."""

    def __init__(self, mesh: DeviceMesh, group: ProcessGroup, sequence_parallel: bool) -> None:
        self.mesh = mesh
        self.group = group
        self.sequence_parallel = sequence_parallel

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Give a split module the whole sequence (a forward pre-hook)."""
        hidden, *rest = args
        if self.sequence_parallel:
            return (split_to_partial_input(hidden, _TIME, self.group), *rest)
        return (whole_to_partial_input(hidden, self.group), *rest)

    def leave(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        """Sum what the ranks computed (a forward hook)."""
        return self.join(out)

    def join(self, out: Tensor) -> Tensor:
        """Sum the ranks' parts into what the residual stream holds: split along the positions, or whole."""
        if not self.sequence_parallel:
            return partial_to_whole(out, self.group)
        if out.shape[_TIME] % self.group.size():
            raise ValueError(
                f"{out.shape[_TIME]} positions do not divide over tensor_parallel={self.group.size()}; "
                "pad the rows, or apply tensor parallelism with sequence_parallel=False"
            )
        return partial_to_split(out, _TIME, self.group)

    def shard(self, module: nn.Module, dim: int) -> None:
        """Split the weight of a projection."""
        _distribute(module, self.mesh, Shard(dim))
        _compute_with(module, _local)

    def replicate(self, norm: RmsNorm, *, partial_gradient: bool) -> None:
        """Keep a norm's scale on every rank, and its gradient the same on all."""
        _distribute(norm, self.mesh, Replicate())
        summed = partial(_summed_local, group=self.group) if partial_gradient else _local
        _compute_with(norm, summed)


def _split_block(block: Block, plan: _Plan) -> None:
    att, ff = block.attention, block.feed_forward
    for projection in (att.q_proj, att.k_proj, att.v_proj, att.g_proj, ff.gate_proj, ff.up_proj):
        if projection is not None:
            plan.shard(projection, 0)
    for projection in (att.o_proj, ff.down_proj):
        plan.shard(projection, 1)
    for norm in (block.attention_norm, block.feed_forward_norm):
        plan.replicate(norm, partial_gradient=plan.sequence_parallel)
    for norm in (att.q_norm, att.k_norm):
        # Each rank sees its own heads only, with or without sequence parallelism.
        plan.replicate(norm, partial_gradient=True)
    for module in (att, ff):
        module.register_forward_pre_hook(plan.enter)
        module.register_forward_hook(plan.leave)


def _split_vocabulary(decoder: Decoder, plan: _Plan) -> None:
    config = decoder.config
    shard = vocabulary_shard(config.vocab_size, config.real_vocab_size, plan.group)
    for table in (decoder.embed_tokens, decoder.lm_head):
        _distribute(table, plan.mesh, Shard(0))
    embedding = decoder.embed_tokens
    embedding.__class__ = _SplitEmbedding
    cast(_SplitEmbedding, embedding).bind(shard, plan)
    decoder.head = SplitHead(shard)


class _SplitEmbedding(nn.Embedding):
    """An embedding that holds some rows; only ever reached by changing the class of a whole one."""

    def bind(self, shard: VocabularyShard, plan: _Plan) -> None:
        """Say which rows are here and how results are joined."""
        self._shard, self._plan = shard, plan

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the residual stream's first value."""
        local = _local(self.weight)[: self._shard.rows]
        return self._plan.join(embed(token_ids, local, self._shard))


class SplitHead:
    """Applies a head whose rows are spread over ranks.

    Args:
        shard: the rows of this rank.
    """

    def __init__(self, shard: VocabularyShard) -> None:
        self.shard = shard

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary on every rank."""
        return vocabulary_parallel_logits(hidden, _local(weight)[: self.shard.rows], self.shard)

    def lm_terms(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, loss_mask: Tensor, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss sum and the count of loss tokens, the same on every rank."""
        local = _local(weight)[: self.shard.rows]
        return vocabulary_parallel_lm_terms(hidden, local, targets, loss_mask, self.shard, z_loss=z_loss)


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    weight = module._parameters["weight"]
    assert weight is not None
    source = None if weight.is_meta else 0
    split = distribute_tensor(weight.detach(), mesh, [placement], src_data_rank=source)
    module._parameters["weight"] = nn.Parameter(split, requires_grad=weight.requires_grad)


def _compute_with(module: nn.Module, localize: Callable[[Tensor], Tensor]) -> None:
    """Let a module compute with its local weight while the parameter stays a DTensor.

    During ``forward`` an attribute of the same name hides the parameter. So any linear class that reads
    ``self.weight`` works, and FSDP, optimizers and checkpoints always find the DTensor.
    """

    def hide(module: nn.Module, args: Any) -> None:
        module.__dict__["weight"] = localize(cast(Tensor, module._parameters["weight"]))

    def show(module: nn.Module, args: Any, out: Any) -> None:
        module.__dict__.pop("weight", None)

    module.register_forward_pre_hook(hide)
    module.register_forward_hook(show, always_call=True)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _summed_local(weight: Tensor, group: ProcessGroup) -> Tensor:
    return whole_to_partial_input(_local(weight), group)
