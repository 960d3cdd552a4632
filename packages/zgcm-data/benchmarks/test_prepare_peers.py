"""Near-deduplication against datatrove, in one run on the same corpus: 14 bands of 8, 5-grams of words.

Run with: python -m pytest packages/zgcm-data/benchmarks/test_prepare_peers.py -s
(needs datatrove and its word tokenizer: pip install datatrove spacy orjson "xxhash<4")
"""

import json
import time
from pathlib import Path

import pytest
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig

from zgcm_data import engine
from zgcm_data.clean.plan import clean_frame
from zgcm_data.dedup import decide_duplicates, signature_frame
from zgcm_data.prepare.ingest import write_records
from zgcm_data.recipe import CleanRecipe, DedupRecipe
from zgcm_data.sources import collect_default_corpus, read_records
from zgcm_data.sources.files import ReadOptions, ReadReport

MEGABYTES = 3.0
FACTOR = 15
WORKERS = 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers")
    collect_default_corpus(folder / "jsonl", megabytes=MEGABYTES)
    write_records(read_records(folder / "jsonl", ReadOptions(), ReadReport()), folder / "records", print)
    engine.write(clean_frame(engine.read(folder / "records"), CleanRecipe()), folder / "clean")
    (folder / "peer").mkdir()
    rows = engine.read(folder / "clean").select("id", "text").to_pylist()
    for part in range(WORKERS):
        lines = "".join(json.dumps(row) + "\n" for row in rows[part::WORKERS])
        (folder / "peer" / f"texts-{part}.jsonl").write_text(lines)
    return folder


def ours(folder: Path) -> set[str]:
    """Our signatures, buckets, clusters and decisions."""
    engine.write(signature_frame(engine.read(folder / "clean"), DedupRecipe()), folder / "signatures")
    decisions = decide_duplicates(engine.read(folder / "signatures"), DedupRecipe())
    return {row["id"] for row in engine.rows(decisions) if not row["kind"]}


def theirs(folder: Path) -> set[str]:
    """The four MinHash stages of datatrove over two tasks on two workers."""
    config = MinhashConfig(
        hash_config=HashConfig(precision=64), num_buckets=14, hashes_per_bucket=8, n_grams=5
    )
    work, reader = folder / "work", JsonlReader(str(folder / "peer"), compression=None)
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


def test_near_deduplication_is_many_times_as_fast_as_datatrove(corpus: Path) -> None:
    ours(corpus)  # the first plan of a process starts Daft
    start = time.perf_counter()
    kept = ours(corpus)
    mine = time.perf_counter() - start
    start = time.perf_counter()
    peer = theirs(corpus)
    other = time.perf_counter() - start
    documents = engine.read(corpus / "clean").count_rows()
    print(
        f"\n{documents:,} documents: zgcm-data {documents / mine:,.0f}/s (kept {len(kept):,}), "
        f"datatrove {documents / other:,.0f}/s (kept {len(peer):,}), ratio {other / mine:.1f}"
    )
    assert other / mine > FACTOR
    assert len(kept & peer) / len(kept | peer) > 0.95
