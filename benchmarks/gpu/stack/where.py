"""Where the time of a micro-batch goes, from one profile: matrix products by their sizes, the rest by its name."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from zgcm_model import ModelConfig

PARTS = ("attention", "projections", "feed-forward", "head and loss", "norms and other")
_PRODUCTS = re.compile(r"^aten::(mm|addmm|bmm|baddbmm|matmul|linear|_scaled_mm|_scaled_mm_v2)$")
_ATTENTION = re.compile(r"flex|flash|fmha|triton_tem|scaled_dot_product|dot_product_attention", re.IGNORECASE)
_PRODUCT_KERNELS = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|wgmma", re.IGNORECASE)


class Work(NamedTuple):
    """Time that one operation spent by itself.

    Attributes:
        name: of the operation or kernel.
        sizes: of its inputs, empty where unknown.
        seconds: on the device.
    """

    name: str
    sizes: tuple[int, ...]
    seconds: float


def classify(work: Work, config: ModelConfig) -> str:
    """Return the part of ``PARTS`` that some work belongs to.

    Args:
        work: an operation.
        config: sizes that tell products apart.
    """
    if _ATTENTION.search(work.name):
        return "attention"
    # No other tensor of the model has a side as long as the vocabulary.
    if config.vocab_size in work.sizes or "log_softmax" in work.name.lower():
        return "head and loss"
    if not (_PRODUCTS.search(work.name) or _PRODUCT_KERNELS.search(work.name)):
        return "norms and other"
    return "feed-forward" if config.intermediate_size in work.sizes else "projections"


def where_time_goes(call: Callable[[], object], config: ModelConfig, device: str) -> dict[str, float]:
    """Profile one call.

    Args:
        call: runs a micro-batch.
        config: of its model.
        device: ``cuda`` or ``cpu``.

    Returns:
        Seconds by part.
    """
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as recorded:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    events = recorded.events() or []
    work = gpu_work(events) if device == "cuda" else cpu_work(events)
    totals: dict[str, float] = defaultdict(float)
    for item in work:
        totals[classify(item, config)] += item.seconds
    return {part: totals[part] for part in PARTS}


def cpu_work(events: Iterable[Any]) -> list[Work]:
    """Return what each operation did by itself."""
    return [Work(e.name, sizes(e.input_shapes), e.self_cpu_time_total / 1e6) for e in events]


def gpu_work(events: Iterable[Any]) -> list[Work]:
    """Return every kernel once: with the sizes of the operation that launched it where the profile knows it.

    Kernels of compiled programs are launched outside of operations, so the two lists do not cover each other.
    """
    kernels: dict[str, float] = defaultdict(float)
    launched: list[Work] = []
    for event in events:
        if event.device_type == DeviceType.CUDA:
            # Ranges that a program announces hold kernels that are listed themselves.
            if not (getattr(event, "is_user_annotation", False) or event.name.startswith("## ")):
                kernels[event.name] += event.time_range.elapsed_us() / 1e6
            continue
        for kernel in event.kernels:
            name = event.name if _PRODUCTS.search(event.name) else kernel.name
            launched.append(Work(name, sizes(event.input_shapes), kernel.duration / 1e6))
            kernels[kernel.name] -= kernel.duration / 1e6
    rest = [Work(name, (), seconds) for name, seconds in kernels.items() if seconds > 0]
    return launched + rest


def sizes(shapes: Iterable[Any] | None) -> tuple[int, ...]:
    """Return all sizes of all inputs; an input may be a list of shapes or have none."""
    found: list[int] = []
    for shape in shapes or ():
        if isinstance(shape, int):
            found.append(shape)
        else:
            found.extend(sizes(shape))
    return tuple(found)
