"""What is found out about one rank."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one rank.

    Attributes:
        weights: float32 shards.
        gradients: float32 shards, as the optimizer gets them.
        optimizer_state: moments.
        accumulated_gradients: what is held between micro-batches, whole where gradients are reduced once.
        activations: what the backward pass of the micro-batches in flight needs, the head's gradients included.
        weight_copies: weights in the compute dtype that autocast keeps for the backward pass.
        gathered_weights: whole weights that FSDP holds when the first backward pass begins.
        peak: the most that is alive at any moment of an update.
        peak_phase: when that is: ``forward``, ``backward`` or ``update``.
    """

    weights: int
    gradients: int
    optimizer_state: int
    accumulated_gradients: int
    activations: int
    weight_copies: int
    gathered_weights: int
    peak: int
    peak_phase: str


@dataclass(frozen=True)
class Traffic:
    """What one purpose sends in one update.

    Attributes:
        purpose: what for.
        kind: of collective.
        axes: mesh axes over which the ranks differ, joined by ``+``.
        count: collectives.
        sent: bytes that leave this rank.
    """

    purpose: str
    kind: str
    axes: str
    count: int
    sent: int


@dataclass(frozen=True)
class RankMeasure:
    """One rank.

    Attributes:
        rank: its number.
        place: its index along each mesh axis.
        shapes: of each parameter's local part.
        memory: bytes.
        traffic: of one update.
    """

    rank: int
    place: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    memory: MemoryUse
    traffic: tuple[Traffic, ...]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RankMeasure":
        """Read what ``as_dict`` returned, perhaps through JSON."""
        return cls(
            rank=values["rank"],
            place=dict(values["place"]),
            shapes={name: tuple(shape) for name, shape in values["shapes"].items()},
            memory=MemoryUse(**values["memory"]),
            traffic=tuple(Traffic(**entry) for entry in values["traffic"]),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)
