"""Where the elements of a sharded matrix lie.

A parameter of a device mesh is cut along mesh axes; each rank holds a rectangle of the matrix (possibly an
empty one). Everything here is computed from shape, mesh and placements alone.
"""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds.

    Args:
        tensor: plain or sharded.

    Returns:
        The shard itself, not a copy; a plain tensor comes back as it is.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def align_gradient(parameter: Tensor) -> Tensor:
    """Give a sharded parameter's gradient the placements of the parameter, summing partial values.

    Args:
        parameter: plain or sharded, with a gradient.

    Returns:
        The parameter.
    """
    gradient = parameter.grad
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return parameter
    if gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)
    return parameter
