"""Attention kernels behind one protocol."""

from zgcm_model.kernels.protocol import AttentionKernel, Documents
from zgcm_model.kernels.registry import KERNELS, AutoKernel, choose_kernel, make_kernel

__all__ = ["KERNELS", "AttentionKernel", "AutoKernel", "Documents", "choose_kernel", "make_kernel"]
