"""FP8 projections by Transformer Engine's own linear layer, with the scales of this package.

Transformer Engine 2.0 to 2.18 is supported. Its kernels quantize with the scales they find in
``Linear.fp8_meta`` and leave the largest magnitude there; nothing else of its delayed scaling is used. Once for each
optimizer step the amaxes are taken from there into the same state that the other backends have, and the new scales
are put there before the next forward pass. So its own ``_extra_state`` is not stored.

Source: Transformer Engine 2.0 to 2.18, ``pytorch/fp8.py`` and ``pytorch/quantization.py`` (regions, updates, recipe
states), ``pytorch/module/base.py`` (``fp8_meta``), ``pytorch/module/linear.py`` (which column is which tensor),
``common/recipe``; its quantization kernels write an amax by an atomic maximum.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from zgcm_model._te import Fp8Region, load_te, load_te_recipes
from zgcm_model.precision.recipe import DelayedScaling
from zgcm_model.precision.roles import Projection
from zgcm_model.precision.scaling import ScalingState, Slot

_MULTIPLE = 16
_INPUT, _WEIGHT, _GRADIENT = 0, 1, 0
"""Columns of ``scaling_fwd`` (GEMM1_INPUT, GEMM1_WEIGHT) and ``scaling_bwd`` (GRAD_OUTPUT1)."""
_ROWS = 2
"""Rows of Transformer Engine's own history: one that kernels write, one that survives if a region of the user rolls."""


