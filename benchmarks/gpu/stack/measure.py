"""Measure one variant: warm up, time micro-batches and the update, time the parts alone, profile once."""

import gc
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch._dynamo.utils import counters

from stack.build import Stack, build_stack
from stack.clock import Clock
from stack.settings import ACCUMULATION, Settings
from stack.where import where_time_goes
from zgcm_model import FlopsBreakdown, ModelConfig, flops_per_token
from zgcm_model.rotary import rotary_angles

LAYER_PRODUCTS = ("projections", "gate", "feed_forward")
"""Parts of the count that FP8 speeds up; attention core and head stay in bfloat16."""


@dataclass(frozen=True)
class Timings:
    """Seconds of one variant.

    Attributes:
        warm_up: the first micro-batch and update, compilation included.
        micro_batch: forward and backward of one micro-batch.
        update: clipping, Muon and Adam over the whole stack, on one device.
        window_layer: forward and backward of a window layer alone.
        global_layer: the same of a global layer.
        head: the same of final norm, head and loss.
    """

    warm_up: float
    micro_batch: float
    update: float
    window_layer: float
    global_layer: float
    head: float


@dataclass(frozen=True)
class Measured:
    """What a variant did.

    Attributes:
        config: its model.
        timings: seconds.
        loss: mean loss of the last micro-batch.
        peak_gib: largest allocated memory of a micro-batch and an update; None on a CPU.
        where: seconds of a micro-batch by part.
        programs: compiled ones, and the places where they break off.
    """

    config: ModelConfig
    timings: Timings
    loss: float
    peak_gib: float | None
    where: dict[str, float] = field(default_factory=dict)
    programs: tuple[int, int] = (0, 0)


def measure(name: str, mode: str, settings: Settings, clock: Clock) -> Measured:
    """Build and measure one variant, and free its memory.

    Args:
        name: the precision.
        mode: see ``build_stack``.
        settings: sizes.
        clock: of the device.

    Returns:
        What it did.

    Raises:
        RuntimeError: the loss is not finite.
    """
    # The compiler may hold on to the variant before.
    torch._dynamo.reset()
    counters.clear()
    gc.collect()
    clock.start_peak()
    config = settings.config("eager" if mode == "eager" else "compiled", clock.memory())
    stack = build_stack(config, settings, name, mode)
    warm_up = clock.seconds(lambda: (stack.micro_batch(), stack.update()))
    # Once more: FP8 now has scales, and a second layer index may have compiled anew.
    stack.micro_batch()
    micro_batch = clock.seconds(stack.micro_batch, settings.steps)
    loss = float(stack.micro_batch())
    if not math.isfinite(loss):
        raise RuntimeError(f"the loss of {name} {mode} is {loss}")
    update, peak = clock.seconds(stack.update), clock.peak_gib()
    where = where_time_goes(stack.micro_batch, config, settings.device)
    timings = Timings(warm_up, micro_batch, update, *time_parts(stack, clock))
    programs = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return Measured(config, timings, loss, peak, where, programs)


def time_parts(stack: Stack, clock: Clock) -> tuple[float, float, float]:
    """Return the seconds, forward and backward, of a window layer, a global layer and the head.

    Args:
        stack: to take the parts from.
        clock: of the device.
    """
    config, settings = stack.decoder.config, stack.settings
    shape = (settings.rows, settings.length, config.hidden_size)
    hidden = torch.randn(shape, device=settings.device, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(settings.length, device=settings.device)
    angles = rotary_angles(positions, config.rotary_dim, config.rotary_base)
    upstream = torch.randn_like(hidden)

    def layer(index: int) -> Callable[[], None]:
        return lambda: stack.decoder.layers[index](hidden, angles, None, None).backward(upstream)

    def head() -> None:
        stack.loss(stack.decoder.norm(hidden)).backward()

    def timed(call: Callable[[], None]) -> float:
        call()
        return clock.seconds(call, settings.steps)

    return timed(layer(0)), timed(layer(config.global_every - 1)), timed(head)


def summarize(
    measured: Measured, settings: Settings, peaks: dict[str, float], fp8: bool
) -> dict[str, object]:
    """Turn times into the figures of one row.

    Args:
        measured: of a variant.
        settings: sizes.
        peaks: measured operations per second of products, ``bf16`` and, where there is one, ``fp8``.
        fp8: whether the layers' products run in FP8.

    Returns:
        Figures by name, ready for JSON.
    """
    config, times = measured.config, measured.timings
    flops = flops_per_token(config, settings.length)
    speed = settings.tokens / times.micro_batch
    amortized = settings.tokens / (times.micro_batch + times.update / ACCUMULATION)
    return {
        "layers": config.num_layers,
        "window_layers": config.num_layers - config.num_global_layers,
        "global_layers": config.num_global_layers,
        "tokens_per_micro_batch": settings.tokens,
        "tokens_per_second": speed,
        "tflops": speed * flops.total / 1e12,
        "tflops_if_all_full": speed * flops.total_if_all_full / 1e12,
        "tokens_per_second_with_update": amortized,
        "tflops_with_update": amortized * flops.total / 1e12,
        "fraction_of_peak": {kind: speed * flops.total / peak for kind, peak in peaks.items()},
        "fraction_of_bound": speed * seconds_at_peak(flops, peaks, fp8),
        "peak_memory_gib": measured.peak_gib,
        "loss": measured.loss,
        "seconds": asdict(times),
        "where": measured.where,
        "compiled_programs": measured.programs[0],
        "program_breaks": measured.programs[1],
        "whole_model": whole_model(measured, settings),
    }


def seconds_at_peak(flops: FlopsBreakdown, peaks: dict[str, float], fp8: bool) -> float:
    """Return the seconds of a token if every operation ran at the measured peak of its precision."""
    layers = sum(getattr(flops, part) for part in LAYER_PRODUCTS)
    fast = peaks["fp8"] if fp8 else peaks["bf16"]
    return layers / fast + (flops.total - layers) / peaks["bf16"]


def whole_model(measured: Measured, settings: Settings) -> dict[str, float]:
    """Compute, from the parts timed alone, a micro-batch of the model with all its layers.

    Args:
        measured: of a variant.
        settings: sizes.

    Returns:
        Tokens per second and model TFLOP/s; embedding and whatever lies between the parts are left out.
    """
    whole = measured.config if settings.toy else ModelConfig.preset("zgcm-1-7b")
    times, wide = measured.timings, whole.num_global_layers
    layers = (whole.num_layers - wide) * times.window_layer + wide * times.global_layer
    speed = settings.tokens / (layers + times.head)
    return {
        "layers": whole.num_layers,
        "tokens_per_second": speed,
        "tflops": speed * flops_per_token(whole, settings.length).total / 1e12,
    }
