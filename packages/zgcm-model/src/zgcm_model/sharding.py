"""From a full tensor to the part a rank holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


def local_part(full: Tensor, like: Tensor) -> Tensor:
    """Return the part of a full tensor that this rank holds of a parameter; no communication.

    Args:
        full: the whole tensor, the same on every rank.
        like: the parameter, a DTensor or not.

    Returns:
        A tensor of the shape of the local parameter.
    """
    if not isinstance(like, DTensor):
        return full
    whole = distribute_tensor(
        full, like.device_mesh, [Replicate()] * like.device_mesh.ndim, src_data_rank=None
    )
    return whole.redistribute(placements=like.placements).to_local()
