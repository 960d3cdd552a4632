"""Kernels by name, and the choice of one by device."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from zgcm_model.kernels.banded import BandedKernel
from zgcm_model.kernels.flash import FlashKernel
from zgcm_model.kernels.flex import FlexKernel
from zgcm_model.kernels.protocol import AttentionKernel, Documents
from zgcm_model.kernels.reference import ReferenceKernel
from zgcm_model.kernels.transformer_engine import TransformerEngineKernel

_LOG = logging.getLogger("zgcm_model")


class AutoKernel:
    """Picks a kernel at the first call, by the device of the queries, and logs the choice once.

    ``picked`` holds the choice and ``name`` says it; before the first call they are None and ``auto``.
    """

    def __init__(self) -> None:
        self.name = "auto"
        self.picked: AttentionKernel | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, documents: Documents | None
    ) -> Tensor:
        """Attend with the kernel of this device."""
        return self.pick(query.device)(query, key, value, window=window, documents=documents)

    def pick(self, device: torch.device) -> AttentionKernel:
        """Choose for a device, once; a decoder calls it before its layers, which may be compiled.

        Args:
            device: where the queries will be.

        Returns:
            The choice; that of an earlier call whatever the device.
        """
        if self.picked is None:
            self.picked = make_kernel(choose_kernel(device))
            self.name = f"auto ({self.picked.name})"
            # A compiler cannot trace a log line: the layer would fall into two programs there.
            if not torch.compiler.is_compiling():
                _LOG.info("attention kernel %r was picked for device %s", self.picked.name, device)
        return self.picked


KERNELS: dict[str, Callable[[], AttentionKernel]] = {
    "auto": AutoKernel,
    "reference": ReferenceKernel,
    "banded": BandedKernel,
    "flex": FlexKernel,
    "flash": FlashKernel,
    "transformer_engine": TransformerEngineKernel,
}
"""Constructors by name."""


def choose_kernel(device: torch.device) -> str:
    """Name the kernel that suits a device.

    Args:
        device: where the queries live.

    Returns:
        ``flex`` on a GPU, ``banded`` elsewhere.
    """
    return "flex" if device.type == "cuda" else "banded"


def make_kernel(kernel: "str | AttentionKernel") -> AttentionKernel:
    """Return a kernel by name; a kernel passes through.

    Args:
        kernel: a name of ``KERNELS`` or a kernel.

    Returns:
        The kernel.

    Raises:
        ValueError: the name is unknown.
        ImportError: the kernel needs an extra that is not installed.
    """
    if not isinstance(kernel, str):
        return kernel
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r} is unknown; choose one of {', '.join(KERNELS)}")
    return KERNELS[kernel]()
