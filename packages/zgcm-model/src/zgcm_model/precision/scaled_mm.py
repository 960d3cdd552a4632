"""FP8 products by ``torch.nn.functional.scaled_mm``: the tensor cores of a GPU, or a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

_MULTIPLE = 16
"""Rows of the right matrix and summed elements come in multiples of this."""
_FIRST_WITH_FP8 = (8, 9)


class ScaledMmProducts:
    """Scaled matrix products of PyTorch; sizes that are no multiple of 16 are padded with zeros.

    Source: ``torch.nn.functional.scaled_mm``; its layout on GPUs is row-major left, column-major right.
    """

    name = "scaled_mm"

    def __call__(
        self, left: Tensor, right: Tensor, inverses: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool
    ) -> Tensor:
        """Multiply as :class:`~zgcm_model.precision.linear.Products` says."""
        rows, summed = right.shape
        if summed % _MULTIPLE or rows % _MULTIPLE:
            left = padded(left, 0, -summed % _MULTIPLE)
            right = padded(right, -rows % _MULTIPLE, -summed % _MULTIPLE)
        with torch.autocast(left.device.type, enabled=False):
            if left.device.type == "cpu":
                # A CPU would round each scaled element before it multiplies.
                one = torch.ones_like(inverses[0])
                product = _scaled_mm(left, right, (one, one), torch.float32, fast)
                return (product[:, :rows] * (inverses[0] * inverses[1])).to(dtype)
            return _scaled_mm(left, right, inverses, dtype, fast)[:, :rows]


def _scaled_mm(
    left: Tensor, right: Tensor, inverses: tuple[Tensor, Tensor], dtype: torch.dtype, fast: bool
) -> Tensor:
    return F.scaled_mm(
        left,
        right.t(),
        inverses[0],
        ScalingType.TensorWise,
        inverses[1],
        ScalingType.TensorWise,
        output_dtype=dtype,
        use_fast_accum=fast,
    )


def padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Append zeros to an FP8 matrix."""
    return F.pad(matrix.view(torch.uint8), (0, columns, 0, rows)).view(matrix.dtype)


def has_fp8_units() -> bool:
    """Say whether this process has a GPU that multiplies FP8."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= _FIRST_WITH_FP8
