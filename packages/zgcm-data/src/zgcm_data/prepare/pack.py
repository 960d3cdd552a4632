"""Pack both orders into rows, write the shard sets, and count the unigram baseline."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from zgcm_data import engine
from zgcm_data.complexity import METRIC
from zgcm_data.packing import PackingStats, best_fit, concatenate
from zgcm_data.prepare.steps import Steps, write_json
from zgcm_data.prepare.tokens import TokenStore
from zgcm_data.recipe import BuildRecipe
from zgcm_data.rows import Row, TokenizedDocument
from zgcm_data.shards import ManifestHeader, OrderInfo, SourceInfo, open_shards, write_shards
from zgcm_data.tokenizer import Tokenizer

COLUMNS = ("id", "source", "category", "ordinal", "epoch", "take")


def pack_stage(
    steps: Steps, recipe: BuildRecipe, name: str, ordered: dict[str, Any], parents: dict[str, str]
) -> dict[str, Any]:
    """Write the shard set ``OUT/NAME`` from ``work/NAME``.

    Args:
        steps: The step runner.
        recipe: The recipe.
        name: ``"stage1"``, ``"stage2"`` or a stage of mid-training.
        ordered: Result of the ordering step.
        parents: Digests that the set is bound to, by name.

    Returns:
        Rows, tokens and digest of the set.
    """
    target = steps.out / name
    tokenizer = Tokenizer(steps.out / "tokenizer.json", recipe.tokenizer.eos)
    header = ManifestHeader(
        sequence_length=recipe.sequence_length,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        tokenizer_sha256=tokenizer.sha256,
        packing=recipe.packing,
        stage=name,
        order=order_of(recipe, name),
        sources=source_table(ordered["sources"]),
        parents=tuple(parents.values()),
    )

    def work(tell: Any) -> dict[str, Any]:
        numbers = {(item["category"], item["source"]): index for index, item in enumerate(ordered["sources"])}
        documents = stage_documents(steps, name, numbers)
        pack = concatenate if recipe.packing == "concatenate" else best_fit
        stats = PackingStats()
        rows = islice(pack(documents, recipe.sequence_length, tokenizer.eos_id, stats=stats), ordered["rows"])
        told = watched(rows, ordered["rows"], tell)
        manifest = write_shards(target, told, header, rows_per_shard=recipe.rows_per_shard)
        assert manifest.rows == ordered["rows"], f"{manifest.rows} rows written, {ordered['rows']} planned"
        counts = {"rows": manifest.rows, "tokens": manifest.tokens, "digest": manifest.digest}
        return counts | {"padding": stats.padding_tokens, "split_documents": stats.split_documents}

    inputs = {"order": ordered["key"], "tokenizer": tokenizer.sha256, "parents": parents}
    inputs |= {
        "length": recipe.sequence_length,
        "rows_per_shard": recipe.rows_per_shard,
        "packing": recipe.packing,
    }
    return steps.run(f"pack-{suffix(name)}", inputs, [target], work)


def suffix(name: str) -> str:
    """Return what the names of a stage's steps end with."""
    return name.removeprefix("stage")


def order_of(recipe: BuildRecipe, name: str) -> OrderInfo:
    """Return how the rows of a stage are ordered."""
    if name == "stage1":
        return OrderInfo("curriculum", recipe.curriculum.seed, METRIC)
    return OrderInfo("shuffle", recipe.stage2.seed if name == "stage2" else recipe.midtrain.seed, None)


def source_table(sources: list[dict[str, Any]]) -> tuple[SourceInfo, ...]:
    """Return the sources of a stage as the manifest names them; names that two categories share get both."""
    names = Counter(item["source"] for item in sources)
    return tuple(
        SourceInfo(
            id=number,
            name=item["source"] if names[item["source"]] == 1 else f"{item['source']} ({item['category']})",
            category=item["category"],
            nominal_share=item["share"],
            epochs=item["epochs"],
        )
        for number, item in enumerate(sources)
    )


def stage_documents(
    steps: Steps, name: str, numbers: dict[tuple[str, str], int]
) -> Iterator[TokenizedDocument]:
    """Yield the documents of a stage in their order, cut to what the quota takes of them."""
    store = TokenStore.open(steps.work / "tokens")
    for batch in engine.batches(steps.work / name, COLUMNS):
        for row in batch.to_pylist():
            tokens = store.document(row["id"])[: row["take"] - 1]
            source = numbers[row["category"], row["source"]]
            yield TokenizedDocument(source, row["ordinal"], row["epoch"], np.asarray(tokens))


def watched(rows: Iterator[Row], total: int, tell: Any) -> Iterator[Row]:
    """Pass rows on and report progress."""
    for number, row in enumerate(rows, start=1):
        if number % 256 == 0:
            tell(number / total, f"{number:,} of {total:,} rows")
        yield row


def unigram_baseline(steps: Steps, recipe: BuildRecipe, packed: dict[str, Any]) -> dict[str, Any]:
    """Write ``unigram.json``: held-out bits per byte of a model that knows token frequencies only.

    The probability of a token is (its count among the targets of both stages + 1) / (all targets +
    vocabulary size).
    """
    target = steps.out / "unigram.json"

    def work(tell: Any) -> dict[str, Any]:
        tokenizer = Tokenizer(steps.out / "tokenizer.json", recipe.tokenizer.eos)
        counts = np.zeros(tokenizer.vocab_size, np.int64)
        for name in packed["digests"]:
            shards = open_shards(steps.out / name)
            for number in range(len(shards)):
                counts += np.bincount(shards[number].tokens[1:], minlength=len(counts))
        bits = -np.log2((counts + 1) / (counts.sum() + len(counts)))
        domains = {
            path.stem: domain_bits(path, tokenizer, bits)
            for path in sorted((steps.out / "heldout").glob("*.jsonl"))
        }
        result = {"format": "zgcm-unigram/1", "tokens": int(counts.sum()), "domains": domains}
        write_json(target, result)
        return result

    return steps.run("unigram", packed, [target], work)


def domain_bits(path: Path, tokenizer: Tokenizer, bits: Any) -> dict[str, float]:
    """Return tokens, bytes and bits per byte of one held-out file under per-token bits."""
    documents = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").split("\n") if line]
    encoded = tokenizer.encode(documents)
    size = sum(len(text.encode()) for text in documents)
    total = math.fsum(float(bits[ids].sum()) for ids in encoded)
    return {"tokens": sum(map(len, encoded)), "bytes": size, "bits_per_byte": total / size}
