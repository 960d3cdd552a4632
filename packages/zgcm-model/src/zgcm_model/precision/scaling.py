"""The state of delayed scaling: for every tensor that is quantized a history of amaxes, a scale and its inverse.

The tensors of a model share four buffers with one column each, so that an update is a handful of operations and
one collective, whatever the number of layers.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zgcm_model.precision.recipe import DelayedScaling

SCALE_LIMIT = 2.0**126
"""Scales stay within this and its inverse, so that both are finite, normal float32 numbers."""
_IDLE = -1.0
"""Pending amax of a tensor that was not seen in this step; true amaxes are not negative."""

Observer = Callable[[str, Tensor, Tensor, Tensor], None]
"""Called with the name, the values [rows, columns], their FP8 form and the scale of each tensor quantized."""


class Slot(NamedTuple):
    """One quantized tensor's place in the state.

    Attributes:
        column: of the buffers.
        dtype: FP8 format.
    """

    column: int
    dtype: torch.dtype


class UpdateReport:
    """What an update of the scales did; reading it waits for the device, making it does not.

    Args:
        names: of all tensors.
        rolled: bool [tensors], whose history moved on.
        nonfinite: bool [tensors], whose amax was NaN or infinite; their state is unchanged.
    """

    def __init__(self, names: Sequence[str], rolled: Tensor, nonfinite: Tensor) -> None:
        self._names, self._rolled, self._nonfinite = names, rolled, nonfinite

    @property
    def rolled(self) -> tuple[str, ...]:
        """Names of the tensors whose history moved on."""
        return self._chosen(self._rolled)

    @property
    def flagged(self) -> tuple[str, ...]:
        """Names of the tensors that held NaN or infinity in this step."""
        return self._chosen(self._nonfinite)

    def _chosen(self, mask: Tensor) -> tuple[str, ...]:
        return tuple(name for name, yes in zip(self._names, mask.tolist(), strict=True) if yes)


class ScalingState(nn.Module):
    """Histories, scales and cursors of all quantized tensors of a model.

    Args:
        recipe: how scales follow the amaxes.
        backend: name of what multiplies.

    Attributes:
        names: one per tensor, in column order.
        observer: sees every tensor that is quantized while it is set.
        sharded: a rank sees the amaxes of its shards of the weights only.
        probe: [2, tensors], takes amaxes out of compiled backward passes in the guise of a gradient: a compiled
            backward cannot change a buffer that other passes change too. A backward over several forward passes at
            once adds their amaxes, which is an upper bound.
    """

    amax_history: Tensor
    scale: Tensor
    scale_inv: Tensor
    cursor: Tensor
    pending: Tensor
    probe: Tensor

    def __init__(self, recipe: DelayedScaling, backend: str) -> None:
        super().__init__()
        self.recipe = recipe
        self.backend = backend
        self.names: list[str] = []
        self.observer: Observer | None = None
        self.sharded = False
        self._limits: list[float] = []

    def add(self, name: str, dtype: torch.dtype) -> Slot:
        """Give a tensor its place; only before :meth:`allocate`.

        Args:
            name: unique.
            dtype: FP8 format.

        Returns:
            Its place.
        """
        self.names.append(name)
        self._limits.append(torch.finfo(dtype).max)
        return Slot(len(self.names) - 1, dtype)

    def allocate(self, device: torch.device) -> None:
        """Make the buffers for the tensors added so far, and fill them."""
        tensors, length = len(self.names), self.recipe.amax_history_len
        for name, shape in (
            ("amax_history", (length, tensors)),
            ("scale", (tensors,)),
            ("scale_inv", (tensors,)),
        ):
            self.register_buffer(name, torch.empty(shape, dtype=torch.float32, device=device))
        self.register_buffer("cursor", torch.empty(tensors, dtype=torch.int64, device=device))
        pending = torch.empty(tensors, dtype=torch.float32, device=device)
        self.register_buffer("pending", pending, persistent=False)
        self.reset_state()

    @torch.no_grad()
    def reset_state(self) -> None:
        """Forget everything: empty histories and scales of 1, as before the first step."""
        self.amax_history.zero_()
        self.scale.fill_(1.0)
        self.scale_inv.fill_(1.0)
        self.cursor.zero_()
        self.pending.fill_(_IDLE)
        self._renew_probe()

    def quantize(self, values: Tensor, slot: Slot) -> Tensor:
        """Scale and round a tensor to FP8.

        Args:
            values: [rows, columns].
            slot: whose scale is used.

        Returns:
            FP8 values, of the same shape and contiguous, whatever the strides of the values.
        """
        scale = self.scale[slot.column]
        rounded = quantize(values, scale, slot.dtype).contiguous()
        if self.observer is not None:
            self.observer(self.names[slot.column], values.detach(), rounded, scale)
        return rounded

    def inverse(self, slot: Slot) -> Tensor:
        """Return the float32 scalar that turns a tensor's FP8 values back."""
        return self.scale_inv[slot.column]

    @torch.no_grad()
    def record(self, slot: Slot, largest: Tensor) -> None:
        """Count an amax towards this step; the same one twice changes nothing.

        Args:
            slot: whose it is.
            largest: float32 scalar from :func:`amax`.
        """
        here = self.pending[slot.column]
        here.copy_(torch.maximum(here, largest))

    def ticket(self, slot: Slot, largest: Tensor) -> Tensor:
        """Return what a compiled backward pass gives to the probe as its gradient.

        Args:
            slot: whose amax it is.
            largest: float32 scalar from :func:`amax`.

        Returns:
            The amax and a 1 in the slot's column of [2, tensors], zeros elsewhere.
        """
        column = torch.arange(len(self.names), device=largest.device) == slot.column
        return torch.stack((torch.where(column, largest, 0.0), column.float()))

    @torch.no_grad()
    def collect(self) -> None:
        """Take over amaxes that are recorded elsewhere; here they are noted as tensors are quantized."""

    def update(self, group: ProcessGroup | None) -> UpdateReport:
        """Fold this step's amaxes into the histories and compute the scales of the next step.

        Args:
            group: the ranks whose amaxes count; None for this one alone.

        Returns:
            What happened to which tensor.

        Raises:
            ValueError: no group is given, but the weights are gathered in FP8 and lie on several ranks.
        """
        self.collect()
        if group is None and self.sharded and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "update_scales needs a group when weights are gathered in FP8, because each rank sees its shard only; "
                "pass the group of all ranks"
            )
        if group is not None:
            dist.all_reduce(self.pending, op=dist.ReduceOp.MAX, group=group)
        nonfinite = self.pending.isinf()
        rolls = (self.pending >= 0) & ~nonfinite
        place = self.cursor.unsqueeze(0)
        kept = self.amax_history.gather(0, place)
        self.amax_history.scatter_(0, place, torch.where(rolls, self.pending, kept))
        self.cursor.copy_((self.cursor + rolls) % self.recipe.amax_history_len)
        self._rescale(rolls)
        self.pending.fill_(_IDLE)
        return UpdateReport(self.names, rolls, nonfinite)

    def _rescale(self, rolls: Tensor) -> None:
        recent = self.recipe.amax_compute == "most_recent"
        largest = self.pending if recent else self.amax_history.amax(0)
        limits = torch.tensor(self._limits, dtype=torch.float32, device=largest.device)
        scale = limits / largest / 2.0**self.recipe.margin
        scale = scale.clamp(1 / SCALE_LIMIT, SCALE_LIMIT)
        # An amax of 0 says nothing about the values to come.
        self.scale.copy_(torch.where(rolls & (largest > 0), scale, self.scale))
        self.scale_inv.copy_(self.scale.reciprocal())

    def _renew_probe(self) -> None:
        self.probe = torch.zeros(2, len(self.names), device=self.pending.device, requires_grad=True)
        self.probe.register_post_accumulate_grad_hook(self._collect)

    @torch.no_grad()
    def _collect(self, probe: Tensor) -> None:
        largest, seen = cast(Tensor, probe.grad)
        self.pending.copy_(torch.where(seen > 0, torch.maximum(self.pending, largest), self.pending))
        probe.grad = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a copied or stored state; hooks on the probe are not copied with it."""
        super().__setstate__(state)
        self._renew_probe()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # decoder.to(torch.bfloat16) moves parameters to another precision; scales must not follow.
        moved = super()._apply(lambda tensor: _keep_dtype(fn(tensor), tensor), recurse)
        self._renew_probe()
        return moved


def quantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply by a scale in float32, saturate and round to the nearest FP8 value, ties to even.

    Args:
        values: any shape.
        scale: float32 scalar.
        dtype: FP8 format.

    Returns:
        FP8 values; NaN stays NaN.
    """
    limit = torch.finfo(dtype).max
    return (values.float() * scale).clamp(-limit, limit).to(dtype)


def amax(values: Tensor) -> Tensor:
    """Return the largest magnitude as a float32 scalar: 0 for no values, infinity if any is not finite."""
    if values.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=values.device)
    largest = values.detach().abs().amax().float()
    # A maximum over ranks may drop NaN; it keeps infinity.
    return torch.where(largest.isfinite(), largest, torch.inf)


def _keep_dtype(moved: Tensor, original: Tensor) -> Tensor:
    return moved if moved.dtype == original.dtype else original.to(moved.device)
