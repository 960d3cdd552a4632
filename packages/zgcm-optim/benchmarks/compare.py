"""Compare one optimizer step with every other public Muon that is installed, in one run.

    python benchmarks/compare.py --rounds 7 --threads 2

Candidates take turns in every round, so that a busy machine slows all of them alike; the table shows the best
time of each and how it relates to ours. The error is that of the first update against the same polynomial in
float64, relative and in the Frobenius norm.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peers import CANDIDATES, SLOW, TRIPLE, available, parameters
from shapes import SETS, Shapes
from torch import Tensor

from zgcm_optim import orthogonalize


def times(optimizers: dict[str, Any], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return the seconds of each step; one warm-up step comes first."""
    for optimizer in optimizers.values():
        optimizer.step()
    result: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            start = clock()
            optimizer.step()
            result[name].append(clock() - start)
    return result


def update_error(make: Callable[[Any], Any], shape: tuple[int, int]) -> float:
    """Return the relative error of the direction of the first update."""
    params = parameters([(1, *shape)])
    before = params[0].detach().double().clone()
    gradient = params[0].grad
    assert gradient is not None
    make(params).step()
    moved = before * (1 - 1e-4) - params[0].detach().double()
    exact = orthogonalize(gradient.double(), coefficients=[TRIPLE], dtype=torch.float64)
    return float((unit(moved) - unit(exact)).norm())


def unit(matrix: Tensor) -> Tensor:
    """Return a matrix of Frobenius norm 1."""
    return matrix / matrix.norm()


def table(
    shapes: Shapes, makers: dict[str, Any], rounds: int, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """Return one row per candidate, the fastest first."""
    measured = times({name: make(parameters(shapes)) for name, make in makers.items()}, rounds, clock)
    ours = measured["zgcm-optim"]
    rows = []
    for name, seconds in measured.items():
        paired = statistics.median(other / own for other, own in zip(seconds, ours, strict=True))
        rows.append(
            {
                "name": name,
                "best_ms": round(min(seconds) * 1e3, 1),
                "ratio_of_best": round(min(seconds) / min(ours), 3),
                "median_ratio": round(paired, 3),
            }
        )
    return sorted(rows, key=lambda row: row["best_ms"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--slow", action="store_true", help="also those that compile or emulate float16")
    parser.add_argument("--cpu-time", action="store_true", help="processor time instead of the wall clock")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    names = [name for name in CANDIDATES if options.slow or name not in SLOW]
    makers, missing = available(names)
    for name, reason in missing.items():
        print(f"left out: {name} ({reason})", file=sys.stderr)
    clock = time.process_time if options.cpu_time else time.perf_counter
    for title in options.sets:
        for row in table(SETS[title], makers, options.rounds, clock):
            print(json.dumps({"set": title, "threads": options.threads, **row}), flush=True)
    for name, make in makers.items():
        errors = {f"{r}x{c}": round(update_error(make, (r, c)), 4) for r, c in ((768, 768), (768, 2064))}
        print(json.dumps({"error": name, **errors}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
