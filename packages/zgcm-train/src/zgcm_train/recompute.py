"""Recompute activations in the backward pass instead of keeping them."""

import functools
from typing import Literal

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zgcm_model import Decoder
from zgcm_model.kernels import AttentionKernel, Documents

Recompute = Literal["none", "selective", "full"]


class RecomputedKernel:
    """An attention kernel whose inner values are computed again in the backward pass.

    Args:
        inner: does the attending.
    """

    def __init__(self, inner: AttentionKernel) -> None:
        """Take the name of the kernel inside."""
        self.inner = inner
        self.name = f"recomputed {inner.name}"

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, documents: Documents | None
    ) -> Tensor:
        """Attend as the kernel inside."""
        attend = functools.partial(self.inner, window=window, documents=documents)
        result: Tensor = checkpoint(attend, query, key, value, use_reentrant=False)
        return result


def apply_recompute(decoder: Decoder, mode: Recompute) -> None:
    """Trade computation for memory, in place; the numbers stay the same.

    Args:
        decoder: before it is sharded.
        mode: ``none``; ``selective``: the attention core; ``full``: every layer, of which only the input is kept.
    """
    for block in decoder.blocks():
        if mode == "selective":
            block.attention.kernel = RecomputedKernel(block.attention.kernel)
        elif mode == "full":
            again = functools.partial(checkpoint, block.forward, use_reentrant=False)
            object.__setattr__(block, "forward", again)
