"""Weights that FSDP gathers in FP8: one byte for each element instead of four.

Two tensor classes meet FSDP2's extension for all-gathers. A *sharded weight* is what a rank keeps: a float32 shard
that quantizes itself when it is sent. A *gathered weight* is what a layer computes with: FP8 values that stand for
float32 ones. Scales are known before, the same on every rank, so nothing else is sent.

Source: PyTorch FSDP2, ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from zgcm_model.decoder import Decoder
from zgcm_model.precision.injection import scaling_state
from zgcm_model.precision.linear import ScaledLinear
from zgcm_model.precision.recipe import FORWARD
from zgcm_model.precision.roles import projections
from zgcm_model.precision.scaled_mm import padded
from zgcm_model.precision.scaling import amax

_aten = torch.ops.aten
_VIEWS = {
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.view.default,
}
"""Operations whose result is still a shard; FSDP and DTensor cut and pad with them. All others give plain tensors."""


class ShardedWeight(torch.Tensor):
    """A rank's shard of a weight: an ordinary tensor in all but the way it is gathered."""

    _plain: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def wrap(plain: Tensor) -> "ShardedWeight":
        """Return a shard that shares the memory of an ordinary tensor."""
        plain = plain.detach()
        if type(plain) is Tensor:
            shard = torch.Tensor._make_subclass(ShardedWeight, plain)
        else:  # a fake tensor has no memory to share
            shard = torch.Tensor._make_wrapper_subclass(
                ShardedWeight, plain.shape, strides=plain.stride(), dtype=plain.dtype, device=plain.device
            )
        shard._plain = plain.detach()
        return shard

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute with the ordinary tensor; wrap again what is still a shard."""
        plain_args, plain_kwargs = tree_map_only(cls, lambda shard: shard._plain, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func in _VIEWS:
            return tree_map_only(Tensor, cls.wrap, out)
        # In-place operations return what they were given.
        return args[0] if args and isinstance(args[0], cls) and out is args[0]._plain else out

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be stored as the ordinary tensor, which any program can load."""
        return self._plain.__reduce_ex__(protocol)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor], None]:
        """Quantize the shard for the other ranks, padded to the rows of the first one.

        Args:
            mesh: the ranks that share the weight.
            outer_size: of the whole weight.
            outer_stride: of the whole weight.
            module: the projection.
            mp_policy: not used; the format is FP8.

        Returns:
            One byte for each element, and no further data.
        """
        linear = cast(ScaledLinear, module)
        linear.shard_amax = amax(self._plain)
        rows = linear.place.state.quantize(self._plain, linear.place.weight)
        missing = -(-outer_size[0] // mesh.size()) - rows.shape[0]
        # Bytes, because not every transport knows FP8.
        return (padded(rows, missing, 0).view(torch.uint8),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Make a weight of the gathered bytes; a later call finds them in the memory of the first.

        Args:
            all_gather_outputs: the bytes of all ranks.
            metadata: none.
            param_dtype: the dtype the weight stands for.
            out: the weight of an earlier call.

        Returns:
            The weight and the memory that FSDP frees and fills; None where ``out`` is given.
        """
        if out is not None:
            return None
        (data,) = all_gather_outputs
        return GatheredWeight(data.view(FORWARD), param_dtype), (data,)


class GatheredWeight(torch.Tensor):
    """FP8 values that stand for a weight of a wider dtype.

    Args:
        rows: FP8 [out, in].
        dtype: of the weight and its gradient.
    """

    rows: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, rows: Tensor, dtype: torch.dtype) -> "GatheredWeight":
        """Make a tensor without memory of its own."""
        weight: GatheredWeight = torch.Tensor._make_wrapper_subclass(
            cls, rows.shape, strides=rows.stride(), dtype=dtype, device=rows.device
        )
        weight.rows = rows
        return weight

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say what it holds."""
        return f"GatheredWeight({self.rows}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Allow views; everything else needs the scale, which only the projection knows."""
        if func not in _VIEWS:
            raise ValueError(
                f"{func} cannot be computed on a weight gathered in FP8; use the parameter of the sharded decoder"
            )
        dtype = args[0].dtype
        plain_args, plain_kwargs = tree_map_only(cls, lambda weight: weight.rows, (args, kwargs or {}))
        return tree_map_only(Tensor, lambda rows: cls(rows, dtype), func(*plain_args, **plain_kwargs))


def gather_in_fp8(decoder: Decoder) -> Decoder:
    """Let FSDP gather the weights of the FP8 projections in FP8; in place, right before ``fully_shard``.

    Parameters, optimizers and checkpoints stay float32. The losses are those of a float32 gather to the bit,
    because a shard is quantized with the scale of the whole. Amaxes of weights are then those of shards:
    :func:`~zgcm_model.precision.update_scales` needs a group that covers all ranks.

    Args:
        decoder: from ``precision.apply``, after tensor parallelism; may be on the meta device.

    Returns:
        The decoder.

    Raises:
        ValueError: the decoder has no FP8 projections, is sharded by FSDP already, or computes with Transformer
            Engine, which quantizes weights itself.
    """
    state = scaling_state(decoder)
    if state.backend == "transformer_engine":
        raise ValueError(
            "backend='transformer_engine' quantizes weights itself; gather in high precision or use scaled_mm"
        )
    if any(isinstance(module, FSDPModule) for module in decoder.modules()):
        raise ValueError("the decoder is sharded by FSDP already; call gather_in_fp8 before fully_shard")
    for projection in projections(decoder):
        if isinstance(projection.module, ScaledLinear):
            _wrap(projection.module)
    state.sharded = True
    return decoder


def _wrap(linear: ScaledLinear) -> None:
    weight = linear._parameters["weight"]
    assert weight is not None
    if isinstance(weight, DTensor):
        local = ShardedWeight.wrap(weight.to_local())
        wrapped: Tensor = DTensor.from_local(
            local,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
    else:
        wrapped = ShardedWeight.wrap(weight)
    linear._parameters["weight"] = nn.Parameter(wrapped.detach(), requires_grad=weight.requires_grad)
