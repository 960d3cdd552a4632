"""How much memory this process has used at most."""

import resource
import sys

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the largest amount of memory held so far, in bytes.

    Args:
        device: a CUDA device gives its allocator's peak; the CPU gives the peak resident set of the process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes
