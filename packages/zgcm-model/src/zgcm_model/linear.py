"""What the model asks of a linear layer, so that precision and parallelism can bring their own."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class LinearFactory(Protocol):
    """Makes a projection; ``torch.nn.Linear`` is one."""

    def __call__(self, in_features: int, out_features: int, *, bias: bool) -> nn.Module:
        """Return a module that maps [..., in] to [..., out] and holds its weight as ``weight`` [out, in]."""
        ...


class SharedInput:
    """An input of several projections: what they would each prepare from it is prepared once.

    Args:
        x: [..., in].
    """

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._prepared: Any = None

    def into(self, projection: nn.Module) -> Tensor:
        """Project the input.

        Args:
            projection: may offer ``prepare``, whose result is given to all projections in place of the input.

        Returns:
            [..., out].
        """
        prepare = getattr(projection, "prepare", None)
        if prepare is not None and self._prepared is None:
            self._prepared = prepare(self._x)
        out: Tensor = projection(self._x if prepare is None else self._prepared)
        return out


@runtime_checkable
class HasState(Protocol):
    """A module with buffers that must be filled after a build on the meta device."""

    def reset_state(self) -> None:
        """Fill the buffers as at the start of a run."""
        ...
