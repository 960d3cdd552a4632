"""``manifest.json``: everything a run must know about a shard set, bound by one digest.

The digest is the SHA-256 of the canonical JSON (sorted keys, no spaces) of every other field. No field holds
the name of a folder, so a set may be moved or copied and keeps its digest.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = "zgcm-shards/1"
FILE_NAME = "manifest.json"


class ShardError(ValueError):
    """A shard set is missing something, or holds something else than its manifest says."""


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """One source of a set.

    Attributes:
        id: its position in the list of sources; docs tables refer to it.
        name: for people.
        category: such as ``code`` or ``math``.
        nominal_share: the share of tokens that the recipe asked for, 0 to 1.
        epochs: how often the set repeats the source, 1.0 for once.
        documents: documents whose end lies in the set; counted by ``write_shards``.
        tokens: targets of the set that belong to the source; counted by ``write_shards``.
    """

    id: int
    name: str
    category: str
    nominal_share: float
    epochs: float = 1.0
    documents: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class OrderInfo:
    """How the rows were ordered: ``kind`` (such as ``curriculum`` or ``shuffle``), ``seed``, ``metric``."""

    kind: str
    seed: int | None = None
    metric: str | None = None


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard: file name, rows, bytes and SHA-256 of the tar, and the SHA-256 of the index beside it."""

    name: str
    rows: int
    bytes: int
    sha256: str
    index_sha256: str


@dataclass(frozen=True, slots=True)
class ManifestHeader:
    """What the writer of a set must say about it; everything else is counted while writing.

    Attributes:
        sequence_length: T, inputs per row; a row stores T + 1 ids.
        vocab_size: every id is below this.
        eos_id: the end-of-document id.
        tokenizer_sha256: digest of the tokenizer file.
        packing: ``concatenate`` or ``best_fit``.
        stage: name of the stage the set is made for.
        order: how rows were ordered.
        sources: ids must be 0, 1, 2, ... in order.
        parents: digests of the sets and files this one was made from.
    """

    sequence_length: int
    vocab_size: int
    eos_id: int
    tokenizer_sha256: str
    packing: str
    stage: str
    order: OrderInfo
    sources: tuple[SourceInfo, ...]
    parents: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ids = [source.id for source in self.sources]
        if not ids or ids != list(range(len(ids))):
            raise ValueError(f"sources have ids {ids}; number them 0, 1, 2, ... in order, at least one")
        if self.packing not in ("concatenate", "best_fit"):
            raise ValueError(f"packing is {self.packing!r}; choose 'concatenate' or 'best_fit'")
        if not 0 <= self.eos_id < self.vocab_size:
            raise ValueError(f"eos_id {self.eos_id} is not an id of a vocabulary of {self.vocab_size}")
        if self.vocab_size > 2**32 or self.sequence_length < 1:
            raise ValueError(
                f"vocab_size {self.vocab_size} must be at most 2^32, "
                f"sequence_length {self.sequence_length} at least 1"
            )


@dataclass(frozen=True, slots=True)
class Manifest:
    """A shard set in words: the header's fields, what was counted, the shards, and the digest of it all."""

    sequence_length: int
    rows: int
    tokens: int
    vocab_size: int
    eos_id: int
    tokenizer_sha256: str
    packing: str
    stage: str
    order: OrderInfo
    sources: tuple[SourceInfo, ...]
    shards: tuple[ShardInfo, ...]
    parents: tuple[str, ...]
    digest: str
    format: str = FORMAT

    @classmethod
    def build(
        cls, header: ManifestHeader, sources: tuple[SourceInfo, ...], shards: tuple[ShardInfo, ...]
    ) -> "Manifest":
        """Join a header with what was counted, and compute the digest."""
        rows = sum(shard.rows for shard in shards)
        values = {field.name: getattr(header, field.name) for field in dataclasses.fields(header)}
        values.update(rows=rows, tokens=rows * header.sequence_length, sources=sources, shards=shards)
        bare = cls(**values, digest="")
        return dataclasses.replace(bare, digest=_digest(bare.to_json()))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], origin: str) -> "Manifest":
        """Build a manifest from the values of its file and check format and digest.

        Args:
            values: what ``to_json`` returned once.
            origin: the file, for error messages.

        Raises:
            ShardError: another format, an unknown or missing field, or a wrong digest.
        """
        if values.get("format") != FORMAT:
            raise ShardError(f"{origin}: format is {values.get('format')!r}, expected {FORMAT!r}")
        if values.get("digest") != _digest(values):
            raise ShardError(
                f"{origin}: digest is {values.get('digest')}, but its fields give {_digest(values)}; "
                "the manifest was edited, restore it or write the set again"
            )
        plain = dict(values)
        try:
            plain["order"] = OrderInfo(**values["order"])
            plain["sources"] = tuple(SourceInfo(**source) for source in values["sources"])
            plain["shards"] = tuple(ShardInfo(**shard) for shard in values["shards"])
            plain["parents"] = tuple(values["parents"])
            return cls(**plain)
        except (TypeError, KeyError) as error:
            raise ShardError(f"{origin}: fields do not fit {FORMAT}: {error}") from error


def _digest(values: Mapping[str, Any]) -> str:
    fields = {key: value for key, value in values.items() if key != "digest"}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def load_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read and check ``manifest.json`` of a shard set.

    Args:
        folder: the folder of the set.

    Raises:
        ShardError: there is no manifest, or it is not whole.
    """
    path = Path(folder) / FILE_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ShardError(
            f"{path} is missing: {folder} is not a finished shard set; a writer puts the manifest last, "
            "so run it again to finish the set"
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ShardError(f"{path} is not JSON ({error}); restore it or write the set again") from error
    if not isinstance(values, dict):
        raise ShardError(f"{path} does not hold a JSON object; restore it or write the set again")
    return Manifest.from_json(values, str(path))


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` under a temporary name, then rename it."""
    path, temporary = folder / FILE_NAME, folder / (FILE_NAME + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(manifest.to_json(), file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
