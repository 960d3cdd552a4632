"""Context parallelism: each rank holds one stretch of every sequence.

Window layers fetch the keys and values of the ``window - 1`` positions before their stretch from the previous
rank (a halo): its size does not depend on T. Global layers exchange heads for positions, attend over whole
sequences with a share of the heads, and exchange back.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from zgcm_model.decoder import Decoder
from zgcm_model.kernels import AttentionKernel, Documents
from zgcm_model.parallel.collectives import exchange, gather, halo, shift

_TIME, _HEADS = 1, 2


def apply_context_parallel(decoder: Decoder, mesh: DeviceMesh) -> Decoder:
    """Let a decoder attend over sequences whose stretches lie on different ranks; in place, before FSDP.

    Rank r of C is then given positions ``r * T/C`` up to ``(r + 1) * T/C`` of every row, as
    :func:`shard_sequence` cuts them. Gradients of parameters are this rank's share: sum them over the axis, as
    FSDP over the joint data and context axes does.

    Args:
        decoder: its kernels are wrapped and its positions shifted.
        mesh: one axis, the context-parallel ranks.

    Returns:
        The decoder.

    Raises:
        ValueError: the mesh has several axes, or the key/value heads do not divide over its ranks.
    """
    group, ranks = one_axis(mesh)
    if decoder.config.num_kv_heads % ranks:
        raise ValueError(
            f"num_kv_heads={decoder.config.num_kv_heads} does not divide over context_parallel={ranks}; "
            "global layers exchange heads for positions, so use a number of ranks that divides it"
        )
    for block in decoder.blocks():
        block.attention.kernel = ContextParallelKernel(block.attention.kernel, group)
    decoder.first_position = _first_position(group)
    return decoder


def one_axis(mesh: DeviceMesh) -> tuple[ProcessGroup, int]:
    """Return the group of a one-axis mesh and its size.

    Args:
        mesh: the mesh.

    Returns:
        The process group and the number of ranks.

    Raises:
        ValueError: the mesh has another number of axes.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh has axes {mesh.mesh_dim_names or mesh.ndim}; pass one axis, such as mesh['cp']"
        )
    return mesh.get_group(), mesh.size()


def shard_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Cut this rank's stretch out of [B, T, ...].

    Args:
        x: whole sequences, such as inputs, targets (already shifted), masks or document ids.
        mesh: the context-parallel axis.

    Returns:
        [B, T / ranks, ...].

    Raises:
        ValueError: T does not divide over the ranks.
    """
    _, ranks = one_axis(mesh)
    if x.shape[_TIME] % ranks:
        raise ValueError(
            f"{x.shape[_TIME]} positions do not divide over context_parallel={ranks}; "
            "pad the rows and mask the padding, or use another sequence length"
        )
    return x.chunk(ranks, _TIME)[mesh.get_local_rank()]


def _first_position(group: ProcessGroup) -> Callable[[int], int]:
    rank = group.rank()
    return lambda length: rank * length


class ContextParallelKernel:
    """Wraps a kernel so that it sees what lies on other ranks.

    Args:
        inner: does the attending.
        group: the context-parallel ranks, in the order of their stretches.
    """

    def __init__(self, inner: AttentionKernel, group: ProcessGroup) -> None:
        self.inner = inner
        self.group = group
        self.name = f"context-parallel {inner.name}"

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, documents: Documents | None
    ) -> Tensor:
        """Attend as :class:`~zgcm_model.kernels.protocol.AttentionKernel` says, over the whole sequence."""
        if query.shape[1] != key.shape[1]:
            raise ValueError(
                "a cache cannot be used under context parallelism; generate on an unsharded decoder"
            )
        if window is not None and window - 1 <= key.shape[1]:
            return self._through_halo(query, key, value, window, documents)
        return self._through_exchange(query, key, value, window, documents)

    def _through_halo(
        self, query: Tensor, key: Tensor, value: Tensor, window: int, documents: Documents | None
    ) -> Tensor:
        length = window - 1
        if length:
            tail = torch.stack((key[:, -length:], value[:, -length:]))
            before = halo(tail, _TIME + 1, self.group)
            key, value = torch.cat((before[0], key), _TIME), torch.cat((before[1], value), _TIME)
            if documents is not None:
                ids = documents.query_ids
                documents = documents.derive(("halo", length), lambda: self._with_halo(ids, length))
        return self.inner(query, key, value, window=window, documents=documents)

    def _with_halo(self, ids: Tensor, length: int) -> Documents:
        before = shift(ids[:, -length:], self.group, 1)
        return Documents(ids, torch.cat((before, ids), 1) if self.group.rank() else ids)

    def _through_exchange(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, documents: Documents | None
    ) -> Tensor:
        ranks = self.group.size()
        if key.shape[_HEADS] % ranks:
            raise ValueError(
                f"{key.shape[_HEADS]} key/value heads on this rank do not divide over context_parallel={ranks}; "
                "lower tensor_parallel * context_parallel to a divisor of num_kv_heads"
            )
        whole = [exchange(x, _HEADS, _TIME, self.group) for x in (query, key, value)]
        if documents is not None:
            ids = documents.query_ids
            documents = documents.derive("gathered", lambda: Documents(gather(ids, _TIME, self.group)))
        out = self.inner(whole[0], whole[1], whole[2], window=window, documents=documents)
        return exchange(out, _TIME, _HEADS, self.group)
