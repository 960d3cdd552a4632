"""The loader: which rows are next, and the position that a checkpoint keeps."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from zgcm_data.loader import dali, python
from zgcm_data.loader.batch import Batch
from zgcm_data.loader.fields import Job
from zgcm_data.loader.options import LoaderOptions, RowSource
from zgcm_data.order import BatchPlan

Backend = Literal["auto", "python", "dali"]
_DEFAULTS = LoaderOptions()


class Loader:
    """Yields the micro batches of one data-parallel rank, in the order of the rows.

    Update k covers rows ``[start + (k-1)*G, start + k*G)`` whatever ``dp_size`` is. The position moves when a
    batch is handed out, so a state saved at any moment goes on with the row after the last batch. Tensor- and
    context-parallel ranks of one replica pass the same ``dp_rank`` and get the same rows.

    Args:
        shards: the rows, from ``open_shards``.
        global_batch: G, rows per update over all ranks.
        dp_rank: this rank among the data-parallel ranks.
        dp_size: number of data-parallel ranks.
        micro_batch: rows per micro batch of one rank.
        start_row: position of the first row to read.
        backend: ``python``; ``dali`` (extra ``zgcm-data[dali]``), with identical output; or ``auto``, which is
            ``python``, the faster of the two wherever we measured.
        options: everything else.

    Raises:
        ValueError: the numbers do not fit each other or the rows.
        ImportError: ``dali`` was asked for and is not installed.
    """

    def __init__(
        self,
        shards: RowSource,
        global_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        micro_batch: int = 1,
        start_row: int = 0,
        backend: Backend = "auto",
        *,
        options: LoaderOptions = _DEFAULTS,
    ) -> None:
        self.shards, self.options = shards, options
        self.plan = BatchPlan(global_batch, dp_rank, dp_size, micro_batch)
        self.backend, self._read = _choose(backend)
        self._next_row = self._checked(start_row)

    @property
    def accumulation(self) -> int:
        """Micro batches per update."""
        return self.plan.accumulation

    @property
    def next_row(self) -> int:
        """Position of the next row to hand out."""
        return self._next_row

    @property
    def total_rows(self) -> int:
        """Positions of the stage: rows of the set times epochs."""
        return len(self.shards) * self.options.epochs

    @property
    def dropped_rows(self) -> int:
        """Rows at the end that fill no update and are left out; 0 with ``remainder="pad"``."""
        if self.options.remainder == "pad":
            return 0
        return (self.total_rows - self._next_row) % self.plan.global_batch

    def __len__(self) -> int:
        """Return the number of updates that remain."""
        left, size = self.total_rows - self._next_row, self.plan.global_batch
        return -(-left // size) if self.options.remainder == "pad" else left // size

    def __iter__(self) -> Iterator[Batch]:
        """Yield micro batches from the current position to the end of the stage."""
        micro_steps = len(self) * self.accumulation
        job = Job(self.shards, self.plan, self._next_row, micro_steps, self.options)
        for batch in self._read(job):
            self._next_row = min(self._next_row + self.plan.rows_per_micro_step, self.total_rows)
            yield batch

    def describe(self) -> dict[str, Any]:
        """Return what a run's header must say about its data, as plain values."""
        manifest, plan = self.shards.manifest, self.plan
        return {
            "digest": manifest.digest,
            "stage": manifest.stage,
            "rows": len(self.shards),
            "epochs": self.options.epochs,
            "sequence_length": manifest.sequence_length,
            "packing": manifest.packing,
            "tokenizer_sha256": manifest.tokenizer_sha256,
            "cross_document_attention": not self.options.isolate_documents,
            "global_batch": plan.global_batch,
            "micro_batch": plan.micro_batch,
            "accumulation": plan.accumulation,
            "backend": self.backend,
            "next_row": self._next_row,
            "dropped_rows": self.dropped_rows,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position: ``next_row``, and the ``digest`` of the rows it belongs to."""
        return {"next_row": self._next_row, "digest": self.shards.manifest.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, under any ``dp_size``, micro batch and global batch.

        Args:
            state: from ``state_dict``.

        Raises:
            ValueError: the state belongs to other rows, or lies outside of them.
        """
        missing = {"next_row", "digest"} - set(state)
        if missing:
            raise ValueError(f"loader state lacks {sorted(missing)}; it is not from Loader.state_dict()")
        digest = self.shards.manifest.digest
        if state["digest"] != digest:
            raise ValueError(
                f"loader state belongs to a data set with digest {state['digest']}, but this one has "
                f"{digest}: the data, its order or its seed changed; resume with the set the run was started on, or "
                "begin a new stage at row 0"
            )
        self._next_row = self._checked(state["next_row"])

    def _checked(self, row: int) -> int:
        if isinstance(row, bool) or not isinstance(row, int):
            raise ValueError(f"start row is {row!r}; use an integer")
        if not 0 <= row <= self.total_rows:
            raise ValueError(
                f"start row {row} is outside the {self.total_rows} rows of this stage; rows of a new stage "
                "start at 0, whatever was consumed before"
            )
        return row


def _choose(backend: str) -> tuple[str, Callable[[Job], Iterator[Batch]]]:
    if backend in ("auto", "python"):
        return "python", python.batches
    if backend == "dali":
        dali.require()
        return backend, dali.batches
    raise ValueError(f"backend is {backend!r}; choose 'auto', 'python' or 'dali'")
