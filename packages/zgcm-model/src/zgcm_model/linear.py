"""What the model asks of a linear layer, so that precision and parallelism can bring their own."""

from typing import Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class LinearFactory(Protocol):
    """Makes a projection; ``torch.nn.Linear`` is one."""

    def __call__(self, in_features: int, out_features: int, *, bias: bool) -> nn.Module:
        """Return a module that maps [..., in] to [..., out] and holds its weight as ``weight`` [out, in]."""
        ...
