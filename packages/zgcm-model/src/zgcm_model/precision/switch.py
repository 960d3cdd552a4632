"""Going on from a checkpoint of another precision: only when asked for."""

from collections.abc import Iterable
from typing import Literal

from torch import nn

from zgcm_model.precision.injection import STATE, is_applied

Switch = Literal["none", "to_fp8", "from_fp8"]


def find_switch(saved_names: Iterable[str], decoder: nn.Module) -> Switch:
    """Say whether a checkpoint was made in another precision than a decoder has.

    Args:
        saved_names: names of the checkpoint's tensors, as in ``decoder.state_dict()``.
        decoder: what is to take them.

    Returns:
        ``to_fp8``: the decoder has scales and the checkpoint none; ``from_fp8``: the other way round.
    """
    saved = any(is_state_name(name) for name in saved_names)
    if saved == is_applied(decoder):
        return "none"
    return "from_fp8" if saved else "to_fp8"


def require_same_precision(
    saved_names: Iterable[str], decoder: nn.Module, *, allow_switch: bool = False
) -> Switch:
    """Refuse a checkpoint of another precision, unless the switch is meant.

    Args:
        saved_names: names of the checkpoint's tensors, as in ``decoder.state_dict()``.
        decoder: what is to take them.
        allow_switch: the switch is meant. Then leave out the names for which :func:`is_state_name` is true: scales
            start anew (``to_fp8``) or are not needed any more (``from_fp8``).

    Returns:
        What :func:`find_switch` returns.

    Raises:
        ValueError: the precisions differ and ``allow_switch`` is False.
    """
    switch = find_switch(saved_names, decoder)
    if switch != "none" and not allow_switch:
        was, now = ("BF16", "FP8") if switch == "to_fp8" else ("FP8", "BF16")
        raise ValueError(
            f"the checkpoint was made in {was} (or another high precision) and the decoder computes in {now}; "
            "keep the precision, or allow the switch with allow_switch=True"
        )
    return switch


def is_state_name(name: str) -> bool:
    """Say whether a name in ``decoder.state_dict()`` belongs to the FP8 scales."""
    return name.startswith(f"{STATE}.")
