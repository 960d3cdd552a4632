"""Switch the projections of a decoder to FP8 and say which are."""

from collections.abc import Callable
from typing import Literal, cast

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from zgcm_model.decoder import Decoder
from zgcm_model.precision.linear import Place, Products, ScaledLinear
from zgcm_model.precision.recipe import FORWARD, DelayedScaling, HighPrecision, Role
from zgcm_model.precision.reference import ReferenceProducts
from zgcm_model.precision.roles import Projection, by_block, projections
from zgcm_model.precision.scaled_mm import ScaledMmProducts, has_fp8_units
from zgcm_model.precision.scaling import ScalingState, Slot, UpdateReport
from zgcm_model.precision.transformer_engine import TransformerEngineState

Backend = Literal["auto", "reference", "scaled_mm", "transformer_engine"]
STATE = "scaling"
"""Name of the state within a decoder, so its checkpoint names are ``scaling.*``."""

_PRODUCTS: dict[str, Callable[[], Products]] = {"reference": ReferenceProducts, "scaled_mm": ScaledMmProducts}
_INPUTS: dict[Role, str] = {
    **dict.fromkeys(("q", "k", "v", "g"), "attention.input"),
    "o": "attention.o_proj.input",
    **dict.fromkeys(("gate", "up"), "feed_forward.input"),
    "down": "feed_forward.down_proj.input",
}
"""The input of each projection; those with the same share one quantization."""


def apply(
    decoder: Decoder,
    recipe: DelayedScaling,
    *,
    backend: Backend = "auto",
    high_precision: HighPrecision | None = None,
) -> Decoder:
    """Compute the projections of a decoder in FP8; in place, before tensor parallelism and FSDP.

    Parameters keep their names, shapes and dtypes, so files and optimizers see no difference. The scales are
    buffers ``scaling.*``, part of ``state_dict`` and filled by ``initialize``.

    Args:
        decoder: may be on the meta device.
        recipe: formats and scaling.
        backend: ``reference``, ``scaled_mm``, ``transformer_engine``, or ``auto``: ``scaled_mm`` where a GPU has FP8
            units, ``reference`` elsewhere.
        high_precision: projections to leave as they are; none when left out.

    Returns:
        The decoder.

    Raises:
        ValueError: the backend is unknown, FP8 is applied already, the decoder is sharded already, or the table
            names layers that do not exist.
        ImportError: Transformer Engine is asked for and missing; names the extra to install.
    """
    table = HighPrecision() if high_precision is None else high_precision
    _check(decoder, table)
    if backend == "transformer_engine":
        state: ScalingState = _use_transformer_engine(decoder, recipe, table)
    else:
        state = _use_own_projections(decoder, recipe, _make_products(backend), table)
    state.allocate(decoder.embed_tokens.weight.device)
    decoder.add_module(STATE, state)
    return decoder


def _use_own_projections(
    decoder: Decoder, recipe: DelayedScaling, products: Products, table: HighPrecision
) -> ScalingState:
    state = ScalingState(recipe, products.name)
    for block, found in by_block(decoder, table):
        inputs: dict[str, Slot] = {}
        for projection in found:
            slots = _slots(projection, state, inputs)
            projection.module.__class__ = ScaledLinear
            place = Place(state, products, *slots, owners=(block, decoder))
            cast(ScaledLinear, projection.module).bind(place)
    return state


def _use_transformer_engine(decoder: Decoder, recipe: DelayedScaling, table: HighPrecision) -> ScalingState:
    state = TransformerEngineState(recipe)
    for block, found in by_block(decoder, table):
        inputs: dict[str, Slot] = {}
        for projection in found:
            part = block.get_submodule(projection.name.partition(".")[0])
            state.install(part, projection, _slots(projection, state, inputs))
    return state


def update_scales(decoder: Decoder, group: ProcessGroup | None = None) -> UpdateReport:
    """Fold the amaxes of one optimizer step into the histories and compute the next scales.

    Call it once after each optimizer step, on every rank. It makes one collective, whatever the number of
    tensors. A tensor that was not seen keeps its state, and so does one that held NaN or infinity.

    Args:
        decoder: from :func:`apply`.
        group: the ranks whose amaxes count: all that share weights or split a tensor, so that their scales agree.
            None for this rank alone.

    Returns:
        Which histories moved on and which tensors held NaN or infinity.

    Raises:
        ValueError: the decoder has no FP8 projections.
    """
    return scaling_state(decoder).update(group)


def scaling_state(decoder: nn.Module) -> ScalingState:
    """Return the state of a decoder's scales.

    Args:
        decoder: from :func:`apply`.

    Returns:
        Its buffers are persistent, except the amaxes of the step at hand.

    Raises:
        ValueError: the decoder has none.
    """
    state = decoder._modules.get(STATE)
    if not isinstance(state, ScalingState):
        raise ValueError("the decoder has no FP8 state; call precision.apply(decoder, recipe) first")
    return state


def is_applied(decoder: nn.Module) -> bool:
    """Say whether :func:`apply` was called on a decoder."""
    return isinstance(decoder._modules.get(STATE), ScalingState)


def _slots(projection: Projection, state: ScalingState, inputs: dict[str, Slot]) -> tuple[Slot, Slot, Slot]:
    prefix, shared = f"layers.{projection.layer}.", _INPUTS[projection.role]
    if shared not in inputs:
        inputs[shared] = state.add(prefix + shared, FORWARD)
    weight = state.add(f"{prefix}{projection.name}.weight", FORWARD)
    gradient = state.add(f"{prefix}{projection.name}.gradient", state.recipe.gradient_dtype)
    return inputs[shared], weight, gradient


def _make_products(backend: str) -> Products:
    if backend == "auto":
        backend = "scaled_mm" if has_fp8_units() else "reference"
    if backend not in _PRODUCTS:
        names = ", ".join(("auto", *_PRODUCTS, "transformer_engine"))
        raise ValueError(f"backend={backend!r} is unknown; choose one of {names}")
    return _PRODUCTS[backend]()


def _check(decoder: Decoder, table: HighPrecision) -> None:
    table.check(decoder.config.num_layers)
    if is_applied(decoder):
        raise ValueError("FP8 is applied to this decoder already; call precision.apply once")
    if any(isinstance(parameter, DTensor) for parameter in decoder.parameters()):
        raise ValueError(
            "the decoder is sharded already; call precision.apply before apply_tensor_parallel and fully_shard"
        )
    for projection in projections(decoder):
        module = projection.module
        if type(module) is not nn.Linear or "bias" in dict(module.named_parameters()):
            raise ValueError(
                f"layers.{projection.layer}.{projection.name} is a {type(module).__name__}; FP8 replaces "
                "torch.nn.Linear without bias, so build the decoder without a linear class of its own"
            )
