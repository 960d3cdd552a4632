"""Which process this is, and waiting for the others."""

from typing import TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    """Return this process's number in the run; 0 for a process alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes of the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Return whether this process writes the run's files and speaks to people."""
    return rank() == 0


def of_main(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return the main process's value on every process; each must call this.

    Args:
        value: anything that can be pickled.
        group: all processes, as another group than the default one.
    """
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def of_all(value: T) -> list[T]:
    """Return the value of every process, in their order, on every process; each must call this.

    Args:
        value: anything that can be pickled.
    """
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * world_size()
    dist.all_gather_object(values, value)
    return cast(list[T], values)


def any_process(flag: bool) -> bool:
    """Return whether the flag is set on any process; each must call this."""
    if not dist.is_initialized():
        return flag
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    raised = torch.tensor(int(flag), device=device)
    dist.all_reduce(raised, op=dist.ReduceOp.MAX)
    return bool(raised)


def barrier() -> None:
    """Wait until every process of the run is here."""
    if dist.is_initialized():
        dist.barrier()
