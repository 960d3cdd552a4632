"""A build that leaves out what earlier builds hold."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zgcm_data import engine
from zgcm_data.build import BuildResult, build
from zgcm_data.recipe import BuildRecipe
from zgcm_data.shards import open_shards

Write = Callable[[Path, list[dict[str, Any]]], Path]
MIDTRAIN = {
    "bounds": [64],
    "stages": [{"name": "short", "sequence_length": 64, "rows": 20, "shares": {"64": 1.0}}],
}


def used(out: Path, stages: tuple[str, ...]) -> set[str]:
    return {row["document"] for name in stages for row in engine.rows(engine.read(out / "work" / name))}


def test_mid_training_holds_nothing_of_the_pretraining_before_it(
    tmp_path: Path,
    built: BuildResult,
    documents: list[dict[str, Any]],
    write_corpus: Write,
    make_recipe: Callable[..., BuildRecipe],
) -> None:
    first = used(built.out, ("stage1", "stage2"))
    held = {
        json.loads(line)["id"]
        for file in built.heldout.glob("*.jsonl")
        for line in file.read_text().splitlines()
    }
    again = [
        item | {"id": f"again-{item['id']}", "text": item["text"] + " One more sentence."}
        for item in documents
    ]
    fresh = [
        item | {"id": f"fresh-{number}", "text": fresh_text(number)}
        for number, item in enumerate(documents[:150])
    ]
    corpus = write_corpus(tmp_path / "corpus.jsonl", [*documents[:40], *again[40:], *fresh])
    recipe = make_recipe(corpus, exclude_builds=[str(built.out)], midtrain=MIDTRAIN, heldout={"bytes": 300})
    result = build(recipe, tmp_path / "out")
    gone = {row["id"]: row for row in engine.rows(engine.read(tmp_path / "out" / "work" / "earlier"))}
    pool = {row["id"] for row in engine.rows(engine.read(tmp_path / "out" / "work" / "pool"))}
    for item in documents[:40]:
        assert (item["id"] in gone) == (item["id"] in first | held)
    near = {name for name in gone if name.startswith("again-")}
    wanted = {f"again-{item['id']}" for item in documents[40:] if item["id"] in first | held}
    assert len(wanted) > 50
    assert near == wanted
    assert all(gone[name]["match"].startswith("out:") and gone[name]["similarity"] >= 0.5 for name in gone)
    assert not pool & set(gone)
    assert len({name for name in pool if name.startswith("fresh-")}) > 100
    assert result.report["funnel"]["earlier"]["digests"] == {"out": built.digest}
    assert built.digest in open_shards(result.sets["short"]).manifest.parents
    page = (tmp_path / "out" / "data_report.html").read_text()
    assert "Documents that an earlier build trains on" in page
    assert "without earlier builds" in page
    assert {step["skipped"] for step in build(recipe, tmp_path / "out").steps} == {True}


def fresh_text(number: int) -> str:
    words = [f"{a}{b}" for a in ("lor", "mun", "tas", "vek", "zil") for b in ("ano", "ebi", "iru", "odo")]
    return " ".join(words[(number * 7 + place * place) % len(words)] + str(number) for place in range(30))


def test_what_cannot_be_excluded_is_named(
    tmp_path: Path,
    built: BuildResult,
    documents: list[dict[str, Any]],
    write_corpus: Write,
    make_recipe: Callable[..., BuildRecipe],
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    with pytest.raises(ValueError, match=r"nowhere, which holds no finished build .* give the folder"):
        build(make_recipe(corpus, exclude_builds=[str(tmp_path / "nowhere")]), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    other = make_recipe(corpus, exclude_builds=[str(built.out)], dedup={"bands": 12})
    with pytest.raises(ValueError, match=r"dedup.bands is 12, but 14 in .*; signatures of different shape"):
        build(other, tmp_path / "out")
    copy = tmp_path / "copy"
    shutil.copytree(built.out, copy)
    shutil.rmtree(copy / "work" / "signatures")
    with pytest.raises(ValueError, match=r"needs .*signatures, which is missing; build .* again"):
        build(make_recipe(corpus, exclude_builds=[str(copy)]), tmp_path / "out")
