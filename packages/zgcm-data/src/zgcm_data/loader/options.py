"""How a loader reads, apart from which rows."""

import os
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from zgcm_data.rows import Integers
from zgcm_data.shards.manifest import Manifest

Remainder = Literal["drop", "pad"]


class RowBlock(Protocol):
    """Some rows: their docs tables at once, their tokens on demand."""

    @property
    def docs(self) -> Integers:
        """The docs tables of the rows, joined, int64 ``[K, 4]``."""
        ...

    @property
    def per_row(self) -> Integers:
        """Entries of each row's docs table, int64 ``[n]``."""
        ...

    @property
    def ended(self) -> npt.NDArray[np.bool_]:
        """Whether the last token of each row ends its document, bool ``[n]``."""
        ...

    def read_tokens(self, first: int, out: npt.NDArray[np.int64]) -> None:
        """Fill ``out`` ``[m, T+1]`` with the tokens of rows ``first`` to ``first + m - 1`` of the block."""
        ...


class RowSource(Protocol):
    """Rows in an order: a ``ShardSet``, or a Megatron prefix opened as rows."""

    @property
    def manifest(self) -> Manifest:
        """What the rows are; its digest binds a saved position to them."""
        ...

    def __len__(self) -> int: ...

    def block(self, rows: Integers) -> RowBlock:
        """Look up rows by global index, at least one."""
        ...


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """Settings of a loader that do not change which rows it reads, apart from ``epochs`` and ``remainder``.

    Attributes:
        isolate_documents: leave the first target of each document out of the loss, for models in which
            attention stops at document borders. Off as published: attention crosses documents.
        epochs: how often to go through the rows. Positions go on counting: row p of the stage is row
            ``p % len(shards)`` of the set.
        remainder: what to do with rows that do not fill a last update: ``drop`` leaves them out (the loader
            says how many), ``pad`` adds masked rows that count nowhere.
        workers: reading threads; 0 reads in the calling thread; None is one where the process may run on two
            cores or more, and 0 on one core, where a thread costs time and helps only with slow storage. The
            order never depends on it.
        prefetch: pieces of about 262,144 tokens that the threads hold ready.
        timeout: seconds without data after which a stalled reading thread of the ``python`` backend is an
            error; without a thread nothing watches.
        pin_memory: page-locked tensors for copies to a GPU; None means yes where there is a GPU.
        device: where batches are delivered, such as ``cuda:0``; None means the CPU.
    """

    isolate_documents: bool = False
    epochs: int = 1
    remainder: Remainder = "drop"
    workers: int | None = None
    prefetch: int = 4
    timeout: float = 600.0
    pin_memory: bool | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("workers", 0), ("prefetch", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; use {least} or more")
        if self.remainder not in ("drop", "pad"):
            raise ValueError(f"remainder is {self.remainder!r}; choose 'drop' or 'pad'")
        if not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout}; use a number of seconds above 0")

    @property
    def threads(self) -> int:
        """Reading threads: ``workers``, or what suits the cores of this process."""
        return min(1, usable_cores() - 1) if self.workers is None else self.workers


def usable_cores() -> int:
    """Return the number of cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
