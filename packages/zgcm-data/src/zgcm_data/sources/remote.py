"""Read documents from an object store or the Hugging Face hub, through Daft."""

import re
from collections.abc import Iterator
from typing import Any

from zgcm_data import engine
from zgcm_data.records import CorpusError
from zgcm_data.sources.raw import Item, ReadOptions

TRIES = 3
CONNECT_MILLISECONDS = 10_000


def is_remote(path: str) -> bool:
    """Whether a path is an address, such as ``s3://bucket/*.parquet`` or ``hf://datasets/owner/name``."""
    return "://" in path


def list_remote(address: str) -> dict[str, int]:
    """Return the files of an address with their sizes, which stand for their content in a step's key.

    Raises:
        CorpusError: If it cannot be listed.
    """
    if address.startswith("hf://"):
        return {address: 0}
    try:
        frame = engine.daft().from_glob_path(address, io_config=listing_config())
        rows = engine.rows(frame.select("path", "size"))
    except Exception as error:  # Daft raises errors of many kinds for one fault: the store cannot be read
        raise CorpusError(f"{address} cannot be listed ({cause(error)}); check address and access") from error
    return {row["path"]: row["size"] for row in rows}


def read_remote(address: str, options: ReadOptions) -> Iterator[Item]:
    """Yield one item per row of the Parquet or JSONL files of an address.

    Raises:
        CorpusError: If they cannot be read or have no text column.
    """
    daft = engine.daft()
    lines = any(ending in address.lower() for ending in (".jsonl", ".ndjson", ".json"))
    try:
        frame = daft.read_json(address) if lines else daft.read_parquet(address)
        names = frame.schema().column_names()
    except Exception as error:  # see list_remote
        raise CorpusError(f"{address} cannot be read ({cause(error)}); check address and access") from error
    column = options.fields.get("text", "text")
    if column not in names and not set(options.text_fields) & set(names):
        raise CorpusError(f"{address} has no column {column!r} (it has {', '.join(names)})")
    source = options.source or address.rstrip("/").rpartition("/")[2].partition(".")[0]
    for number, values in enumerate(stream(frame), start=1):
        yield Item(f"{address}, row {number}", values, source, options.category or "general_text")


def stream(frame: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a frame without holding them all."""
    for batch in frame.to_arrow_iter():
        for start in range(0, batch.num_rows, 512):
            yield from batch.slice(start, 512).to_pylist()


def listing_config() -> Any:
    """Return how addresses are listed: with few tries, so that a store out of reach is an error within seconds.

    Access and endpoint come from the environment, such as ``AWS_ENDPOINT_URL``, as for any other program.
    """
    io = engine.daft().io
    return io.IOConfig(s3=io.S3Config(num_tries=TRIES, connect_timeout_ms=CONNECT_MILLISECONDS))


def cause(error: BaseException) -> str:
    """Return what Daft says of an error, and the cause at the bottom of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    deepest = re.sub(r"^\d+: ", "", lines[-1])
    return lines[0] if deepest == lines[0] else f"{lines[0]}: {deepest}"