class Seat:
    """Carries scales to one Transformer Engine module and amaxes from it.

    Args:
        state: of the whole model.
        region: opens FP8.
        slots: of the input, the weight and the gradient of the output.
    """

    def __init__(self, state: ScalingState, region: Fp8Region, slots: tuple[Slot, Slot, Slot]) -> None:
        self._state, self._region, self._slots = state, region, slots
        self._meta: dict[str, Any] = {}
        self._given: tuple[Tensor, Tensor, int] | None = None
        self._forward_ran = self._backward_ran = False

    def run(self, module: Any, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute a projection in FP8 with the state's scales; wherever in the model, also when recomputed.

        Args:
            module: Transformer Engine's.
            compute: its own forward.
            x: [..., in].

        Returns:
            [..., out].
        """
        with self._region():
            # Makes fp8_meta at the first call, before anything is quantized.
            module.init_fp8_metadata(num_gemms=1)
            self._give_scales(module.fp8_meta)
            if module.training and torch.is_grad_enabled():
                return self._counted(compute, x)
            row = module.fp8_meta["scaling_fwd"].amax_history[0]
            before = row.clone()
            out = compute(x)
            with torch.no_grad():
                row.copy_(before)
            return out

    def take(self) -> list[tuple[int, Tensor]]:
        """Return this step's amaxes by column of the state, and forget them."""
        found = []
        inputs, weight, gradient = (slot.column for slot in self._slots)
        if self._forward_ran:
            largest = self._meta["scaling_fwd"].amax_history.amax(0)
            found += [(inputs, largest[_INPUT]), (weight, largest[_WEIGHT])]
        if self._backward_ran:
            found.append((gradient, self._meta["scaling_bwd"].amax_history.amax(0)[_GRADIENT]))
        self.forget()
        return found

    def forget(self) -> None:
        """Drop what was recorded."""
        for part in ("scaling_fwd", "scaling_bwd"):
            if part in self._meta:
                self._meta[part].amax_history.zero_()
        self._forward_ran = self._backward_ran = False

    def _counted(self, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        out = compute(x)
        self._forward_ran = True
        if out.requires_grad:
            out.register_hook(self._note_backward)
        return out

    def _note_backward(self, grad: Tensor) -> None:
        self._backward_ran = True

    @torch.no_grad()
    def _give_scales(self, meta: dict[str, Any]) -> None:
        self._meta = meta
        forward, scale = meta["scaling_fwd"].scale, self._state.scale
        given = self._given
        if given is None or given[0] is not forward or given[1] is not scale or given[2] != scale._version:
            inputs, weight, gradient = (slot.column for slot in self._slots)
            forward[_INPUT].copy_(scale[inputs])
            forward[_WEIGHT].copy_(scale[weight])
            meta["scaling_bwd"].scale[_GRADIENT].copy_(scale[gradient])
            self._given = (forward, scale, scale._version)


class TransformerEngineState(ScalingState):
    """The scales of projections that Transformer Engine computes; names and rules are those of the other backends.

    Infinite values are flagged; a NaN may go unseen, because Transformer Engine's kernels drop it from the maximum.

    Args:
        recipe: how scales follow the amaxes.

    Raises:
        ImportError: Transformer Engine is missing; names the extra to install.
    """

    def __init__(self, recipe: DelayedScaling) -> None:
        super().__init__(recipe, "transformer_engine")
        self._seats: list[Seat] = []
        self._region = Fp8Region(_te_recipe(recipe))
        self._class = _projection_class(load_te().Linear)

    def install(self, part: nn.Module, projection: Projection, slots: tuple[Slot, Slot, Slot]) -> None:
        """Replace a projection by ``transformer_engine.pytorch.Linear``; its weight stays the same parameter.

        Args:
            part: the module that holds it.
            projection: a linear layer without bias.
            slots: of its input, weight and gradient.

        Raises:
            ValueError: a width is no multiple of 16.
        """
        linear = _te_linear(self._class, projection)
        seat = Seat(self, self._region, slots)
        linear.__dict__["seat"] = seat
        self._seats.append(seat)
        part.add_module(projection.name.rpartition(".")[2], linear)

    @torch.no_grad()
    def collect(self) -> None:
        """Take over the amaxes that the kernels have recorded."""
        found = [pair for seat in self._seats for pair in seat.take()]
        if not found:
            return
        columns, amaxes = zip(*found, strict=True)
        largest = torch.stack(amaxes).to(self.pending.device)
        largest = torch.where(largest.isfinite(), largest, torch.inf)
        index = torch.tensor(columns, device=largest.device)
        self.pending.scatter_reduce_(0, index, largest, "amax")

    def reset_state(self) -> None:
        """Forget everything, in Transformer Engine as well."""
        super().reset_state()
        for seat in self._seats:
            seat.forget()


def _projection_class(base: Any) -> Any:
    def forward(self: Any, inp: Tensor) -> Tensor:
        out = self.seat.run(self, lambda x: base.forward(self, x), inp)
        return cast(Tensor, out)

    members = {
        "__doc__": "A projection that Transformer Engine computes and this package scales.",
        # The compiler could not see through it; layers are compiled around it.
        "forward": torch.compiler.disable(forward),
        # These two being torch's own keep _extra_state out of state_dict.
        "get_extra_state": nn.Module.get_extra_state,
        "set_extra_state": nn.Module.set_extra_state,
    }
    return type(base.__name__, (base,), members)


def _te_linear(kind: Any, projection: Projection) -> nn.Module:
    old = projection.module
    weight = old._parameters["weight"]
    assert weight is not None
    if weight.shape[0] % _MULTIPLE or weight.shape[1] % _MULTIPLE:
        raise ValueError(
            f"layers.{projection.layer}.{projection.name} has a weight of {list(weight.shape)}; Transformer Engine "
            f"needs multiples of {_MULTIPLE} in FP8; keep role {projection.role!r} in high precision or use scaled_mm"
        )
    new: nn.Module = kind(
        weight.shape[1], weight.shape[0], bias=False, params_dtype=weight.dtype, device=weight.device
    )
    new.register_parameter("weight", weight)
    return new.train(old.training)


def _te_recipe(recipe: DelayedScaling) -> Any:
    te_recipes = load_te_recipes()
    formats = te_recipes.Format
    return te_recipes.DelayedScaling(
        margin=recipe.margin,
        fp8_format=formats.HYBRID if recipe.format == "hybrid" else formats.E4M3,
        amax_history_len=_ROWS,
        amax_compute_algo=_gather_rows,
        scaling_factor_compute_algo=_keep_scale,
        reduce_amax=False,
    )


def _gather_rows(amax_history: Tensor) -> Tensor:
    """Keep the maximum when Transformer Engine rolls: it moves row 0 to the end and empties the new row 0."""
    largest = amax_history.amax(0)
    amax_history[0].copy_(largest)
    return largest


def _keep_scale(amax: Tensor, scale: Tensor, fp8_max: Any, recipe: Any) -> Tensor:
    """Leave the scale as it is."""
    return scale
