"""Speed of full-width ZGCM-1 layers on one GPU, forward, backward and Muon update, in BF16 and FP8.

    python benchmarks/gpu/layer_stack.py
    python benchmarks/gpu/layer_stack.py --device cpu --toy --backend eager

Needs torch and nothing else; takes this clone's packages as they are. First the peak of matrix products is measured on
the shapes of a layer, then each variant: tokens per second, model TFLOP/s with windows counted exactly, their share of
the measured peak, memory, and where the time goes. A variant that would overrun the budget is left out by name, one
that fails is printed with its error, and a watchdog ends the process at the deadline. README.md beside this explains
the figures. Exit code 0: at least one variant was measured; 1: none was.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stack.environment import use_this_clone

use_this_clone()

import torch  # noqa: E402
from stack.budget import Budget, start_watchdog  # noqa: E402
from stack.build import missing_part  # noqa: E402
from stack.clock import Clock  # noqa: E402
from stack.measure import measure, summarize  # noqa: E402
from stack.peaks import measure_peak  # noqa: E402
from stack.report import Report  # noqa: E402
from stack.settings import ORDER, Settings, fewer_layers, parse  # noqa: E402

FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError, ImportError)
"""What a library, a compiler or a driver of another version raises. Out of memory is a RuntimeError."""
T = TypeVar("T")


class Run:
    """One run of the script.

    Args:
        settings: from the command line.
        report: takes the results.
    """

    def __init__(self, settings: Settings, report: Report) -> None:
        self.settings, self.report = settings, report
        self.clock = Clock(settings.device)
        need = {"compiled": 0.0, "eager": 0.0} if settings.toy else None
        self.budget = Budget(settings.budget_seconds, need)
        self.peaks: dict[str, float] = {}
        self.pending = [name for name in ORDER if name in settings.variants]
        self.measured = 0

    def everything(self) -> None:
        """Measure peaks, then every variant that is asked for and fits the budget."""
        self.report.start(self.settings, self.clock)
        for kind in ("bf16", "fp8"):
            self.peak(kind)
        while self.pending:
            self.variant(self.pending[0])
            self.pending.pop(0)

    def peak(self, kind: str) -> None:
        """Measure the peak of matrix products."""
        config = self.settings.config("compiled", self.clock.memory())
        found = self._try(f"{kind} products", lambda: measure_peak(kind, config, self.settings, self.clock))
        if not isinstance(found, BaseException):
            self.report.peak(kind, found)
            self.peaks[kind] = found.overall

    def variant(self, variant: str) -> None:
        """Measure one variant, or say why not."""
        name, mode = variant.split()
        kind = "bf16" if name == "bf16" else "fp8"
        if reason := missing_part(name, self.settings.device):
            self.report.skipped(variant, reason)
        elif kind not in self.peaks or "bf16" not in self.peaks:
            self.report.skipped(variant, "its matrix products failed")
        elif not self.budget.allows(mode):
            self.report.skipped(variant, f"{self.budget.left():.0f} s of the budget are left, too few")
        else:
            self._measure_somehow(name, mode)

    def _measure_somehow(self, name: str, mode: str) -> None:
        """Measure; what does not fit is tried with fewer layers, what does not compile with attention apart."""
        error = self._measure(name, mode, self.settings)
        if error is None or not self.budget.allows(mode):
            return
        if isinstance(error, torch.OutOfMemoryError):
            layers = fewer_layers(self.settings.config(mode, self.clock.memory()).num_layers)
            if layers is not None:
                self._measure(name, mode, replace(self.settings, layers=layers))
        elif mode == "compiled":
            self._measure(name, "compiled apart", self.settings)

    def _measure(self, name: str, mode: str, settings: Settings) -> BaseException | None:
        """Measure and report; return what went wrong, if anything did."""
        variant, before = f"{name} {mode}", self.budget.spent()
        result = self._try(variant, lambda: measure(name, mode, settings, self.clock))
        if isinstance(result, BaseException):
            return result
        figures = summarize(result, settings, self.peaks, fp8=name != "bf16")
        spent = self.budget.spent() - before
        self.report.row(variant, figures, spent)
        self.budget.learn(mode.split(maxsplit=1)[0], spent)
        self.measured += 1
        return None

    def _try(self, what: str, call: Callable[[], T]) -> T | BaseException:
        """Return what a call returns, or report its failure and return that: other measurements go on."""
        try:
            return call()
        except FAILURES as error:
            self.report.failed(what, error)
            # The frames of tracebacks hold the tensors of the failed variant.
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: without the program's name.

    Returns:
        The exit code.
    """
    settings = parse(arguments)
    if settings.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device; try --device cpu --toy", file=sys.stderr)
        return 1
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(settings.json.open("w")) if settings.json else None
        run = Run(settings, Report(lines))
        watchdog = start_watchdog(settings.deadline_seconds, lambda: ", ".join(run.pending) or "nothing")
        stack.callback(watchdog.cancel)
        run.everything()
    print(f"\nmeasured {run.measured} variants in {run.budget.spent():.0f} s")
    return 0 if run.measured else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Compile workers may outlive an orderly exit by many seconds.
    os._exit(code)
