"""Run a function on several gloo ranks of this machine.

Ranks are forked, which takes a tenth of a second, and meet through a file, so no port is needed.
A test calls ``run_ranks(function, world, *args)``; the function receives ``(rank, world, *args)`` with
the default process group up, and its return values come back as a list in rank order.
"""

import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor


def _worker(
    rank: int, world: int, folder: str, results: Any, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    try:
        store = dist.FileStore(str(Path(folder) / "rendezvous"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        value = function(rank, world, *args)
        dist.barrier()
        torch.save(value, Path(folder) / f"result-{rank}.pt")
        results.put((rank, None))
    except BaseException:
        results.put((rank, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run ``function(rank, world, *args)`` on ``world`` gloo ranks and return their results in rank order.

    Args:
        function: what each rank does; forked, so a closure or a local function will do.
        world: number of ranks.
        *args: passed on unchanged.
        timeout: seconds after which every rank is killed.

    Returns:
        One value per rank; tensors come back on the CPU.

    Raises:
        AssertionError: a rank failed, died or hung; the message holds its traceback.
    """
    context = mp.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_worker, args=(rank, world, folder, results, function, args), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, results, world, timeout)
            return [torch.load(Path(folder) / f"result-{r}.pt", weights_only=False) for r in range(world)]
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _wait(ranks: list[Any], results: Any, world: int, timeout: float) -> None:
    deadline, waiting = time.monotonic() + timeout, set(range(world))
    while waiting:
        try:
            rank, error = results.get(timeout=0.2)
        except queue.Empty:
            dead = [r for r in waiting if ranks[r].exitcode not in (None, 0)]
            assert not dead, f"ranks {dead} died with exit codes {[ranks[r].exitcode for r in dead]}"
            assert time.monotonic() < deadline, f"ranks {sorted(waiting)} still running after {timeout} s"
            continue
        assert error is None, f"rank {rank} failed:\n{error}"
        waiting.discard(rank)


def assert_sharded_equal(sharded: Tensor, whole: Tensor, *, atol: float, rtol: float = 0.0) -> None:
    """Assert that a DTensor, gathered, equals ``whole``; every rank of its mesh must call this."""
    full = sharded.full_tensor() if hasattr(sharded, "full_tensor") else sharded
    torch.testing.assert_close(full.detach().cpu(), whole.detach().cpu(), atol=atol, rtol=rtol)
