"""Measure how much memory one optimizer step needs beyond weights, gradients and state.

    python benchmarks/memory.py

Each candidate runs in a process of its own; the figure is the rise of the resident set's peak during the second
step (Linux only), in MiB and in units of the largest batch of equal shapes in float32.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
from peers import CANDIDATES, SLOW, available, parameters
from shapes import SETS


def peak() -> int:
    """Return the peak of the resident set since the last reset, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def measure(name: str, title: str) -> dict[str, float | str]:
    """Return the rise of the peak during one step."""
    torch.set_num_threads(1)
    makers, missing = available([name])
    if missing:
        return {"name": name, "left_out": missing[name]}
    shapes = SETS[title]
    optimizer = makers[name](parameters(shapes))
    optimizer.step()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = peak()
    optimizer.step()
    largest = max(sum(c * n * m for c, n, m in shapes if {n, m} == {*other[1:]}) * 4 for other in shapes)
    rise = peak() - before
    return {"name": name, "set": title, "mib": round(rise / 2**20, 1), "batches": round(rise / largest, 2)}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], sys.argv[2])))
    else:
        for candidate in (name for name in CANDIDATES if name not in SLOW):
            subprocess.run([sys.executable, __file__, candidate, "one layer at width 768"], check=True)
