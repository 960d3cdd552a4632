import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zgcm_data import engine, fim
from zgcm_data.build import build
from zgcm_data.length_stages import LengthStage, assign_length_stages
from zgcm_data.records import CorpusError
from zgcm_data.shards import open_shards, verify_shards
from zgcm_data.tokenizer import Tokenizer

Write = Callable[[Path, list[dict[str, Any]]], Path]


def pool() -> Any:
    random_ = random.Random(1)
    lengths = [random_.randint(100, 16_000) for _ in range(300)]
    lengths += [random_.randint(17_000, 65_000) for _ in range(60)] + [
        random_.randint(66_000, 260_000) for _ in range(9)
    ]
    lengths.append(300_000)
    return engine.daft().from_pydict(
        {
            "id": [f"d{number:03d}" for number in range(len(lengths))],
            "category": ["code", "math"] * (len(lengths) // 2),
            "source": ["s"] * len(lengths),
            "tokens": lengths,
        }
    )


def test_length_stages_meet_their_shares_and_use_every_document_once() -> None:
    stages = [
        LengthStage("16k", 500_000, {16_384: 1.0}),
        LengthStage("64k", 900_000, {16_384: 0.2, 65_536: 0.8}),
        LengthStage("256k", 1_000_000, {16_384: 0.3, 65_536: 0.2, 262_144: 0.5}),
    ]
    frame = pool()
    result = {name: engine.rows(item) for name, item in assign_length_stages(frame, stages, 7).items()}
    for stage in stages:
        rows = result[stage.name]
        assert sum(row["take"] for row in rows) == stage.tokens
        for bound, share in stage.shares.items():
            taken = sum(row["take"] for row in rows if row["band"] == str(bound))
            assert abs(taken - share * stage.tokens) <= 1
        assert max(row["tokens"] for row in rows) < max(stage.shares)
    used = [row["id"] for rows in result.values() for row in rows]
    assert len(used) == len(set(used))
    again = assign_length_stages(frame.sort("id", desc=True), stages, 7)
    assert {name: engine.rows(item) for name, item in again.items()} == result


def test_length_stage_that_cannot_be_filled_names_band_and_numbers() -> None:
    with pytest.raises(
        CorpusError, match=r"stage 256k asks 9,000,000 tokens of documents up to 262144, but [\d,]+"
    ):
        assign_length_stages(pool(), [LengthStage("256k", 9_000_000, {262_144: 1.0})], 7)
    with pytest.raises(ValueError, match=r"names the band 5; the bands are 16384"):
        assign_length_stages(pool(), [LengthStage("x", 9, {5: 1.0})], 7)


def test_cuts_lose_nothing_and_follow_rate_and_seed() -> None:
    text = "def f(x):\n    return x\n"
    cuts = [fim.choose_cut(f"d{number}", len(text), 0.5, 1) for number in range(2000)]
    made = [cut for cut in cuts if cut is not None]
    assert 880 < len(made) < 1060
    for cut in made:
        prefix, suffix, middle = cut.parts(text)
        assert prefix + middle + suffix == text
        assert middle
    assert fim.choose_cut("d", 2, 1.0, 1) is None
    assert cuts != [fim.choose_cut(f"d{number}", len(text), 0.5, 2) for number in range(2000)]


def test_build_with_whole_documents_and_fill_in_the_middle(
    tmp_path: Path, documents: list[dict[str, Any]], write_corpus: Write, make_recipe: Callable[..., Any]
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    tokens = {"vocab_size": 600, "fim_rate": 0.5}
    recipe = make_recipe(
        corpus,
        packing="best_fit",
        tokenizer=tokens,
        sequence_length=256,
        stage1={"rows": 30},
        stage2={"rows": 40},
    )
    result = build(recipe, tmp_path / "out")
    shards = open_shards(result.stage2)
    assert verify_shards(result.stage2) == []
    assert (len(shards), shards.manifest.packing) == (40, "best_fit")
    tokenizer = Tokenizer(result.tokenizer)
    controls = [tokenizer.control(token) for token in fim.TOKENS]
    counts = [
        sum(int((shards[number].tokens == control).sum()) for number in range(40)) for control in controls
    ]
    assert counts[0] >= 2
    assert max(counts) - min(counts) <= 1
    names = [source.name for source in shards.manifest.sources]
    assert "programs" in names
