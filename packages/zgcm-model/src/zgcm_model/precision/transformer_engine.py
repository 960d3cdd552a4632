"""FP8 projections by Transformer Engine's own linear layer and its delayed-scaling recipe.

Transformer Engine keeps histories and scales inside its modules and stores them as their ``_extra_state``. It moves a
history on once for each forward pass in training and once for each backward pass, and reduces amaxes over all ranks of
the default group.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zgcm_model._te import load_te, load_te_recipes
from zgcm_model.decoder import Decoder
from zgcm_model.precision.recipe import DelayedScaling, HighPrecision
from zgcm_model.precision.roles import Projection, by_block
from zgcm_model.precision.scaling import ScalingState, UpdateReport

_MULTIPLE = 16


class TransformerEngineState(ScalingState):
    """Stands where the scales of the other backends are; Transformer Engine keeps and updates its own."""

    def update(self, group: ProcessGroup | None) -> UpdateReport:
        """Report nothing: the scales have moved on already."""
        return UpdateReport((), self.pending, self.pending)


def use_transformer_engine(
    decoder: Decoder, recipe: DelayedScaling, table: HighPrecision
) -> TransformerEngineState:
    """Replace projections by ``transformer_engine.pytorch.Linear``; the weights stay the same parameters.

    Args:
        decoder: not sharded.
        recipe: translated into Transformer Engine's.
        table: projections to leave as they are.

    Returns:
        A state without tensors.

    Raises:
        ImportError: Transformer Engine is missing; names the extra to install.
        ValueError: a width is no multiple of 16.
    """
    te = load_te()
    region = _Region(te, _te_recipe(recipe))
    for block, found in by_block(decoder, table):
        for projection in found:
            part, name = projection.name.split(".")
            linear = _te_linear(te, projection)
            linear.register_forward_pre_hook(region.require)
            block.get_submodule(part).add_module(name, linear)
    decoder.register_forward_pre_hook(region.enter)
    decoder.register_forward_hook(region.leave, always_call=True)
    return TransformerEngineState(recipe, "transformer_engine")


class _Region:
    """Opens Transformer Engine's FP8 region around the decoder's forward pass."""

    def __init__(self, te: Any, recipe: Any) -> None:
        self._te, self._recipe = te, recipe
        self._open: list[Any] = []

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Open it (a forward pre-hook)."""
        # Renamed in Transformer Engine 2.9; both names take the recipe.
        if hasattr(self._te, "autocast"):
            region = self._te.autocast(enabled=True, recipe=self._recipe)
        else:
            region = self._te.fp8_autocast(enabled=True, fp8_recipe=self._recipe)
        region.__enter__()
        self._open.append(region)

    def require(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Refuse to compute in high precision unnoticed (a forward pre-hook of projections)."""
        if not self._open:
            raise ValueError(
                "a Transformer Engine projection ran outside the decoder's forward pass, where it would not compute in "
                "FP8; use neither recomputation nor pipeline stages with it, or take scaled_mm"
            )

    def leave(self, module: nn.Module, args: tuple[Any, ...], out: Tensor | None) -> None:
        """Close it (a forward hook that runs after errors too, without a result then)."""
        if self._open:
            self._open.pop().__exit__(None, None, None)


def _te_linear(te: Any, projection: Projection) -> nn.Module:
    old = projection.module
    weight = old._parameters["weight"]
    assert weight is not None
    if weight.shape[0] % _MULTIPLE or weight.shape[1] % _MULTIPLE:
        raise ValueError(
            f"layers.{projection.layer}.{projection.name} has a weight of {list(weight.shape)}; Transformer Engine "
            f"needs multiples of {_MULTIPLE} in FP8; keep role {projection.role!r} in high precision or use scaled_mm"
        )
    new: nn.Module = te.Linear(
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
        amax_history_len=recipe.amax_history_len,
        amax_compute_algo=recipe.amax_compute,
    )
