"""Read files into raw documents: which files, how they are opened, where one document ends.

Lines end at a newline byte and nowhere else, so U+2028 and its like inside a text split nothing.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from zgcm_data.engine import arrow
from zgcm_data.records import CorpusError

JSONL = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".ndjson.zst")
PARQUET = (".parquet",)
TEXT_CATEGORY = {".tex": "latex", ".bib": "latex"} | dict.fromkeys(
    (".txt", ".md", ".rst", ".html", ".htm", ".org", ".adoc", ".text", ".csv", ".log", ""), "general_text"
)
CODE_SUFFIXES = (
    ".py",
    ".pyi",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".cxx",
    ".hpp",
    ".cu",
    ".cuh",
    ".rs",
    ".go",
    ".java",
    ".kt",
    ".scala",
    ".js",
    ".ts",
    ".jsx",
    ".tsx",
    ".rb",
    ".php",
    ".pl",
    ".lua",
    ".r",
    ".jl",
    ".m",
    ".swift",
    ".sh",
    ".bash",
    ".zsh",
    ".sql",
    ".hs",
    ".ml",
    ".ex",
    ".erl",
    ".clj",
    ".lisp",
    ".vim",
    ".css",
    ".scss",
    ".toml",
    ".yaml",
    ".yml",
    ".json",
    ".xml",
    ".cmake",
    ".proto",
)
TEXT_CATEGORY |= dict.fromkeys(CODE_SUFFIXES, "code")
REMEDY = 'repair or remove it, or set input.on_error = "skip" to leave such documents out and count them.'


@dataclass(frozen=True)
class ReadOptions:
    """How documents are read.

    Args:
        category: Category where the input names none; empty guesses from the file name.
        skip: Count and leave out bad documents where ``True``, else refuse the first.
        fields: Name in the input of each field that is not called by its own name.
        text_fields: Fields joined by newlines where there is no text field.
        profile: Name of the cleaning profile that the records carry.
        source: Source of documents that name none; empty takes the name of the file or folder.
    """

    category: str = ""
    skip: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    text_fields: tuple[str, ...] = ()
    profile: str = ""
    source: str = ""


class BadDocument(CorpusError):
    """A fault of one document, which ``skip`` may leave out.

    Args:
        fault: Short name of the kind of fault.
        message: The sentence for people.
    """

    def __init__(self, fault: str, message: str) -> None:
        super().__init__(f"{message}; {REMEDY}")
        self.fault = fault


@dataclass(frozen=True)
class Item:
    """One raw document, or the fault found while reading it."""

    place: str
    values: Mapping[str, Any]
    source: str
    category: str
    fault: BadDocument | None = None


def list_files(path: Path) -> list[Path]:
    """Return the readable files of a corpus, sorted by name.

    Raises:
        CorpusError: If there are none.
    """
    if not path.exists():
        raise CorpusError(f"corpus {path} does not exist; check the path")
    if path.is_file():
        return [path]
    files = [item for item in sorted(path.rglob("*")) if item.is_file() and not hidden(item, path)]
    structured = [item for item in files if item.name.lower().endswith((*JSONL, *PARQUET))]
    chosen = structured or [item for item in files if item.suffix.lower() in TEXT_CATEGORY]
    if not chosen:
        raise CorpusError(
            f"folder {path} holds no .jsonl, .parquet or text file; put documents there or name another"
        )
    return chosen


def hidden(path: Path, root: Path) -> bool:
    """Whether a part of the path below ``root`` starts with a dot."""
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def read_file(file: Path, root: Path, options: ReadOptions) -> Iterator[Item]:
    """Yield the raw documents of one file."""
    name = file.name.lower()
    relative = file.relative_to(root).as_posix() if root.is_dir() else file.name
    source = options.source or file.name.partition(".")[0] or file.name
    if name.endswith(JSONL):
        yield from read_jsonl(file, source, options.category or "general_text")
    elif name.endswith(PARQUET):
        yield from read_parquet(file, source, options)
    else:
        yield read_text_file(file, relative, root, options)


def read_text_file(file: Path, relative: str, root: Path, options: ReadOptions) -> Item:
    """Return one text file as a document; its folder is the source."""
    category = options.category or TEXT_CATEGORY.get(file.suffix.lower(), "general_text")
    folder = relative.partition("/")[0] if "/" in relative else (root if root.is_dir() else root.parent).name
    folder = options.source or folder
    try:
        values = {"text": file.read_bytes().decode("utf-8"), "id": relative}
    except UnicodeDecodeError as error:
        return Item(str(file), {}, folder, category, not_utf8(str(file), error))
    return Item(str(file), values, folder or "files", category)


def read_jsonl(file: Path, source: str, category: str) -> Iterator[Item]:
    """Yield one item per non-empty line."""
    with open_bytes(file) as stream:
        for number, line in enumerate(lines(stream, file), start=1):
            place = f"{file}, line {number}"
            if not line.strip():
                continue
            fault = None
            values: Any = {}
            try:
                values = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                fault = not_utf8(place, error)
            except (json.JSONDecodeError, RecursionError) as error:
                fault = BadDocument("broken JSON", f"{place}: not a JSON object ({error})")
            if fault is None and not isinstance(values, dict):
                fault = BadDocument(
                    "broken JSON", f"{place}: a {type(values).__name__} where a JSON object must be"
                )
                values = {}
            yield Item(place, values, source, category, fault)


def open_bytes(file: Path) -> BinaryIO:
    """Open a plain, gzip or Zstandard file for reading bytes."""
    name = file.name.lower()
    if name.endswith(".zst"):
        stream: BinaryIO = arrow().input_stream(str(file), compression="zstd")
        return stream
    if name.endswith(".gz"):
        import gzip

        return gzip.open(file, "rb")  # type: ignore[return-value]
    return file.open("rb")


def lines(stream: BinaryIO, file: Path) -> Iterator[bytes]:
    """Yield the lines of a byte stream, split at newline bytes only.

    Raises:
        CorpusError: If a compressed file is damaged.
    """
    rest = b""
    while True:
        try:
            block = stream.read(1 << 20)
        except (OSError, EOFError) as error:
            raise CorpusError(
                f"{file} cannot be read ({error}); it is damaged or not what its name says"
            ) from error
        if not block:
            break
        parts = (rest + block).split(b"\n")
        rest = parts.pop()
        yield from parts
    if rest:
        yield rest


def read_parquet(file: Path, source: str, options: ReadOptions) -> Iterator[Item]:
    """Yield one item per row.

    Raises:
        CorpusError: If it is not a parquet file or has no text column.
    """
    pyarrow = arrow()
    try:
        reader = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise CorpusError(f"{file} is not a parquet file; check that it was written completely") from error
    with reader:
        names = reader.schema_arrow.names
        column = options.fields.get("text", "text")
        if column not in names and not set(options.text_fields) & set(names):
            raise CorpusError(f"{file} has no column {column!r} (it has {', '.join(names)}); {text_remedy()}")
        number = 0
        for batch in reader.iter_batches(batch_size=512):
            for values in batch_rows(batch, file):
                number += 1
                yield Item(f"{file}, row {number}", values, source, options.category or "general_text")


def batch_rows(batch: Any, file: Path) -> list[dict[str, Any]]:
    """Return a batch as rows.

    Raises:
        CorpusError: If a string column holds bytes that are not UTF-8.
    """
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{file} holds text that is not UTF-8 ({error.reason}); write it again as UTF-8"
        ) from error
    return rows


def not_utf8(place: str, error: UnicodeDecodeError) -> BadDocument:
    """Return the fault of bytes that are not UTF-8."""
    return BadDocument("not UTF-8", f"{place}: not UTF-8 (byte {error.start})")


def text_remedy() -> str:
    """Return how to name the text field."""
    return 'name the column that holds the text with input.fields = { text = "NAME" }'
