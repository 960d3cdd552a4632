"""Documents that are cut into parts, and how well the shares along stage 1 hold."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zgcm_data import engine
from zgcm_data.build import build
from zgcm_data.curriculum import curriculum_order, share_error
from zgcm_data.prepare.tokens import DocumentEncoder, TokenStore
from zgcm_data.recipe import BuildRecipe, TokenizerRecipe
from zgcm_data.shards import open_shards, verify_shards
from zgcm_data.tokenizer import Tokenizer, train_tokenizer

Write = Callable[[Path, list[dict[str, Any]]], Path]
LENGTH = 64


def worst_stretch(rows: list[dict[str, Any]], stream: str) -> float:
    """Look at every stretch: the reference for ``share_error``, in time that grows with the square."""
    share = sum(row["take"] for row in rows if row["stream"] == stream) / sum(row["take"] for row in rows)
    ahead = np.concatenate(
        [[0], np.cumsum([row["take"] * ((row["stream"] == stream) - share) for row in rows])]
    )
    return float(np.abs(ahead[:, None] - ahead[None, :]).max())


@pytest.mark.parametrize("longest", [8, 64, 500])
def test_share_error_is_that_of_the_worst_stretch(tmp_path: Path, longest: int) -> None:
    random_ = random.Random(longest)
    names = [f"d{number}" for number in range(300)]
    chosen = engine.daft().from_pydict(
        {
            "id": names,
            "document": names,
            "category": random_.choices(["code", "math", "general_text"], [5, 1, 9], k=300),
            "take": [random_.randint(2, longest) for _ in names],
            "epoch": [0] * 300,
        }
    )
    scores = engine.daft().from_pydict({"id": names, "score": [random_.random() for _ in names]})
    order = curriculum_order(chosen, scores, "order")
    engine.write(order, tmp_path / "order")
    rows = engine.rows(order)
    found = share_error(tmp_path / "order")
    assert sorted(found) == ["code", "math", "natural_language"]
    for stream, tokens in found.items():
        assert tokens - 1 < worst_stretch(rows, stream) <= tokens + 1e-6
        assert tokens <= 2 * longest


@pytest.fixture(scope="module")
def long_documents(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The made corpus with every eight documents of a source joined to one."""
    result = []
    for source in dict.fromkeys(item["source"] for item in documents):
        some = [item for item in documents if item["source"] == source]
        for start in range(0, len(some), 8):
            text = "\n".join(item["text"] for item in some[start : start + 8])
            result.append(some[start] | {"text": text})
    return result


@pytest.fixture(scope="module")
def cut(
    tmp_path_factory: pytest.TempPathFactory,
    long_documents: list[dict[str, Any]],
    write_corpus: Write,
    make_recipe: Callable[..., BuildRecipe],
) -> tuple[BuildRecipe, Path]:
    """A build of long documents whose parts are at most half a row long."""
    folder = tmp_path_factory.mktemp("cut")
    corpus = write_corpus(folder / "corpus.jsonl", long_documents)
    recipe = make_recipe(
        corpus,
        max_document_tokens=LENGTH // 2,
        stage1={"rows": 60},
        stage2={"rows": 100},
        heldout={"bytes": 900},
    )
    build(recipe, folder / "out")
    return recipe, folder / "out"


def test_shares_hold_to_within_one_row_with_documents_of_half_a_row(
    cut: tuple[BuildRecipe, Path],
    tmp_path: Path,
    long_documents: list[dict[str, Any]],
    write_corpus: Write,
    make_recipe: Callable[..., BuildRecipe],
) -> None:
    _, out = cut
    rows = engine.rows(engine.read(out / "work" / "stage1").sort("position"))
    assert {row["stream"] for row in rows} == {"natural_language", "code", "math"}
    assert max(row["take"] for row in rows) <= LENGTH // 2
    assert all(worst_stretch(rows, stream) <= LENGTH for stream in ("natural_language", "code", "math"))
    whole = make_recipe(
        write_corpus(tmp_path / "c.jsonl", long_documents), stage1={"rows": 60}, stage2={"rows": 100}
    )
    errors = build(whole, tmp_path / "out").report["stages"]["stage1"]["share_error"]
    assert max(errors.values()) > LENGTH
    assert "Largest distance of any stretch" in (out / "data_report.html").read_text()


