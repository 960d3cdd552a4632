"""``PREFIX.zgcm.json``: what a Megatron indexed dataset does not say about itself.

``.bin`` and ``.idx`` hold tokens and document borders. Vocabulary, end-of-document id, tokenizer, sources and the
length of a row stand in this sidecar, bound to both files by their digests. ``PREFIX.zgcm.docs`` (int64
little-endian ``[documents, 3]``) says source, ordinal and epoch of each document; without it all documents are
of one source, numbered as they come.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zgcm_data.rows import Integers
from zgcm_data.shards.manifest import Manifest, ManifestHeader, OrderInfo, ShardError, SourceInfo

FORMAT = "zgcm-megatron/1"
Prefix = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """What a caller knows about a dataset; None leaves a fact to the dataset's own files.

    Attributes:
        sequence_length: T, inputs per row. A Megatron dataset can be cut at any length; its sidecar names the one
            to use where none is given.
        vocab_size: every id is below this.
        eos_id: the end-of-document id.
        tokenizer_sha256: digest of the tokenizer file.
        source: name of the one source of a Megatron dataset that has no sidecar.
        category: category of that source.
    """

    sequence_length: int | None = None
    vocab_size: int | None = None
    eos_id: int | None = None
    tokenizer_sha256: str | None = None
    source: str | None = None
    category: str = "general_text"

    def check(self, known: Manifest | ManifestHeader, origin: str, *, length: bool) -> None:
        """Refuse a dataset that says otherwise.

        Args:
            known: what the dataset says.
            origin: its path, for the message.
            length: whether the length of rows must agree as well.

        Raises:
            ShardError: names the fact and both values.
        """
        names = ("vocab_size", "eos_id", "tokenizer_sha256") + (("sequence_length",) if length else ())
        for name in names:
            wanted, found = getattr(self, name), getattr(known, name)
            if wanted is not None and wanted != found:
                raise ShardError(
                    f"{origin} has {name} {found}, but {wanted} was asked for; use the dataset that was "
                    "made for it, or correct the setting"
                )


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The content of ``PREFIX.zgcm.json``.

    Attributes:
        header: what the rows are.
        index_sha256: digest of ``.idx``.
        data_sha256: digest of ``.bin``.
        documents_sha256: digest of ``.zgcm.docs``, empty where there is none.
    """

    header: ManifestHeader
    index_sha256: str
    data_sha256: str
    documents_sha256: str = ""


def beside(prefix: Prefix, ending: str) -> Path:
    """Return the path of a file of a dataset, such as ``PREFIX.idx`` for ``idx``."""
    return Path(f"{os.fspath(prefix)}.{ending}")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def header_of(manifest: Manifest) -> ManifestHeader:
    """Return the header of the rows that a dataset made from a shard set holds."""
    names = [field.name for field in dataclasses.fields(ManifestHeader)]
    values = {name: getattr(manifest, name) for name in names}
    return ManifestHeader(**values | {"packing": "concatenate", "parents": (manifest.digest,)})


def write_sidecar(prefix: Prefix, header: ManifestHeader) -> Sidecar:
    """Write ``PREFIX.zgcm.json`` for the files that lie there, which are read once.

    Args:
        prefix: path without ``.bin`` and ``.idx``.
        header: what the rows are; packing ``concatenate``, and one source unless ``PREFIX.zgcm.docs`` is there.

    Raises:
        FileNotFoundError: there is no such dataset.
        ValueError: the header does not describe rows that are cut from a stream.
    """
    documents = beside(prefix, "zgcm.docs")
    check_header(header, named=documents.exists())
    sidecar = Sidecar(
        header,
        file_sha256(beside(prefix, "idx")),
        file_sha256(beside(prefix, "bin")),
        file_sha256(documents) if documents.exists() else "",
    )
    values = {"format": FORMAT, **dataclasses.asdict(sidecar)}
    path = beside(prefix, "zgcm.json")
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
    return sidecar


def check_header(header: ManifestHeader, *, named: bool) -> None:
    """Refuse a header that does not describe rows cut from a stream of documents.

    Args:
        header: to check.
        named: whether it is known of which source each document is.

    Raises:
        ValueError: names what is wrong.
    """
    if header.packing != "concatenate" or (len(header.sources) != 1 and not named):
        raise ValueError(
            f"an indexed dataset is one source packed as 'concatenate', not {len(header.sources)} sources packed "
            f"as {header.packing!r}; use from_megatron for anything else"
        )


def read_sidecar(prefix: Prefix) -> Sidecar | None:
    """Return the sidecar of a dataset, or None where there is none.

    Raises:
        ShardError: it is not whole, or belongs to other files.
    """
    path = beside(prefix, "zgcm.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ShardError(f"{path} is not JSON ({error}); restore it or write it again") from error
    sidecar = _parsed(values, path)
    for ending, wanted in (("idx", sidecar.index_sha256), ("zgcm.docs", sidecar.documents_sha256)):
        file = beside(prefix, ending)
        if wanted and (not file.exists() or file_sha256(file) != wanted):
            raise ShardError(
                f"{file} is missing or not the file that {path} was written for; restore it or write the sidecar again"
            )
    return sidecar


def _parsed(values: Mapping[str, Any], path: Path) -> Sidecar:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ShardError(f"{path} is not of the format {FORMAT!r}; write it again")
    try:
        header = dict(values["header"])
        header["order"] = OrderInfo(**header["order"])
        header["sources"] = tuple(SourceInfo(**source) for source in header["sources"])
        header["parents"] = tuple(header["parents"])
        digests = [values[name] for name in ("index_sha256", "data_sha256", "documents_sha256")]
        return Sidecar(ManifestHeader(**header), *digests)
    except (TypeError, KeyError, ValueError) as error:
        raise ShardError(f"{path}: fields do not fit {FORMAT}: {error}") from error


def read_documents(prefix: Prefix, count: int) -> Integers:
    """Map ``PREFIX.zgcm.docs``, int64 ``[count, 3]``: source, ordinal and epoch of each document.

    Raises:
        ShardError: it holds another number of documents.
    """
    path = beside(prefix, "zgcm.docs")
    if path.stat().st_size != count * 24:
        raise ShardError(f"{path} does not describe {count} documents; write the dataset again")
    return np.memmap(path, "<i8", "r", shape=(count, 3))
