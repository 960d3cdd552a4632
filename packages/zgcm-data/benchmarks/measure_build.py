"""Build a made corpus and record, step by step, the seconds and the peak memory of the whole process tree.

Resident memory is the sum over the process and its children. ``anonymous`` leaves out mapped files, which are
page cache; Daft, Arrow and numpy hold what they hold in anonymous memory. ``cpu`` is processor seconds of all
threads, which count where the machine is busy with other work.

Run with: python measure_build.py CORPUS OUT (see make_text.py; OUT must not hold a finished build)
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

INTERVAL = 0.05
MEMORY = ("resident", "anonymous")


def recipe_of(corpus: Path) -> dict[str, Any]:
    """The recipe of the measured build."""
    return {
        "sequence_length": 4096,
        "input": {"path": str(corpus)},
        "heldout": {"bytes": 400_000},
        "tokenizer": {"vocab_size": 16_384},
    }


def run(corpus: Path, out: Path, told: Path) -> None:
    """Build; write each step's name to ``told`` when it begins."""
    from zgcm_data.build import build
    from zgcm_data.recipe import BuildRecipe

    def progress(step: str, fraction: float, note: str) -> None:
        partial = told.with_suffix(".partial")
        partial.write_text(step)
        partial.replace(told)

    result = build(BuildRecipe.from_dict(recipe_of(corpus)), out, progress=progress)
    told.with_suffix(".json").write_text(json.dumps({"steps": result.steps, "digest": result.digest}))


def tree(root: int) -> list[int]:
    """Return a process and all that descend from it."""
    found, queue = [], [root]
    while queue:
        pid = queue.pop()
        found.append(pid)
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                queue += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def resident(pids: list[int]) -> tuple[int, int]:
    """Return resident and anonymous bytes of processes."""
    total = anonymous = 0
    for pid in pids:
        try:
            lines = dict(
                line.split(":", 1)
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if ":" in line
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "VmRSS" in lines:
            total += int(lines["VmRSS"].split()[0]) * 1024
            anonymous += int(lines["RssAnon"].split()[0]) * 1024
    return total, anonymous


def processor_seconds(pids: list[int]) -> float:
    """Return the processor time of processes and of their children that have ended."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass
class Peak:
    """What was seen during one step: bytes, and processor seconds of the whole build at its end."""

    resident: int = 0
    anonymous: int = 0
    cpu: float = 0.0


def watch(root: int, told: Path, peaks: dict[str, Peak], done: threading.Event) -> None:
    """Sample until told to stop."""
    while not done.wait(INTERVAL):
        pids = tree(root)
        peak = peaks.setdefault(told.read_text() if told.exists() else "start", Peak())
        total, anonymous = resident(pids)
        peak.resident, peak.anonymous = max(peak.resident, total), max(peak.anonymous, anonymous)
        peak.cpu = max(peak.cpu, processor_seconds(pids))


def measure(corpus: Path, out: Path) -> dict[str, Any]:
    """Run the build in a fresh process and watch it."""
    told = out.with_name(f"{out.name}-step.txt")
    told.unlink(missing_ok=True)
    process = multiprocessing.get_context("spawn").Process(target=run, args=(corpus, out, told))
    peaks: dict[str, Peak] = {}
    done = threading.Event()
    started = time.perf_counter()
    process.start()
    assert process.pid is not None
    watcher = threading.Thread(target=watch, args=(process.pid, told, peaks, done))
    watcher.start()
    process.join()
    done.set()
    watcher.join()
    if process.exitcode:
        sys.exit(f"the build failed with exit code {process.exitcode}; peaks so far: {peaks}")
    result = json.loads(told.with_suffix(".json").read_text())
    return result | {"seconds": time.perf_counter() - started, "peaks": peaks}


def table(result: dict[str, Any]) -> str:
    """Return the figures for people, memory in MiB."""
    lines = [f"{'step':14s} {'seconds':>8s} {'cpu':>8s} {'resident':>9s} {'anonymous':>9s}"]
    seconds = {step["step"]: step["seconds"] for step in result["steps"]}
    before = 0.0
    for step, peak in result["peaks"].items():
        memory = f"{peak.resident >> 20:9,d} {peak.anonymous >> 20:9,d}"
        lines.append(f"{step:14s} {seconds.get(step, 0):8.1f} {peak.cpu - before:8.1f} {memory}")
        before = peak.cpu
    largest = [max(getattr(peak, name) for peak in result["peaks"].values()) >> 20 for name in MEMORY]
    lines.append(f"{'all':14s} {result['seconds']:8.1f} {before:8.1f} {largest[0]:9,d} {largest[1]:9,d}")
    return "\n".join([*lines, f"digest {result['digest']}"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    print(table(measure(arguments.corpus, arguments.out)))