def test_parts_are_the_whole_document_in_order_and_only_one_stage_has_it(
    cut: tuple[BuildRecipe, Path],
) -> None:
    _, out = cut
    for name in ("stage1", "stage2"):
        assert verify_shards(out / name) == []
    tokenizer, store = Tokenizer(out / "tokenizer.json"), TokenStore.open(out / "work" / "tokens")
    texts = {row["id"]: row["text"] for row in engine.rows(engine.read(out / "work" / "clean"))}
    parts: dict[str, list[str]] = {}
    for row in engine.rows(engine.read(out / "work" / "tokens").sort("id")):
        parts.setdefault(row["document"], []).append(row["id"])
    assert max(map(len, parts.values())) > 5
    for document, names in parts.items():
        pieces = [store.document(name) for name in names]
        assert max(map(len, pieces)) < LENGTH // 2
        assert min(map(len, pieces)) >= 2
        assert tokenizer.decode(np.concatenate(pieces)) == texts[document]
    used = [
        {row["document"] for row in engine.rows(engine.read(out / "work" / name))}
        for name in ("stage1", "stage2")
    ]
    assert min(map(len, used)) > 3
    assert not used[0] & used[1]


def test_rows_end_every_part_and_number_each_of_its_own(cut: tuple[BuildRecipe, Path]) -> None:
    _, out = cut
    shards = open_shards(out / "stage1")
    eos, seen = Tokenizer(out / "tokenizer.json").eos_id, set()
    for number in range(len(shards)):
        tokens, docs = shards[number]
        assert (tokens[docs[1:, 0] - 1] == eos).all()
        seen |= {tuple(line) for line in docs[:, 1:].tolist()}
    rows = engine.rows(engine.read(out / "work" / "stage1"))
    assert len({(row["source"], row["ordinal"], row["epoch"]) for row in rows}) == len(rows)
    assert len(rows) - 1 <= len(seen) <= len(rows)
    stage = json.loads((out / "build.json").read_text())["stages"]["stage1"]
    assert (stage["documents"], stage["uses"]) == (len({row["document"] for row in rows}), len(rows))
    assert f"{len(rows):,} uses of a document or a part of one" in (out / "data_report.html").read_text()


def test_a_document_that_is_cut_is_not_filled_in_the_middle(tmp_path: Path) -> None:
    text = "def f(value):\n    return value + 1\n" * 20
    train_tokenizer(
        [text, "words of another kind"] * 30, tmp_path / "t.json", vocab_size=280, specials=fim_tokens()
    )
    tokenizer = Tokenizer(tmp_path / "t.json")
    whole, parts = (
        DocumentEncoder(tokenizer, TokenizerRecipe(fim_rate=1.0), limit).encode(["d"], ["code"], [text])[0]
        for limit in (0, 50)
    )
    controls = {tokenizer.control(token) for token in fim_tokens()}
    assert controls <= set(whole[0].tolist())
    assert not controls & set(np.concatenate(parts).tolist())
    assert tokenizer.decode(np.concatenate(parts)) == text
    assert {len(part) < 50 for part in parts} == {True}


def fim_tokens() -> tuple[str, ...]:
    from zgcm_data import fim

    return fim.TOKENS


def test_an_id_like_that_of_a_part_is_refused(
    tmp_path: Path,
    long_documents: list[dict[str, Any]],
    write_corpus: Write,
    make_recipe: Callable[..., BuildRecipe],
) -> None:
    twins = [
        item | {"id": item["id"] + "#000001", "text": f"a text of its own, number {number} " * 3}
        for number, item in enumerate(long_documents)
    ]
    corpus = write_corpus(tmp_path / "corpus.jsonl", [*long_documents, *twins])
    recipe = make_recipe(
        corpus, max_document_tokens=32, stage1={"rows": 60}, stage2={"rows": 90}, heldout={"bytes": 200}
    )
    with pytest.raises(ValueError, match=r"part of another document \(ID#NUMBER\)"):
        build(recipe, tmp_path / "out")


def test_parts_that_are_too_short_are_refused() -> None:
    with pytest.raises(ValueError, match="max_document_tokens is 5; it must be 0 or at least 16"):
        BuildRecipe.from_dict({"max_document_tokens": 5})
