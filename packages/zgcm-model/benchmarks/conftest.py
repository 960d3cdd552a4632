"""Timing and memory of two ways to do the same, measured in one run.

On a machine that does other work as well, set ``ZGCM_CPU_TIME=1``: one thread, and processor seconds instead of
those on the wall.
"""

import multiprocessing
import os
import resource
import time

import pytest
import torch

BUSY = os.environ.get("ZGCM_CPU_TIME") == "1"
CLOCK = time.process_time if BUSY else time.perf_counter


def _seconds(work):
    start = CLOCK()
    work()
    return CLOCK() - start


@pytest.fixture
def race(benchmark):
    """Time ``ours`` with pytest-benchmark and the others beside it in turns; return each one's best seconds."""

    def run(ours, *others, rounds=3):
        torch.set_num_threads(1 if BUSY else 2)
        best = [float("inf")] * len(others)
        mine = []

        def together():
            for index, other in enumerate(others):
                best[index] = min(best[index], _seconds(other))
            return (), {}

        benchmark.pedantic(
            lambda: mine.append(_seconds(ours)),
            setup=together,
            rounds=rounds,
            warmup_rounds=min(rounds - 1, 1),
        )
        return min(mine), *best

    return run


def _child(work, results):
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    results.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


@pytest.fixture
def peak_bytes():
    """Return by how many bytes a forked process grows at most while it does the work."""

    def run(work):
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        process = context.Process(target=_child, args=(work, results))
        process.start()
        grown = results.get(timeout=600)
        process.join()
        return grown

    return run


@pytest.fixture
def report(capsys, benchmark):
    """Print a line even without -s, and keep the figure with the benchmark."""

    def say(text, **figures):
        benchmark.extra_info.update(figures)
        with capsys.disabled():
            print(f"\n  {text}", end="")

    return say
