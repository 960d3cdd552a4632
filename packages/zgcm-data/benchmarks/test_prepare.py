"""Speed of the offline steps on real text of this Python installation, in documents and bytes per second.

Run with: python -m pytest packages/zgcm-data/benchmarks/test_prepare.py --benchmark-only
"""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from zgcm_data import engine
from zgcm_data.clean.plan import clean_frame
from zgcm_data.dedup import decide_duplicates, signature_frame
from zgcm_data.prepare.ingest import write_records
from zgcm_data.prepare.tokens import DocumentEncoder, pieces, write_tokens
from zgcm_data.recipe import CleanRecipe, DedupRecipe, TokenizerRecipe
from zgcm_data.sources import collect_default_corpus, read_records
from zgcm_data.sources.files import ReadOptions, ReadReport
from zgcm_data.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 10 MB: raw JSONL, and the same as a folder of records."""
    folder = tmp_path_factory.mktemp("prepare")
    collect_default_corpus(folder / "jsonl", megabytes=10)
    write_records(read_records(folder / "jsonl", ReadOptions(), ReadReport()), folder / "records", print)
    engine.write(clean_frame(engine.read(folder / "records"), CleanRecipe()), folder / "clean")
    return folder


def size(folder: Path) -> dict[str, int]:
    texts = [json.loads(line)["text"] for file in folder.glob("jsonl/*.jsonl") for line in file.open("rb")]
    return {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}


def test_read_speed(benchmark: Any, corpus: Path) -> None:
    benchmark.extra_info.update(size(corpus))
    count = benchmark.pedantic(
        lambda: sum(1 for _ in read_records(corpus / "jsonl", ReadOptions(), ReadReport())), rounds=3
    )
    assert count == benchmark.extra_info["documents"]


def test_clean_speed(benchmark: Any, corpus: Path, tmp_path: Path) -> None:
    benchmark.extra_info.update(size(corpus))
    benchmark.pedantic(
        lambda: engine.write(clean_frame(engine.read(corpus / "records"), CleanRecipe()), tmp_path / "clean"),
        rounds=3,
    )
    assert engine.read(tmp_path / "clean").count_rows() == benchmark.extra_info["documents"]


def test_near_deduplication_speed(benchmark: Any, corpus: Path, tmp_path: Path) -> None:
    benchmark.extra_info.update(size(corpus))

    def run() -> int:
        engine.write(signature_frame(engine.read(corpus / "clean"), DedupRecipe()), tmp_path / "signatures")
        decisions = decide_duplicates(engine.read(tmp_path / "signatures"), DedupRecipe())
        return int(decisions.count_rows())

    assert benchmark.pedantic(run, rounds=3, warmup_rounds=1) == benchmark.extra_info["documents"]


def test_tokenization_speed(benchmark: Any, corpus: Path, tmp_path: Path) -> None:
    texts = engine.read(corpus / "clean").sort("id").select("text").to_pydict()["text"]
    train_tokenizer(texts[::4], tmp_path / "tokenizer.json", vocab_size=8192)
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    benchmark.extra_info.update(size(corpus))
    encoded = benchmark.pedantic(lambda: tokenizer.encode(texts), rounds=3)
    assert len(encoded) == len(texts)


def test_the_tokenization_step_is_as_fast_as_the_library_itself(corpus: Path, tmp_path: Path) -> None:
    """Ours is the step of a build, which also checks and writes the ids; the library gets batches of the same size."""
    batches = list(engine.read(corpus / "clean").select("id", "text", "source", "category").to_arrow_iter())
    parts = [part.column("text").to_pylist() for batch in batches for part in pieces(batch)]
    train_tokenizer([text for part in parts for text in part][::4], tmp_path / "t.json", vocab_size=8192)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "t.json"))
    encoder = DocumentEncoder(Tokenizer(tmp_path / "t.json"), TokenizerRecipe())

    def theirs() -> int:
        encoded = (library.encode_batch_fast(part, add_special_tokens=False) for part in parts)
        return sum(len(item.ids) for part in encoded for item in part)

    def ours() -> int:
        return write_tokens(iter(batches), encoder, tmp_path, lambda done: None)

    clocks = (time.perf_counter, time.process_time)
    best = {ours: [math.inf, math.inf], theirs: [math.inf, math.inf]}
    for _ in range(5):
        for run in (theirs, ours):
            before = [clock() for clock in clocks]
            tokens = run()
            best[run] = [
                min(old, clock() - start) for old, clock, start in zip(best[run], clocks, before, strict=True)
            ]
    wall, processor = (mine / peer for mine, peer in zip(best[ours], best[theirs], strict=True))
    print(
        f"\n{tokens:,} tokens; ours / the library's: {wall:.2f} by the clock, {processor:.2f} in processor time"
    )
    assert min(wall, processor) < 1.15
