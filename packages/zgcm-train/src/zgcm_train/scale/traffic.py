"""Collectives of a piece of work: what kind, over which axes, and how many bytes leave this rank.

Bytes are those that a ring sends: of n ranks, an all-gather and a reduce-scatter send (n-1)/n of the whole tensor, an
all-reduce twice that; an all-to-all and a send what goes to others.

Source: Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, 2005.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Collective:
    """One collective of this rank.

    Attributes:
        kind: ``all-gather``, ``reduce-scatter``, ``all-reduce``, ``all-to-all``, ``broadcast``, ``send``,
            ``receive``.
        ranks: global ranks that take part.
        sent: bytes that leave this rank.
        elements: of the whole tensor; of this rank's input for an all-to-all.
        integer: whether it carries ids or counts.
    """

    kind: str
    ranks: tuple[int, ...]
    sent: int
    elements: int
    integer: bool


@contextmanager
def count_collectives() -> Iterator[list[Collective]]:
    """Collect every collective that this rank takes part in, inside the block.

    Yields:
        A list that grows with each.
    """
    found: list[Collective] = []
    with CollectiveWatch(found.append):
        yield found


class CollectiveWatch(TorchDispatchMode):
    """Tells about every collective that passes.

    Args:
        tell: called with each.
    """

    def __init__(self, tell: Callable[[Collective], None]) -> None:
        """Watch once entered."""
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at one operation and run it."""
        if func.namespace in NAMESPACES and (seen := describe(func, args)) is not None:
            self._tell(seen)
        return func(*args, **(kwargs or {}))


NAMESPACES = frozenset({"c10d", "_c10d_functional"})
_SILENT = frozenset({"barrier", "monitored_barrier_", "wait_tensor"})


@dataclass(frozen=True)
class _Form:
    """How an operation is called: its kind, and where the whole tensor and the group stand among the arguments."""

    kind: str
    whole: int = 0
    group: int = 1


_FORMS = {
    "c10d::allreduce_": _Form("all-reduce"),
    "c10d::broadcast_": _Form("broadcast"),
    "c10d::send": _Form("send"),
    "c10d::recv_": _Form("receive"),
    "c10d::allgather_": _Form("all-gather", group=2),
    "c10d::_allgather_base_": _Form("all-gather", group=2),
    "c10d::_reduce_scatter_base_": _Form("reduce-scatter", whole=1, group=2),
    "c10d::alltoall_base_": _Form("all-to-all", whole=1, group=2),
    "_c10d_functional::all_reduce": _Form("all-reduce", group=2),
    "_c10d_functional::reduce_scatter_tensor": _Form("reduce-scatter", group=3),
}
# Of each whole tensor, times (n - 1) / n for n ranks.
_PASSES = {"all-gather": 1, "reduce-scatter": 1, "broadcast": 1, "all-reduce": 2}


def describe(func: Any, args: Sequence[Any]) -> Collective | None:
    """Read an operation of PyTorch's communication namespaces.

    Args:
        func: the operation.
        args: what it is called with.

    Returns:
        The collective; None for one that moves no data.

    Raises:
        ValueError: an operation that this version cannot count.
    """
    name = func._schema.name
    if name.partition("::")[2] in _SILENT:
        return None
    if name not in _FORMS:
        raise ValueError(f"the collective {name!r} cannot be counted; add it to zgcm_train.scale.traffic")
    form = _FORMS[name]
    ranks = _ranks(args[form.group])
    whole = [t for t in tree_leaves(args[form.whole]) if isinstance(t, Tensor)]
    size = sum(t.numel() * t.element_size() for t in whole)
    if form.kind in _PASSES:
        sent = _PASSES[form.kind] * size * (len(ranks) - 1) // len(ranks)
    elif form.kind == "all-to-all":
        sent = size - _kept(whole[0], args[4], ranks)
    else:
        sent = size if form.kind == "send" else 0
    # Weights in FP8 travel as bytes.
    integer = not any(t.is_floating_point() or t.dtype is torch.uint8 for t in whole)
    return Collective(form.kind, ranks, sent, sum(t.numel() for t in whole), integer)


def _ranks(group: Any) -> tuple[int, ...]:
    boxed = isinstance(group, torch.ScriptObject)
    found = ProcessGroup.unbox(group) if boxed else _resolve_process_group(group)
    return tuple(dist.get_process_group_ranks(found))


def _kept(source: Tensor, splits: Sequence[int], ranks: Sequence[int]) -> int:
    """Return the bytes of an all-to-all's input that stay on this rank."""
    if not splits:
        return source.numel() * source.element_size() // len(ranks)
    rows = source.shape[0]
    return splits[ranks.index(dist.get_rank())] * source[:1].numel() * source.element_size() if rows else 0
