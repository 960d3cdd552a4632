"""Time on the device that computes: CUDA events on a GPU, the processor's clock elsewhere."""

import time
from collections.abc import Callable

import torch


class Clock:
    """Times calls and reads the memory of one device.

    Args:
        device: ``cuda`` or ``cpu``.
    """

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def seconds(self, call: Callable[[], object], repeats: int = 1) -> float:
        """Return the mean seconds of a call over back-to-back repeats."""
        if not self.cuda:
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - start) / repeats
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeats):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1000 / repeats

    def wait(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def memory(self) -> float:
        """Bytes of the device; infinite where it is the machine's."""
        return float(torch.cuda.get_device_properties(0).total_memory) if self.cuda else float("inf")

    def start_peak(self) -> None:
        """Forget the peak so far, and give cached memory back."""
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        """Largest allocated memory since ``start_peak``; None where it is not counted."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.cuda else None
