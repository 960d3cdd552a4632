"""Open whatever can be trained on: a folder of shards, or the prefix of a Megatron dataset."""

import dataclasses
import os
from pathlib import Path
from typing import TypeAlias

from zgcm_data.megatron_facts import DatasetFacts, Prefix, Sidecar, beside, read_sidecar
from zgcm_data.megatron_rows import IndexedRows, open_indexed
from zgcm_data.shards.manifest import ManifestHeader, OrderInfo, ShardError, SourceInfo
from zgcm_data.shards.read import ShardSet, open_shards

Dataset: TypeAlias = ShardSet | IndexedRows
"""Rows in an order, with a manifest: ``len``, ``[i] -> Row``, ``.manifest``, and what ``Loader`` reads."""

NO_FACTS = DatasetFacts()
NEEDED = ("sequence_length", "vocab_size", "eos_id", "tokenizer_sha256", "source")


def open_dataset(path: Prefix, facts: DatasetFacts = NO_FACTS, *, checksum: bool = False) -> Dataset:
    """Open a shard set by its folder, or a Megatron indexed dataset by its prefix.

    Args:
        path: a folder that ``write_shards`` wrote, or the path of ``.bin`` and ``.idx`` with or without its
            ending.
        facts: what the caller asks of the dataset. What a shard set or a sidecar ``PREFIX.zgcm.json`` says must
            agree, but for the sequence length of a Megatron dataset, which is free; without a sidecar the facts
            must be complete.
        checksum: read all of a Megatron dataset's ``.bin`` once and compare it with the sidecar. A shard set is
            checked by ``verify_shards``.

    Returns:
        The rows; ``Loader`` reads either kind, with exact resume and the same counts.

    Raises:
        ShardError: a file is missing, not whole or stale, or says otherwise than ``facts``.
        ValueError: facts are missing, or there is less than one row.
    """
    if Path(path).is_dir():
        shards = open_shards(path)
        facts.check(shards.manifest, str(path), length=True)
        return shards
    prefix = prefix_of(path)
    sidecar = read_sidecar(prefix)
    header = complete_header(prefix, facts) if sidecar is None else agreed_header(prefix, facts, sidecar)
    return open_indexed(prefix, header, checksum=checksum, sidecar=sidecar)


def prefix_of(path: Prefix) -> str:
    """Return the prefix that a path names.

    Raises:
        ShardError: there is neither a folder nor a dataset.
    """
    text = os.fspath(path)
    prefix = text[:-4] if text.endswith((".bin", ".idx")) else text
    if not beside(prefix, "bin").exists() and not beside(prefix, "idx").exists():
        raise ShardError(
            f"{text} is neither the folder of a shard set nor the prefix of a Megatron dataset ({prefix}.bin and "
            f"{prefix}.idx); check the path"
        )
    return prefix


def complete_header(prefix: str, facts: DatasetFacts) -> ManifestHeader:
    """Make the header of a dataset without a sidecar from facts alone.

    Raises:
        ValueError: names the facts that are missing and the remedy.
    """
    missing = [name for name in NEEDED if getattr(facts, name) is None]
    if missing:
        raise ValueError(
            f"{prefix} is a Megatron dataset without {prefix}.zgcm.json, so its {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not known; write the file with: zgcm-data describe {prefix} "
            "--tokenizer tokenizer.json"
        )
    assert facts.sequence_length is not None
    assert facts.vocab_size is not None
    assert facts.eos_id is not None
    assert facts.tokenizer_sha256 is not None
    assert facts.source is not None
    return ManifestHeader(
        sequence_length=facts.sequence_length,
        vocab_size=facts.vocab_size,
        eos_id=facts.eos_id,
        tokenizer_sha256=facts.tokenizer_sha256,
        packing="concatenate",
        stage=Path(prefix).name,
        order=OrderInfo("given"),
        sources=(SourceInfo(0, facts.source, facts.category, 1.0),),
    )


def agreed_header(prefix: str, facts: DatasetFacts, sidecar: Sidecar) -> ManifestHeader:
    """Return the sidecar's header with the length that was asked for, bound to the table of documents.

    Raises:
        ShardError: the sidecar says otherwise than the facts.
    """
    facts.check(sidecar.header, f"{prefix}.zgcm.json", length=False)
    parents = sidecar.header.parents
    if sidecar.documents_sha256:
        parents = (*parents, sidecar.documents_sha256)
    length = sidecar.header.sequence_length if facts.sequence_length is None else facts.sequence_length
    return dataclasses.replace(sidecar.header, sequence_length=length, parents=parents)
