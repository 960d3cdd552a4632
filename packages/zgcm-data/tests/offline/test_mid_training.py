import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zgcm_data import engine, fim
from zgcm_data.build import build
from zgcm_data.length_stages import LengthStage, assign_length_stages
from zgcm_data.recipe import BuildRecipe
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
            "document": [f"d{number:03d}" for number in range(len(lengths))],
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


BOUNDS = [64, 128, 256]
STAGES = [
    {"name": "short", "sequence_length": 64, "rows": 20, "shares": {"64": 1.0}},
    {"name": "middle", "sequence_length": 128, "rows": 24, "shares": {"64": 0.25, "128": 0.75}},
    {"name": "long", "sequence_length": 256, "rows": 20, "shares": {"64": 0.2, "128": 0.3, "256": 0.5}},
]


@pytest.fixture(scope="module")
def mixed() -> list[dict[str, Any]]:
    """Documents of all lengths, from a few words to a few hundred."""
    random_ = random.Random(3)
    made, syllables = [], [a + b for a in "bdgklmnprst" for b in "aeiou"]
    for number in range(900):
        count = random_.choice((15, 30, 60, 120))
        words = ["".join(random_.choices(syllables, k=2)) for _ in range(count)]
        source, category = (("notes", "general_text"), ("programs", "code"))[number % 2]
        made.append({"id": f"m{number}", "source": source, "category": category, "text": " ".join(words)})
    return made


def test_build_of_length_stages_from_a_toml_recipe(
    tmp_path: Path, mixed: list[dict[str, Any]], write_corpus: Write
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", mixed)
    text = f'rows_per_shard = 8\n[input]\npath = "{corpus}"\n[heldout]\nbytes = 500\n'
    text += f"[tokenizer]\nvocab_size = 600\n[midtrain]\nbounds = {BOUNDS}\n"
    for stage in STAGES:
        shares = ", ".join(f"{band} = {share}" for band, share in stage["shares"].items())
        text += f'[[midtrain.stages]]\nname = "{stage["name"]}"\nrows = {stage["rows"]}\n'
        text += f"sequence_length = {stage['sequence_length']}\nshares = {{ {shares} }}\n"
    (tmp_path / "recipe.toml").write_text(text)
    recipe = BuildRecipe.from_toml(tmp_path / "recipe.toml")
    result = build(recipe, tmp_path / "out")
    used: list[str] = []
    for stage in STAGES:
        name, length = stage["name"], stage["sequence_length"]
        shards = open_shards(result.sets[name])
        assert verify_shards(result.sets[name]) == []
        assert (len(shards), shards.manifest.sequence_length) == (stage["rows"], length)
        assert (shards.manifest.order.kind, shards.manifest.order.seed) == ("shuffle", recipe.midtrain.seed)
        rows = engine.rows(engine.read(tmp_path / "out" / "work" / name))
        used += [row["id"] for row in rows]
        total = stage["rows"] * length + 1
        for band, share in stage["shares"].items():
            assert abs(sum(row["take"] for row in rows if row["band"] == band) - share * total) <= 1
        assert max(row["tokens"] for row in rows) < length
    assert len(used) == len(set(used))
    assert list(result.report["stages"]) == ["short", "middle", "long"]
    assert "Lexical complexity" not in (tmp_path / "out" / "data_report.html").read_text()
    again = build(recipe, tmp_path / "out")
    assert (again.digest, {step["skipped"] for step in again.steps}) == (result.digest, {True})
    write_corpus(tmp_path / "other" / "corpus.jsonl", mixed[::-1])
    moved = recipe.to_dict() | {"input": {"path": str(tmp_path / "other" / "corpus.jsonl")}}
    assert build(BuildRecipe.from_dict(moved), tmp_path / "moved").digest == result.digest


def test_a_later_stage_changes_no_earlier_one(
    tmp_path: Path, mixed: list[dict[str, Any]], write_corpus: Write, make_recipe: Callable[..., Any]
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", mixed)
    digests = []
    for stages in (STAGES[:2], [STAGES[0], STAGES[1] | {"rows": 10}]):
        recipe = make_recipe(corpus, midtrain={"bounds": BOUNDS, "stages": stages})
        result = build(recipe, tmp_path / "out")
        digests.append([result.report["digests"][stage["name"]] for stage in stages])
    assert digests[0][0] == digests[1][0]
    assert digests[0][1] != digests[1][1]
    skipped = {step["step"]: step["skipped"] for step in result.steps}
    assert (skipped["pack-short"], skipped["pack-middle"]) == (True, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "stage1"}, r"midtrain.stages.stage1.name is 'stage1'; it must be lower-case"),
        ({"name": "heldout"}, r"no name that a build uses itself"),
        ({"rows": 0}, r"midtrain.stages.short.rows is 0; it must be a positive number"),
        ({"shares": {}}, r"midtrain.stages.short.shares is \{\}; it must be at least one band"),
        ({"shares": {"65": 1.0}}, r"is '65'; it must be one of the bounds 64, 128, 256"),
        ({"shares": {"64": 0.0}}, r"shares.64 is 0.0; it must be a positive number"),
        ({"shares": {"128": 1.0}}, r"sequence_length is 64; it must be at least 128"),
    ],
)
def test_wrong_length_stages_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BuildRecipe.from_dict({"midtrain": {"bounds": BOUNDS, "stages": [STAGES[0] | change]}})


def test_wrong_bounds_and_names_are_named() -> None:
    with pytest.raises(ValueError, match=r"midtrain.bounds is \[5, 5\]; it must be positive numbers"):
        BuildRecipe.from_dict({"midtrain": {"bounds": [5, 5]}})
    with pytest.raises(ValueError, match="stages of different names"):
        BuildRecipe.from_dict({"midtrain": {"bounds": BOUNDS, "stages": [STAGES[0], STAGES[0]]}})


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
