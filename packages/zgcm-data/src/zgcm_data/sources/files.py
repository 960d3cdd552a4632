"""Read the user's documents: JSONL (plain, gz, zst), Parquet, or a folder of text files.

Every fault of a document is either one clear ``CorpusError`` or a counted, reported skip, as the caller says.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zgcm_data.records import CorpusError, Record, canonical_sha256, check_category
from zgcm_data.sources.raw import REMEDY, BadDocument, Item, ReadOptions, list_files, read_file, text_remedy
from zgcm_data.sources.remote import is_remote, read_remote

__all__ = ["ReadOptions", "ReadReport", "list_files", "read_records"]

SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass
class ReadReport:
    """What was read and what was left out.

    Args:
        documents: Documents read.
        bytes: UTF-8 bytes of their text.
        skipped: Number of skips per fault.
        examples: First message of each fault.
    """

    documents: int = 0
    bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)


def read_records(
    path: Path | str, options: ReadOptions, report: ReadReport, seen: dict[str, str] | None = None
) -> Iterator[Record]:
    """Read every document below ``path``, in the order of file names.

    Args:
        path: A file, a folder, or an address such as ``s3://bucket/*.parquet``.
        options: See ``ReadOptions``.
        report: Filled on the way.
        seen: Ids already taken and by what; filled on the way.

    Yields:
        Records with unique ids.

    Raises:
        CorpusError: Names the file, the fault and the remedy.
    """
    seen = {} if seen is None else seen
    before = report.documents
    for item in items(path, options):
        try:
            record = make_record(item, options)
            claim_id(record, item, seen)
        except BadDocument as error:
            if not options.skip:
                raise
            report.skipped[error.fault] = report.skipped.get(error.fault, 0) + 1
            report.examples.setdefault(error.fault, str(error).split(f"; {REMEDY}")[0])
            continue
        report.documents += 1
        report.bytes += len(record.text.encode())
        yield record
    if report.documents == before:
        raise CorpusError(f"{path} holds no document; give a file or folder with at least one non-empty text")


def items(path: Path | str, options: ReadOptions) -> Iterator[Item]:
    """Yield the raw documents of a path or an address."""
    if is_remote(str(path)):
        yield from read_remote(str(path), options)
        return
    for file in list_files(Path(path)):
        yield from read_file(file, Path(path), options)


def make_record(item: Item, options: ReadOptions) -> Record:
    """Turn a raw document into a record; the id may still be empty.

    Raises:
        BadDocument: If there is no usable text.
        CorpusError: If its category is unknown.
    """
    if item.fault is not None:
        raise item.fault
    values = dict(item.values)

    def take(name: str) -> Any:
        return values.pop(options.fields.get(name, name), None)

    text = take("text")
    if text is None:
        text = composed(item.values, options)
    if text is None:
        name = options.fields.get("text", "text")
        raise BadDocument("no text", f"{item.place}: no field {name!r}; {text_remedy()}")
    if not isinstance(text, str):
        raise BadDocument("no text", f"{item.place}: the text is a {type(text).__name__}, not a string")
    if SURROGATE.search(text):
        raise BadDocument("not UTF-8", f"{item.place}: the text holds half of a surrogate pair")
    category = take("category")
    identity, source, license_name = take("id"), take("source"), take("license")
    return Record(
        id="" if identity is None else str(identity),
        text=text,
        source=str(source) if source else item.source,
        category=check_category(str(category), item.place) if category else item.category,
        license=str(license_name) if license_name else "",
        metadata={key: value for key, value in values.items() if plain(value)},
        profile=options.profile,
    )


def composed(values: Mapping[str, Any], options: ReadOptions) -> str | None:
    """Return the text of a document that has none of its own: joined fields, or code cut for fill-in-the-middle."""
    parts = [value for name in options.text_fields if isinstance(value := values.get(name), str) and value]
    if parts:
        return "\n".join(parts)
    pieces = [values.get(name) for name in ("prefix", "middle", "suffix")]
    if all(isinstance(piece, str) for piece in pieces):
        return "".join(map(str, pieces))
    return None


def claim_id(record: Record, item: Item, seen: dict[str, str]) -> None:
    """Give a record without an id one made from its content, and refuse an id that is taken.

    Raises:
        BadDocument: If two documents have one id.
    """
    if not record.id:
        content = {"text": record.text, "source": record.source, "category": record.category}
        base = f"sha256:{canonical_sha256(content)[:24]}"
        copy = 1
        while (name := base if copy == 1 else f"{base}+{copy}") in seen:
            copy += 1
        record.id = name
    elif record.id in seen:
        other = seen[record.id]
        raise BadDocument(
            "two documents with one id", f"{item.place}: id {record.id!r} is already that of {other}"
        )
    seen[record.id] = item.place


def plain(value: object) -> bool:
    """Whether a metadata value can be kept as JSON."""
    return isinstance(value, str | int | float | bool | list | dict)
