"""Packed documents as cumulative lengths, the form in which GPU kernels take them."""

from typing import NamedTuple

import torch
from torch import Tensor

from zgcm_model.kernels.protocol import Documents
from zgcm_model.kernels.segments import find_segments


class PackedLengths(NamedTuple):
    """Where documents start when all rows are laid end to end.

    Attributes:
        cumulative: int32 [documents + 1], from 0 to B * T.
        longest: length of the longest document.
    """

    cumulative: Tensor
    longest: int


def packed_lengths(documents: Documents, kernel: str) -> PackedLengths:
    """Return the lengths of the documents, computed once per forward pass.

    Args:
        documents: each a single run of its row, with as many keys as queries.
        kernel: name of the kernel that asks, for the error.

    Returns:
        Cumulative lengths.

    Raises:
        ValueError: a document is no single run, or there are more keys than queries.
    """

    def build() -> PackedLengths:
        square = documents.query_ids.shape == documents.key_ids.shape
        lengths = find_segments(documents.query_ids) if square else None
        if lengths is None:
            raise ValueError(
                f"kernel={kernel!r} needs document_ids in which each document is one run of its row, on one "
                "context-parallel rank; use kernel='flex'"
            )
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return PackedLengths(ends.to(documents.query_ids.device), max(lengths))

    return documents.derive("packed lengths", build)


def require_half_precision(dtype: torch.dtype, kernel: str) -> None:
    """Refuse dtypes that the GPU kernels do not compute in.

    Args:
        dtype: of queries, keys and values.
        kernel: name of the kernel, for the error.

    Raises:
        ValueError: the dtype is neither bfloat16 nor float16.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"kernel={kernel!r} cannot compute in {dtype}; run in bfloat16, or use kernel='flex'"
        )
