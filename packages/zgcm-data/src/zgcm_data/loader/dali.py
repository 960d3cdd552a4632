"""The ``dali`` backend: NVIDIA DALI's WebDataset reader, driven by index files of one rank's rows.

The order is put into the index files: they list exactly the rows of this rank, one after the other, so DALI's
own threads read them and no Python runs per row. They are made for a stretch of rows at a time, so neither
the first batch nor the memory depends on the size of the set. Masks, ids and counts come from the same code as
in the ``python`` backend.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zgcm_data.loader.batch import Batch
from zgcm_data.loader.fields import BlockBatches, Job
from zgcm_data.loader.options import RowBlock
from zgcm_data.rows import Integers, Tokens
from zgcm_data.shards.manifest import Manifest, ShardError
from zgcm_data.shards.read import ShardSet
from zgcm_data.shards.tar import TOKENS_SUFFIX

STRETCH_BLOCKS = 16
"""Blocks of rows per set of index files."""

READ_TOKENS = 1 << 18
"""Tokens that DALI hands over at a time."""


def require() -> Any:
    """Import DALI.

    Raises:
        ImportError: it cannot be imported; the message names the extra to install.
    """
    try:
        import nvidia.dali.fn
        import nvidia.dali.types
    except (ImportError, OSError) as error:
        raise ImportError(
            'the "dali" backend needs NVIDIA DALI: pip install "zgcm-data[dali]", or use backend="python"'
        ) from error
    return nvidia.dali


def batches(job: Job) -> Iterator[Batch]:
    """Yield the micro batches of a job in order.

    Args:
        job: what to read; its source must be a ``ShardSet``.

    Raises:
        ShardError: the rows cannot be read as the manifest says.
        ValueError: the source is not a shard set.
    """
    if not isinstance(job.source, ShardSet):
        raise ValueError(
            f"the dali backend reads shard sets, not {type(job.source).__name__}; use backend='python'"
        )
    streamed = replace(job, source=_Source(job.source, _Stream(job, job.source)))
    for first, count in job.blocks():
        yield from BlockBatches(streamed, first, count)


class _Source:
    """A shard set whose tokens come from DALI, in the order of the job and no other."""

    def __init__(self, shards: ShardSet, stream: "_Stream") -> None:
        self._shards, self._stream = shards, stream

    @property
    def manifest(self) -> Manifest:
        return self._shards.manifest

    def __len__(self) -> int:
        return len(self._shards)

    def block(self, rows: Integers) -> RowBlock:
        return _Block(self._shards.block(rows), self._stream)


class _Block:
    def __init__(self, rows: RowBlock, stream: "_Stream") -> None:
        self.docs, self.per_row, self.ended = rows.docs, rows.per_row, rows.ended
        self._stream = stream

    def read_tokens(self, first: int, out: npt.NDArray[np.int64]) -> None:
        self._stream.fill(out)


class _Stream:
    """The tokens of a job's rows, one after the other."""

    def __init__(self, job: Job, shards: ShardSet) -> None:
        self._pieces = _pieces(job, shards)
        self._piece: Tokens = np.empty((0, 0), np.uint32)

    def fill(self, out: npt.NDArray[np.int64]) -> None:
        """Copy the next rows into ``out`` ``[n, T+1]``."""
        done = 0
        while done < len(out):
            if not len(self._piece):
                self._piece = next(self._pieces)
            count = min(len(out) - done, len(self._piece))
            np.copyto(out[done : done + count], self._piece[:count])
            self._piece = self._piece[count:]
            done += count


def _pieces(job: Job, shards: ShardSet) -> Iterator[Tokens]:
    """Yield uint32 ``[n, T+1]``, each valid until the next is asked for."""
    size = max(1, READ_TOKENS // (shards.manifest.sequence_length + 1))
    for first, count in job.blocks(STRETCH_BLOCKS):
        positions = job.positions(first, count)
        rows = positions[positions >= 0] % len(shards)
        pipeline = _build(shards, rows, size, max(1, job.options.threads)) if len(rows) else None
        for start in range(0, len(rows), size):
            tokens = _run(pipeline, shards)
            yield tokens[: len(rows) - start]


def _build(shards: ShardSet, rows: Integers, size: int, threads: int) -> Any:
    """Write index files of the rows and build a pipeline that reads them in order, ``size`` at a time."""
    dali = require()
    with tempfile.TemporaryDirectory(prefix="zgcm-index-") as folder:
        paths, indexes = [], []
        for number, (path, index) in enumerate(shards.indexes(rows)):
            file = Path(folder) / f"{number}.idx"
            file.write_bytes(index)
            paths.append(str(path))
            indexes.append(str(file))
        pipeline = dali.Pipeline(batch_size=size, num_threads=threads, device_id=None, prefetch_queue_depth=2)
        with pipeline:
            tokens = dali.fn.readers.webdataset(
                paths=paths,
                index_paths=indexes,
                ext=[TOKENS_SUFFIX],
                dtypes=[dali.types.UINT32],
                missing_component_behavior="error",
            )
            pipeline.set_outputs(tokens)
        pipeline.build()
    return pipeline


def _run(pipeline: Any, shards: ShardSet) -> Tokens:
    try:
        (tokens,) = pipeline.run()
    except RuntimeError as error:
        raise ShardError(f"DALI cannot read the shards in {shards.folder}: {error}") from error
    return np.asarray(tokens.as_tensor())
