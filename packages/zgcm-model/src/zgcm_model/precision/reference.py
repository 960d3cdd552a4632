"""The definition of an FP8 product: the quantized values, multiplied and added in float32."""

import torch
from torch import Tensor


class ReferenceProducts:
    """Float32 arithmetic on FP8 values; any device, any shape."""

    name = "reference"

    def __call__(
        self, left: Tensor, right: Tensor, inverses: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool
    ) -> Tensor:
        """Multiply as :class:`~zgcm_model.precision.linear.Products` says."""
        with torch.autocast(left.device.type, enabled=False):
            product = left.float() @ right.float().t()
            return (product * (inverses[0] * inverses[1])).to(dtype)
