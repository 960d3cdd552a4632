"""The commands that exchange data with Megatron: ``to-megatron``, ``from-megatron``, ``describe``."""

import argparse
from pathlib import Path
from typing import Any

from zgcm_data.console import command, emit, flat
from zgcm_data.dataset import open_dataset
from zgcm_data.megatron import from_megatron, to_megatron
from zgcm_data.megatron_facts import beside, write_sidecar
from zgcm_data.records import check_category
from zgcm_data.shards import ManifestHeader, OrderInfo, SourceInfo, open_shards
from zgcm_data.tokenizer import END_OF_TEXT, Tokenizer


def add_megatron(commands: Any) -> None:
    """Add the commands that exchange data with Megatron."""
    text = "write a shard set's documents as a Megatron indexed dataset"
    example = "zgcm-data to-megatron data/stage1 --out megatron/stage1_text_document"
    export = command(commands, "to-megatron", export_megatron, text, example)
    export.add_argument("folder", type=Path, help="a shard set")
    export.add_argument("--out", type=Path, required=True, help="path of the dataset without .bin and .idx")
    text = "pack a Megatron indexed dataset into a shard set"
    example = "zgcm-data from-megatron megatron/text_document --out data/set --tokenizer tokenizer.json"
    bring = command(commands, "from-megatron", import_megatron, text, example)
    bring.add_argument("--out", type=Path, required=True, help="folder of the new shard set")
    bring.add_argument("--packing", choices=("concatenate", "best_fit"), default="concatenate")
    text = "write what training must know beside a Megatron indexed dataset, as PREFIX.zgcm.json"
    example = "zgcm-data describe megatron/text_document --tokenizer tokenizer.json"
    for made in (bring, command(commands, "describe", describe, text, example)):
        made.add_argument("prefix", type=Path, help="path of the dataset without .bin and .idx")
        made.add_argument("--tokenizer", type=Path, required=True, help="the tokenizer.json of its tokens")
        made.add_argument("--eos", default=END_OF_TEXT, help=f"end-of-document token (default {END_OF_TEXT})")
        made.add_argument("--sequence-length", type=int, default=4096, help="inputs per row (default 4096)")
        made.add_argument("--category", default="general_text", help="category of its documents")


def export_megatron(options: argparse.Namespace) -> int:
    """Run ``to-megatron``."""
    shards = open_shards(options.folder)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = (shards[number] for number in range(len(shards)))
    count = to_megatron(rows, shards.manifest, options.out)
    emit(
        options, {"documents": count, "prefix": str(options.out)}, f"{count:,} documents in {options.out}.bin"
    )
    return 0


def import_megatron(options: argparse.Namespace) -> int:
    """Run ``from-megatron``."""
    header = header_of_options(options, options.packing, options.out.name)
    manifest = from_megatron(options.prefix, options.out, header)
    found = {"rows": manifest.rows, "tokens": manifest.tokens, "digest": manifest.digest}
    emit(options, found, flat(found))
    return 0


def describe(options: argparse.Namespace) -> int:
    """Run ``describe``."""
    beside(options.prefix, "zgcm.docs").unlink(
        missing_ok=True
    )  # it belongs to the files that were here before
    write_sidecar(options.prefix, header_of_options(options, "concatenate", options.prefix.name))
    manifest = open_dataset(options.prefix).manifest
    found = {"rows": manifest.rows, "tokens": manifest.tokens, "digest": manifest.digest}
    emit(options, found, flat(found))
    return 0


def header_of_options(options: argparse.Namespace, packing: str, stage: str) -> ManifestHeader:
    """Return what a person says about a dataset."""
    tokenizer = Tokenizer(options.tokenizer, options.eos)
    category = check_category(options.category, "--category")
    return ManifestHeader(
        sequence_length=options.sequence_length,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        tokenizer_sha256=tokenizer.sha256,
        packing=packing,
        stage=stage,
        order=OrderInfo("given"),
        sources=(SourceInfo(0, options.prefix.name, category, 1.0),),
    )
