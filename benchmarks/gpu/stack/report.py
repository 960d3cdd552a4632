"""Print results as they come, and write them as JSON lines."""

import json
import platform
from typing import Any, TextIO

import torch

from stack.clock import Clock
from stack.peaks import Peak
from stack.settings import ACCUMULATION, Settings


class Report:
    """Where results go; every one is flushed, so that nothing is lost when the process ends early.

    Args:
        lines: an open file for JSON lines, or None.
    """

    def __init__(self, lines: TextIO | None) -> None:
        self._lines = lines

    def start(self, settings: Settings, clock: Clock) -> None:
        """Say on what and how everything is measured."""
        name = torch.cuda.get_device_name(0) if clock.cuda else platform.processor() or platform.machine()
        self._write({"kind": "start", "device": name, "torch": torch.__version__, "tokens": settings.tokens})
        print(f"{name}, torch {torch.__version__}, {settings.tokens:,} tokens per micro-batch")
        print("weights, gradients and momentum in bfloat16; the update runs whole on this device", flush=True)

    def peak(self, kind: str, peak: Peak) -> None:
        """Print a measured peak of matrix products."""
        self._write({"kind": "peak", "format": kind, "overall": peak.overall, "best": peak.best})
        overall, best = _tera(peak.overall), _tera(peak.best)
        print(f"{kind} products of a layer: {overall} TFLOP/s, best shape {best}", flush=True)

    def row(self, variant: str, figures: dict[str, Any], seconds: float) -> None:
        """Print a measured variant."""
        self._write({"kind": "row", "variant": variant, "status": "ok", "spent": seconds, **figures})
        shares = ", ".join(f"{v:.1%} of the {k} peak" for k, v in figures["fraction_of_peak"].items())
        memory = figures["peak_memory_gib"]
        whole, times = figures["whole_model"], figures["seconds"]
        print(
            f"\n{variant}: {figures['window_layers']} window + {figures['global_layers']} global layers, "
            f"measured in {seconds:.0f} s (first step {times['warm_up']:.1f} s)\n"
            f"  forward + backward  {figures['tokens_per_second']:>11,.0f} tokens/s  {figures['tflops']:8.2f} "
            f"model TFLOP/s ({figures['tflops_if_all_full']:.2f} by a counter that ignores windows)\n"
            f"  with Muon / {ACCUMULATION}       {figures['tokens_per_second_with_update']:>11,.0f} tokens/s  "
            f"{figures['tflops_with_update']:8.2f} model TFLOP/s; an update takes {times['update']:.3f} s\n"
            f"  {shares}; {figures['fraction_of_bound']:.1%} of the bound by formats\n"
            f"  memory {'not counted' if memory is None else f'{memory:.1f} GiB at most'}; "
            f"loss {figures['loss']:.3f}; {figures['compiled_programs']} compiled programs, "
            f"{figures['program_breaks']} breaks in them\n"
            f"  alone: {_alone(times, whole)}\n"
            f"  {_where(figures['where'])}",
            flush=True,
        )

    def failed(self, variant: str, error: BaseException) -> None:
        """Print a variant that failed."""
        name, text = type(error).__name__, " ".join(str(error).split())[:500]
        self._write({"kind": "row", "variant": variant, "status": "failed", "error": name, "message": text})
        print(f"\n{variant}: FAILED, {name}: {text}", flush=True)

    def skipped(self, variant: str, reason: str) -> None:
        """Print a variant that was left out."""
        self._write({"kind": "row", "variant": variant, "status": "skipped", "reason": reason})
        print(f"\n{variant}: left out, {reason}", flush=True)

    def _write(self, record: dict[str, Any]) -> None:
        if self._lines is not None:
            self._lines.write(json.dumps(record) + "\n")
            self._lines.flush()


def _tera(flops: float) -> str:
    return f"{flops / 1e12:.2f}"


def _milli(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def _alone(times: dict[str, float], whole: dict[str, float]) -> str:
    head = f"head and loss {_milli(times['head'])}"
    layers = f"window layer {_milli(times['window_layer'])}, global layer {_milli(times['global_layer'])}"
    return (
        f"{layers}, {head}; computed from these, {whole['layers']} layers: "
        f"{whole['tokens_per_second']:,.0f} tokens/s, {whole['tflops']:.2f} TFLOP/s"
    )


def _where(parts: dict[str, float]) -> str:
    total = sum(parts.values()) or 1.0
    shares = ", ".join(f"{name} {_milli(s)} ({s / total:.0%})" for name, s in parts.items())
    return f"one micro-batch, profiled: {shares}"
