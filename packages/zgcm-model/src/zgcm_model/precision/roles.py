"""The projections of a decoder by role."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from zgcm_model.block import Block
from zgcm_model.decoder import Decoder
from zgcm_model.precision.recipe import ROLES, HighPrecision, Role


class Projection(NamedTuple):
    """A projection of a decoder.

    Attributes:
        role: what it does.
        layer: 0-based index of its layer.
        name: its module's name within the layer.
        module: itself.
    """

    role: Role
    layer: int
    name: str
    module: nn.Module


def projections(decoder: Decoder) -> list[Projection]:
    """List the projections of a decoder, layer by layer."""
    return [projection for _, found in by_block(decoder) for projection in found]


def by_block(
    decoder: Decoder, table: HighPrecision | None = None
) -> Iterator[tuple[Block, list[Projection]]]:
    """Yield each layer with its projections; a global layer has no gate.

    Args:
        decoder: whose layers.
        table: projections to leave out.

    Yields:
        A layer and what it has.
    """
    for layer, block in enumerate(decoder.blocks()):
        found = []
        for role in ROLES:
            part = "attention" if role in ("q", "k", "v", "g", "o") else "feed_forward"
            module = block.get_submodule(part)._modules.get(f"{role}_proj")
            kept = table is not None and table.keeps(role, layer, decoder.config.num_layers)
            if module is not None and not kept:
                found.append(Projection(role, layer, f"{part}.{role}_proj", module))
        yield block, found
