"""The measured peak of matrix products: BF16 and FP8, on the shapes of a layer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stack.clock import Clock
from stack.settings import Settings
from zgcm_model import ModelConfig

_SECONDS = 0.25
"""A shape is repeated for about this long, so that clocks settle as they do in training."""


@dataclass(frozen=True)
class Peak:
    """Operations per second of matrix products.

    Attributes:
        overall: all shapes of a layer, each once, by their total time.
        best: the fastest shape.
    """

    overall: float
    best: float


def layer_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """Return [out, in] of a window layer's projections."""
    hidden, wide = config.hidden_size, config.intermediate_size
    query, kv = config.query_size, config.kv_size
    attention = [(query, hidden), (kv, hidden), (kv, hidden), (query, hidden), (hidden, query)]
    return [*attention, (wide, hidden), (wide, hidden), (hidden, wide)]


def measure_peak(kind: str, config: ModelConfig, settings: Settings, clock: Clock) -> Peak:
    """Measure products of a micro-batch's rows with each weight of a layer.

    Args:
        kind: ``bf16`` or ``fp8``.
        config: gives the shapes.
        settings: gives rows and device.
        clock: of the device.

    Returns:
        The peak.
    """
    multiply = {"bf16": _bf16, "fp8": _fp8}[kind]
    work, time, best = 0.0, 0.0, 0.0
    measured: dict[tuple[int, int], float] = {}
    for out, summed in layer_shapes(config):
        flops = 2.0 * settings.tokens * out * summed
        if (out, summed) not in measured:
            measured[out, summed] = _seconds(multiply, settings, (out, summed), clock)
        work, time = work + flops, time + measured[out, summed]
        best = max(best, flops / measured[out, summed])
    return Peak(work / time, best)


_Multiply = Callable[[Tensor, Tensor], Callable[[], Tensor]]


def _seconds(multiply: _Multiply, settings: Settings, shape: tuple[int, int], clock: Clock) -> float:
    # Random values: zeros would need less power and run at higher clocks.
    left = torch.randn(settings.tokens, shape[1], device=settings.device, dtype=torch.bfloat16)
    right = torch.randn(shape, device=settings.device, dtype=torch.bfloat16)
    call = multiply(left, right)
    call()
    once = clock.seconds(call)
    return clock.seconds(call, max(1, min(200, round((0 if settings.toy else _SECONDS) / once))))


def _bf16(left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    out = torch.empty(left.shape[0], right.shape[0], device=left.device, dtype=left.dtype)
    return lambda: torch.mm(left, right.t(), out=out)


def _fp8(left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    one = torch.ones((), device=left.device)
    small_left, small_right = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
    return lambda: torch._scaled_mm(
        small_left, small_right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
