"""Check every byte and every count of a shard set, and show a set to a person."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zgcm_data.masks import Segments, count_sources
from zgcm_data.rows import Integers
from zgcm_data.shards import index
from zgcm_data.shards.manifest import FILE_NAME, Manifest, ShardError, ShardInfo, load_manifest
from zgcm_data.shards.read import ShardSet

_BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: the file, and what is wrong with it."""

    file: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.message}"


def verify_shards(folder: str | os.PathLike[str]) -> list[Problem]:
    """Recompute every checksum and count of a shard set.

    Args:
        folder: the folder of the set.

    Returns:
        What is wrong, in the order of the files; empty when all is right.
    """
    root = Path(folder)
    try:
        manifest = load_manifest(root)
    except ShardError as error:
        return [Problem(FILE_NAME, str(error))]
    problems = [problem for shard in manifest.shards for problem in _check_files(root, shard)]
    known = {shard.name for shard in manifest.shards}
    problems += [
        Problem(path.name, "is not in the manifest; remove it")
        for path in sorted(root.glob("shard-*.tar"))
        if path.name not in known
    ]
    return problems or _check_rows(ShardSet(root, manifest))


def _check_files(root: Path, shard: ShardInfo) -> list[Problem]:
    problems = []
    path = root / shard.name
    for file, expected in ((path, shard.sha256), (index.index_path(path), shard.index_sha256)):
        if not file.exists():
            problems.append(Problem(file.name, "is missing"))
            continue
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != expected:
            size = file.stat().st_size
            problems.append(Problem(file.name, f"has SHA-256 {found} ({size} bytes), expected {expected}"))
    return problems


def _check_rows(shards: ShardSet) -> list[Problem]:
    """Compare the rows themselves with the manifest's counts."""
    manifest = shards.manifest
    if manifest.rows != len(shards.order) or manifest.tokens != manifest.rows * manifest.sequence_length:
        return [
            Problem(FILE_NAME, f"rows {manifest.rows} and tokens {manifest.tokens} do not fit the shards")
        ]
    counts = np.zeros((2, len(manifest.sources)), np.int64)
    for first in range(0, manifest.rows, _BLOCK_ROWS):
        rows = np.arange(first, min(first + _BLOCK_ROWS, manifest.rows))
        try:
            problem = _count_block(shards, rows, counts)
        except ShardError as error:
            problem = Problem(_shard_of(shards, first), str(error))
        if problem is not None:
            return [problem]
    return [
        Problem(FILE_NAME, f"source {source.name}: {what} {said}, counted {found}")
        for source in manifest.sources
        for what, said, found in (
            ("documents", source.documents, int(counts[0, source.id])),
            ("tokens", source.tokens, int(counts[1, source.id])),
        )
        if said != found
    ]


def _shard_of(shards: ShardSet, row: int) -> str:
    return shards.manifest.shards[shards.order.locate(row)[0]].name


def _count_block(shards: ShardSet, rows: Integers, counts: Integers) -> Problem | None:
    manifest = shards.manifest
    tokens = np.empty((len(rows), manifest.sequence_length + 1), np.int64)
    block = shards.block(rows)
    block.read_tokens(0, tokens)
    high = np.flatnonzero(tokens.max(axis=1) >= manifest.vocab_size)
    if len(high):
        row = int(rows[high[0]])
        return Problem(_shard_of(shards, row), f"row {row} holds an id that is not in the vocabulary")
    segments = Segments.of(block.docs, block.per_row, tokens.shape[1])
    fault = segments.first_fault(len(manifest.sources))
    if fault is not None:
        row = int(rows[fault])
        return Problem(_shard_of(shards, row), f"row {row} has an impossible docs table")
    found = count_sources(segments, block.ended, len(rows), counts.shape[1], isolate=False)
    counts[0] += found.documents[0]
    counts[1] += found.tokens[0]
    return None


def inspect(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe a shard set as plain values: manifest fields, observed shares and sizes.

    Args:
        folder: the folder of the set.

    Returns:
        The manifest's fields without the list of shards, which is summed up as ``shards`` and ``bytes``; each
        source also has its ``observed_share`` of the tokens.

    Raises:
        ShardError: there is no whole manifest.
    """
    manifest: Manifest = load_manifest(folder)
    values = manifest.to_json()
    values["shards"] = len(manifest.shards)
    values["bytes"] = sum(shard.bytes for shard in manifest.shards)
    total = sum(source.tokens for source in manifest.sources)
    for source in values["sources"]:
        source["observed_share"] = source["tokens"] / total if total else 0.0
    return values
