"""The one place where Daft and Arrow are loaded, and the small set of operations built on them.

Everything that is ordered, grouped, joined or shuffled in this package is a Daft plan. It runs in this
process by default and, unchanged, on a Ray cluster after ``use_runner("ray", address)``.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any

from zgcm_data.records import keyed_hash

PART_BYTES = 32_000_000
MISSING = '{name} is needed to prepare data; install it with: pip install "zgcm-data[prepare]"'


@cache
def daft() -> Any:
    """Return the Daft module, with telemetry and progress bars off.

    Returns:
        The module ``daft``.

    Raises:
        ImportError: If Daft is not installed; names the extra.
    """
    for name, value in (
        ("DAFT_ANALYTICS_ENABLED", "0"),
        ("DO_NOT_TRACK", "1"),
        ("DAFT_PROGRESS_BAR", "0"),
        ("DAFT_SHOW_QUERY_ID", "0"),
        ("SCARF_NO_ANALYTICS", "true"),
    ):
        os.environ[name] = value
    try:
        import daft as module
    except (ImportError, OSError) as error:
        raise ImportError(MISSING.format(name="daft")) from error
    scans = max(1, (os.cpu_count() or 1) // 2)
    module.set_execution_config(default_morsel_size=8192, maintain_order=False, scantask_max_parallel=scans)
    return module


@cache
def arrow() -> Any:
    """Return the pyarrow module, with its parquet and compute parts loaded.

    Returns:
        The module ``pyarrow``.

    Raises:
        ImportError: If pyarrow is not installed; names the extra.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except (ImportError, OSError) as error:
        raise ImportError(MISSING.format(name="pyarrow")) from error
    return pyarrow


def use_runner(name: str, address: str | None = None) -> None:
    """Choose where Daft runs; must come before the first plan of the process.

    Args:
        name: ``"native"`` (this process) or ``"ray"``.
        address: Address of a Ray cluster; ``None`` starts a local one.

    Raises:
        ValueError: If the name is unknown.
        ImportError: If Ray is asked for and not installed.
    """
    if name == "native":
        daft().set_runner_native()
    elif name == "ray":
        if address is None:  # one machine: few partitions, and no token file in the user's home
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")
            daft().set_execution_config(shuffle_aggregation_default_partitions=os.cpu_count() or 1)
        try:
            daft().set_runner_ray(address=address, noop_if_initialized=True)
        except ImportError as error:
            raise ImportError('the ray runner needs Ray: pip install "zgcm-data[ray]"') from error
    else:
        raise ValueError(f"runner is {name!r}; use 'native' or 'ray'")


def read(path: Path) -> Any:
    """Return a lazy Daft frame over the parquet folder ``path``.

    Args:
        path: A folder written by ``write`` or ``RecordWriter``.

    Returns:
        A Daft data frame.
    """
    return daft().read_parquet(str(path / "*.parquet"))


def write(frame: Any, path: Path) -> None:
    """Run ``frame`` and write it as the parquet folder ``path``, all or nothing.

    Args:
        frame: A Daft data frame.
        path: The folder; replaced if it exists.
    """
    schema = frame.schema().to_pyarrow_schema()
    with FolderWriter(path, schema) as writer:
        for batch in frame.to_arrow_iter():
            writer.write(batch.cast(schema) if batch.schema != schema else batch)


class FolderWriter:
    """Writes a parquet folder in parts, all or nothing.

    A part is what a reader of the folder holds in memory at a time, so parts are small.

    Args:
        path: The folder; replaced if it exists.
        schema: Arrow schema.
    """

    def __init__(self, path: Path, schema: Any) -> None:
        self._path, self._schema = path, schema
        self._temporary = fresh_folder(path)
        self._number = self._bytes = 0
        self._part = self._open()

    def _open(self) -> Any:
        return arrow().parquet.ParquetWriter(
            self._temporary / f"part-{self._number:06d}.parquet", self._schema
        )

    def write(self, rows: Any) -> None:
        """Write an Arrow table or batch."""
        if self._bytes >= PART_BYTES:
            self._part.close()
            self._number, self._bytes = self._number + 1, 0
            self._part = self._open()
        self._part.write(rows)
        self._bytes += rows.nbytes

    def __enter__(self) -> "FolderWriter":
        """Start."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Put the folder in its place, unless something failed."""
        self._part.close()
        if kind is None:
            replace_folder(self._temporary, self._path)


def rows(frame: Any) -> list[dict[str, Any]]:
    """Run ``frame`` and return its rows (for small results only).

    Args:
        frame: A Daft data frame.

    Returns:
        One dictionary per row.
    """
    result: list[dict[str, Any]] = frame.to_pylist()
    return result


def joined(frames: Sequence[Any]) -> Any:
    """Put frames with equal columns one below the other.

    Args:
        frames: At least one frame.

    Returns:
        One frame.
    """
    return reduce(lambda above, below: above.concat(below), frames)


def batches(path: Path, columns: Sequence[str], size: int = 1024) -> Iterator[Any]:
    """Stream a parquet folder as Arrow batches, in file order, without loading it.

    Args:
        path: The folder.
        columns: Columns to read.
        size: Largest number of rows in a batch.

    Yields:
        ``pyarrow.RecordBatch`` objects.
    """
    for file in sorted(path.glob("*.parquet")):
        with arrow().parquet.ParquetFile(file) as reader:
            yield from reader.iter_batches(batch_size=size, columns=list(columns))


def function(dtype: Any, *, batch: int = 2048) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a batch function usable on Daft columns.

    Args:
        dtype: Daft type of the result.
        batch: Largest number of rows per call.

    Returns:
        The decorator.
    """
    decorator: Callable[[Callable[..., Any]], Callable[..., Any]] = daft().func.batch(
        return_dtype=dtype, batch_size=batch, use_process=False
    )
    return decorator


def keyed(column: Any, seed: str) -> Any:
    """Return the expression of the keyed hash of a text column, the key of every shuffle.

    Args:
        column: A Daft string expression.
        seed: See ``keyed_hash``.

    Returns:
        A Daft string expression of 32 hexadecimal digits.
    """

    def compute(ids: Any) -> list[str]:
        return [keyed_hash(seed, item) for item in ids.to_pylist()]

    return function(daft().DataType.string())(compute)(column)


def running_sum(column: Any, *, partition: Sequence[str], order: Sequence[str]) -> Any:
    """Return the running sum of ``column`` up to and with the current row.

    Args:
        column: A Daft numeric expression.
        partition: Columns that separate the sums.
        order: Columns that order the rows, all ascending.

    Returns:
        A Daft expression.
    """
    window = daft().Window().partition_by(*partition).order_by(*order)
    window = window.rows_between(daft().Window.unbounded_preceding, daft().Window.current_row)
    return column.sum().over(window)


def fresh_folder(path: Path) -> Path:
    """Create an empty temporary folder beside ``path``.

    Args:
        path: The folder that will be written.

    Returns:
        The temporary folder, removed first if an earlier run left it.
    """
    temporary = path.with_name(f".{path.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def replace_folder(temporary: Path, path: Path) -> None:
    """Put a finished temporary folder in its place.

    Args:
        temporary: The finished folder.
        path: Its final name; an older one is removed.
    """
    if path.exists():
        shutil.rmtree(path)
    os.replace(temporary, path)
