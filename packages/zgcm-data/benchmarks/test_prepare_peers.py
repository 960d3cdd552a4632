"""Deduplication, and cleaning, deduplication and ordering together, against datatrove on the same corpus in one run.

Both sides use the same filters (our cleaning steps) and MinHash with 14 bands of 8 and 5-grams of words. Datatrove
has no curriculum; its side of the second comparison ends with the documents that stay, ours with both stages in order.

Run with: python -m pytest packages/zgcm-data/benchmarks/test_prepare_peers.py -s
(needs datatrove and its word tokenizer: pip install datatrove spacy orjson "xxhash<4")
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig

from zgcm_data import engine
from zgcm_data.clean.plan import clean_frame, clean_row
from zgcm_data.complexity import frequency_table, score_frame, words_frame
from zgcm_data.curriculum import APART, choose, curriculum_order, shuffle_order, without_outliers
from zgcm_data.dedup import decide_duplicates, signature_frame
from zgcm_data.prepare.ingest import write_records
from zgcm_data.recipe import CleanRecipe, DedupRecipe
from zgcm_data.sources import collect_default_corpus, read_records
from zgcm_data.sources.files import ReadOptions, ReadReport

MEGABYTES = 3.0
FACTOR = 15
WHOLE_FACTOR = 8
COLUMNS = ("id", "text", "source", "category", "license", "metadata", "profile")
WORKERS = 2
Run = Callable[[Path], set[str]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers")
    collect_default_corpus(folder / "jsonl", megabytes=MEGABYTES)
    write_records(read_records(folder / "jsonl", ReadOptions(), ReadReport()), folder / "records", print)
    engine.write(clean_frame(engine.read(folder / "records"), CleanRecipe()), folder / "clean")
    write_parts(folder / "peer", engine.read(folder / "clean").select("id", "text").to_pylist())
    raw = engine.read(folder / "records").select(*COLUMNS).to_pylist()
    rest = COLUMNS[2:]
    write_parts(
        folder / "raw",
        [
            {"id": row["id"], "text": row["text"], "metadata": {name: row[name] for name in rest}}
            for row in raw
        ],
    )
    return folder


def write_parts(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write one file of lines for each worker."""
    folder.mkdir()
    for part in range(WORKERS):
        lines = "".join(json.dumps(row) + "\n" for row in rows[part::WORKERS])
        (folder / f"texts-{part}.jsonl").write_text(lines)


def ours(folder: Path) -> set[str]:
    """Our signatures, buckets, clusters and decisions."""
    engine.write(signature_frame(engine.read(folder / "clean"), DedupRecipe()), folder / "signatures")
    decisions = decide_duplicates(engine.read(folder / "signatures"), DedupRecipe())
    return {row["id"] for row in engine.rows(decisions) if not row["kind"]}


