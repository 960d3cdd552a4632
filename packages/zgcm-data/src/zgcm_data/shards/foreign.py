"""Read rows from WebDataset shards that another program wrote, or refuse them by name.

A WebDataset is a convention: members with the same name up to the first dot make a sample. Readers differ in
what they do with names that hold more dots, with samples whose members are apart, and with keys that come
twice; some drop rows without a word. Here every such case is an error that names shard and member.
"""

import os
import tarfile
from collections.abc import Iterable, Iterator

import numpy as np

from zgcm_data.rows import Row
from zgcm_data.shards.manifest import ShardError
from zgcm_data.shards.tar import DOCS_SUFFIX, TOKENS_SUFFIX


def read_webdataset(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Row]:
    """Yield the rows of plain WebDataset shards, in order; give them to ``write_shards`` to make a set.

    Args:
        paths: shards in the order in which their rows are to be learned. Each sample must be
            ``KEY.tokens.bin`` followed by ``KEY.docs.bin``, as in a shard set, with any key without a dot.

    Raises:
        ShardError: a member has another suffix or a dotted key, a key comes twice, a sample's members are not
            side by side or one is missing, or the file is not a tar archive.
    """
    seen: set[str] = set()
    for path in paths:
        name = os.fspath(path)
        try:
            with tarfile.open(name, "r:") as archive:
                yield from _rows(archive, name, seen)
        except (tarfile.TarError, EOFError) as error:
            raise ShardError(f"{name} is not a whole tar archive: {error}") from error


def _rows(archive: tarfile.TarFile, path: str, seen: set[str]) -> Iterator[Row]:
    pending: tuple[str, bytes] | None = None
    for member in archive:
        key, suffix = _split(member, path)
        file = archive.extractfile(member)
        data = b"" if file is None else file.read()
        if suffix == TOKENS_SUFFIX:
            if pending is not None:
                raise _apart(path, pending[0], member.name)
            if key in seen:
                raise ShardError(
                    f"{path}: key {key!r} of member {member.name} comes twice; keys must be unique"
                )
            seen.add(key)
            pending = (key, data)
        else:
            if pending is None or pending[0] != key:
                raise _apart(path, key if pending is None else pending[0], member.name)
            yield _row(pending[1], data, f"{path}: sample {key}")
            pending = None
    if pending is not None:
        raise _apart(path, pending[0], "the end of the archive")


def _split(member: tarfile.TarInfo, path: str) -> tuple[str, str]:
    """Split a name where WebDataset does, at the first dot after the last slash."""
    folder, slash, name = member.name.rpartition("/")
    key, _, suffix = name.partition(".")
    if not member.isfile() or suffix not in (TOKENS_SUFFIX, DOCS_SUFFIX) or not key or "." in folder:
        raise ShardError(
            f"{path}: member {member.name} is not KEY.{TOKENS_SUFFIX} or KEY.{DOCS_SUFFIX} with a key without "
            "dots; readers disagree on such names, so rename it"
        )
    return folder + slash + key, suffix


def _apart(path: str, key: str, found: str) -> ShardError:
    return ShardError(
        f"{path}: sample {key!r} is not {TOKENS_SUFFIX} directly followed by {DOCS_SUFFIX} (found {found}); "
        "readers would lose it, so write the members of a sample side by side"
    )


def _row(tokens: bytes, docs: bytes, origin: str) -> Row:
    if len(tokens) % 4 or len(docs) % 32:
        raise ShardError(f"{origin} has {len(tokens)} bytes of tokens and {len(docs)} of docs; not whole ids")
    return Row(
        np.frombuffer(tokens, "<u4").astype(np.uint32),
        np.frombuffer(docs, "<i8").astype(np.int64).reshape(-1, 4),
    )