def ours_whole(folder: Path) -> set[str]:
    """Clean, deduplicate, score, and order both stages; documents of four characters to a token."""
    column, apart = engine.daft().col, engine.daft().col("category").is_in(list(APART))
    engine.write(clean_frame(engine.read(folder / "records"), CleanRecipe()), folder / "cleaned")
    cleaned = engine.read(folder / "cleaned").where(column("decision") == "keep")
    engine.write(signature_frame(cleaned, DedupRecipe()), folder / "signatures")
    decisions = decide_duplicates(engine.read(folder / "signatures"), DedupRecipe())
    kept = cleaned.join(decisions.where(column("kind") == "").select("id"), on="id", how="semi")
    frame = words_frame(kept.where(~apart))
    score_frame(frame, frequency_table(frame, folder / "words"), folder / "scores")
    pool = kept.select("id", "source", "category", (column("bytes") // 4 + 1).alias("tokens")).collect()
    held = {
        (row["category"], row["source"]): row["held"]
        for row in engine.rows(
            pool.groupby("category", "source").agg((column("tokens") + 1).sum().alias("held"))
        )
    }
    natural = pool.where(~apart).select("id").join(engine.read(folder / "scores"), on="id")
    inside, _ = without_outliers(natural, 0.0, 1.0)
    first = choose(pool, {key: value // 2 for key, value in held.items() if value >= 8}, "stage1", {})
    engine.write(curriculum_order(first, inside, "curriculum"), folder / "stage1")
    rest = pool.join(first.select("id"), on="id", how="anti")
    engine.write(
        shuffle_order(
            choose(rest, {key: value // 4 for key, value in held.items() if value >= 8}, "2", {}), 1
        ),
        folder / "stage2",
    )
    return set(pool.to_pydict()["id"])


class SameFilters(BaseFilter):  # type: ignore[misc]
    """Our cleaning steps as a datatrove filter: keeps what we keep, with the text we keep."""

    name = "zgcm-data cleaning"

    def filter(self, doc: Document) -> bool:
        fields = {"id": doc.id, "text": doc.text, **doc.metadata}
        result = clean_row(tuple(fields[name] for name in COLUMNS), CleanRecipe())
        doc.text = result["text"]
        return bool(result["decision"] == "keep")


def theirs_whole(folder: Path) -> set[str]:
    """Read, clean and write with datatrove on two workers, then its four MinHash stages."""
    reader, target = JsonlReader(str(folder / "raw"), compression=None), str(folder / "peer-cleaned")
    steps = [reader, SameFilters(), JsonlWriter(target, output_filename="${rank}.jsonl", compression=None)]
    logs = str(folder / "logs-clean")
    LocalPipelineExecutor(steps, tasks=WORKERS, workers=WORKERS, logging_dir=logs).run()
    return theirs(folder, "peer-cleaned")


def theirs(folder: Path, source: str = "peer") -> set[str]:
    """The four MinHash stages of datatrove over two tasks on two workers."""
    config = MinhashConfig(
        hash_config=HashConfig(precision=64), num_buckets=14, hashes_per_bucket=8, n_grams=5
    )
    work, reader = folder / f"work-{source}", JsonlReader(str(folder / source), compression=None)
    stages = [
        ([reader, MinhashDedupSignature(f"{work}/signatures", config=config)], WORKERS),
        ([MinhashDedupBuckets(f"{work}/signatures", f"{work}/buckets", config=config)], 14),
        ([MinhashDedupCluster(f"{work}/buckets", f"{work}/removed", config=config)], 1),
        (
            [reader, MinhashDedupFilter(f"{work}/removed"), JsonlWriter(f"{work}/out", compression=None)],
            WORKERS,
        ),
    ]
    for steps, tasks in stages:
        logs = str(work / "logs" / str(len(list(work.glob("logs/*")))))
        LocalPipelineExecutor(steps, tasks=tasks, workers=WORKERS, logging_dir=logs).run()
    files = sorted((work / "out").glob("*.jsonl"))
    return {json.loads(line)["id"] for file in files for line in file.read_text().split("\n") if line}


def compared(corpus: Path, mine: Run, other: Run) -> tuple[float, set[str], set[str]]:
    """Return how many times as fast ours is, by the clock, and what each side keeps; prints both."""
    mine(corpus)  # the first plan of a process starts Daft
    start = time.perf_counter()
    kept = mine(corpus)
    ours_s = time.perf_counter() - start
    start = time.perf_counter()
    peer = other(corpus)
    peer_s = time.perf_counter() - start
    documents = engine.read(corpus / "records").count_rows()
    print(
        f"\n{documents:,} documents: zgcm-data {documents / ours_s:,.0f}/s (kept {len(kept):,}), "
        f"datatrove {documents / peer_s:,.0f}/s (kept {len(peer):,}), ratio {peer_s / ours_s:.1f}"
    )
    return peer_s / ours_s, kept, peer


def test_near_deduplication_is_many_times_as_fast_as_datatrove(corpus: Path) -> None:
    ratio, kept, peer = compared(corpus, ours, theirs)
    assert ratio > FACTOR
    assert len(kept & peer) / len(kept | peer) > 0.95


def test_cleaning_deduplication_and_ordering_are_many_times_as_fast_as_datatrove(corpus: Path) -> None:
    ratio, kept, peer = compared(corpus, ours_whole, theirs_whole)
    assert ratio > WHOLE_FACTOR
    assert len(kept & peer) / len(kept | peer) > 0.95
