import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zgcm_data import engine
from zgcm_data.build import BuildError, BuildResult, build
from zgcm_data.prepare import steps as steps_module
from zgcm_data.recipe import BuildRecipe
from zgcm_data.records import CorpusError
from zgcm_data.shards import open_shards, verify_shards
from zgcm_data.tokenizer import Tokenizer

Documents = list[dict[str, Any]]
Write = Callable[[Path, Documents], Path]
Recipe = Callable[..., BuildRecipe]


def decoded_rows(result: BuildResult, stage: str) -> list[str]:
    tokenizer = Tokenizer(result.tokenizer)
    shards = open_shards(result.out / stage)
    return [tokenizer.decode(shards[number].tokens.tolist()) for number in range(len(shards))]


def test_both_stages_have_exactly_the_rows_asked_for_and_verify(built: BuildResult) -> None:
    for stage, rows in (("stage1", 120), ("stage2", 200)):
        assert verify_shards(built.out / stage) == []
        assert len(open_shards(built.out / stage)) == rows


def test_source_tokens_of_the_manifest_are_the_planned_quotas(built: BuildResult) -> None:
    for stage in ("stage1", "stage2"):
        planned = [item["tokens"] for item in built.report["stages"][stage]["sources"]]
        written = [source.tokens for source in open_shards(built.out / stage).manifest.sources]
        assert sum(planned) == sum(written) + 1  # the very first token is no target
        assert all(abs(one - two) <= 1 for one, two in zip(planned, written, strict=True))


def test_no_document_of_stage_1_is_in_stage_2_and_none_of_the_heldout_in_either(built: BuildResult) -> None:
    ids = {
        name: set(engine.read(built.out / "work" / name).to_pydict()["id"]) for name in ("stage1", "stage2")
    }
    held = {
        json.loads(line)["id"]
        for path in built.heldout.glob("*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
    }
    assert len(held) > 5
    assert not ids["stage1"] & ids["stage2"]
    assert not held & (ids["stage1"] | ids["stage2"])


def test_heldout_text_never_stands_in_a_training_row(built: BuildResult) -> None:
    training = "".join(decoded_rows(built, "stage1") + decoded_rows(built, "stage2"))
    for path in built.heldout.glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            text = json.loads(line)["text"]
            assert text[40:100] not in training


def test_heldout_manifest_is_bound_by_its_digest(built: BuildResult) -> None:
    import hashlib

    manifest = json.loads((built.heldout / "manifest.json").read_text())
    assert manifest["format"] == "zgcm-heldout/1"
    assert [item["name"] for item in manifest["domains"]] == ["code", "general_text", "math"]
    fields = {key: value for key, value in manifest.items() if key != "digest"}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    assert manifest["digest"] == hashlib.sha256(text.encode()).hexdigest()
    for item in manifest["domains"]:
        assert (
            item["sha256"]
            == hashlib.sha256((built.heldout / f"{item['name']}.jsonl").read_bytes()).hexdigest()
        )


def test_code_keeps_every_space_and_tab_through_to_the_rows(built: BuildResult) -> None:
    text = "".join(decoded_rows(built, "stage2"))
    assert "):\n    if " in text
    assert ":\n\treturn " in text


def test_digest_does_not_depend_on_the_order_of_the_input(
    built: BuildResult, tmp_path: Path, documents: Documents, write_corpus: Write, make_recipe: Recipe
) -> None:
    shuffled = documents.copy()
    random.Random(1).shuffle(shuffled)
    folder = tmp_path / "corpus"
    write_corpus(folder / "a.jsonl", shuffled[:100])
    write_corpus(folder / "b.jsonl", shuffled[100:])
    assert build(make_recipe(folder), tmp_path / "out").digest == built.digest


def test_digest_without_ids_does_not_depend_on_the_order_either(
    tmp_path: Path, documents: Documents, write_corpus: Write, make_recipe: Recipe
) -> None:
    bare = [{key: value for key, value in item.items() if key != "id"} for item in documents]
    bare += bare[:3]
    digests = set()
    for seed in (1, 2):
        random.Random(seed).shuffle(bare)
        corpus = write_corpus(tmp_path / f"{seed}.jsonl", bare)
        digests.add(build(make_recipe(corpus), tmp_path / f"out{seed}").digest)
    assert len(digests) == 1


def test_second_run_does_nothing_and_a_changed_setting_repeats_only_what_follows(
    tmp_path: Path, documents: Documents, write_corpus: Write, make_recipe: Recipe
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    first = build(make_recipe(corpus), tmp_path / "out")
    again = build(make_recipe(corpus), tmp_path / "out")
    assert all(step["skipped"] for step in again.steps)
    assert again.report == first.report
    changed = build(make_recipe(corpus, stage2={"rows": 150}), tmp_path / "out")
    ran = [step["step"] for step in changed.steps if not step["skipped"]]
    assert ran == ["order-2", "pack-2", "unigram", "report"]
    assert changed.report["digests"]["stage1"] == first.report["digests"]["stage1"]


def test_damaged_output_is_made_again(
    tmp_path: Path, documents: Documents, write_corpus: Write, make_recipe: Recipe
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    first = build(make_recipe(corpus), tmp_path / "out")
    next((tmp_path / "out" / "stage1").glob("*.tar")).unlink()
    (tmp_path / "out" / "work" / "tokens" / "ids.bin").write_bytes(b"torn")
    assert build(make_recipe(corpus), tmp_path / "out").digest == first.digest
    assert verify_shards(tmp_path / "out" / "stage1") == []


@pytest.mark.slow
def test_build_killed_at_any_moment_goes_on_to_the_same_digest(
    built: BuildResult, tmp_path: Path, documents: Documents, write_corpus: Write, make_recipe: Recipe
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    script = (
        "import json, sys, pathlib\n"
        "from zgcm_data.build import build\n"
        "from zgcm_data.recipe import BuildRecipe\n"
        "recipe = BuildRecipe.from_dict(json.loads(sys.argv[1]))\n"
        "build(recipe, pathlib.Path(sys.argv[2]), progress=lambda *seen: print(*seen, flush=True))\n"
    )
    recipe = make_recipe(corpus)
    seen: set[str] = set()
    for stop_after in ("clean", "tokenize", "pack-1"):
        command = [sys.executable, "-c", script, json.dumps(recipe.to_dict()), str(tmp_path / "out")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            seen.add(line.split()[0])
            if line.startswith(f"{stop_after} 0.0"):
                time.sleep(0.02)
                os.kill(process.pid, signal.SIGKILL)
                break
        process.stdout.close()
        process.wait()
    assert "pack-1" in seen
    result = build(recipe, tmp_path / "out")
    assert result.digest == built.digest
    assert not list((tmp_path / "out").rglob("*.partial"))


def test_full_disk_is_one_sentence_and_keeps_finished_steps(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    documents: Documents,
    write_corpus: Write,
    make_recipe: Recipe,
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    real = engine.write

    def full(frame: Any, path: Path) -> None:
        if path.name == "duplicates":
            raise OSError(28, "No space left on device")
        real(frame, path)

    monkeypatch.setattr(engine, "write", full)
    with pytest.raises(BuildError, match=r"disk of .*out is full .* finished steps are kept") as caught:
        build(make_recipe(corpus), tmp_path / "out")
    assert caught.value.errno == 28
    monkeypatch.setattr(engine, "write", real)
    result = build(make_recipe(corpus), tmp_path / "out")
    assert [step["step"] for step in result.steps if step["skipped"]] == ["read", "clean"]


def test_message_of_a_native_library_about_a_full_disk_is_understood() -> None:
    assert steps_module.is_full(RuntimeError("DaftError::External Unable to write: No space left on device"))
    assert not steps_module.is_full(RuntimeError("other"))


def test_folder_that_cannot_be_written_is_named(
    tmp_path: Path, documents: Documents, write_corpus: Write, make_recipe: Recipe
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BuildError, match=r"folder .*file/out cannot be written"):
        build(make_recipe(corpus), tmp_path / "file" / "out")


def test_nothing_outside_the_output_folder_is_written(
    tmp_path: Path, documents: Documents, write_corpus: Write, make_recipe: Recipe
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    script = (
        "import json, sys, pathlib\n"
        "from zgcm_data.build import build\n"
        "from zgcm_data.recipe import BuildRecipe\n"
        "build(BuildRecipe.from_dict(json.loads(sys.argv[1])), pathlib.Path(sys.argv[2]))\n"
    )
    for name in ("home", "tmp", "here"):
        (tmp_path / name).mkdir()
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", script, json.dumps(make_recipe(corpus).to_dict()), str(tmp_path / "out")],
        env=environment,
        cwd=tmp_path / "here",
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout == ""
    for name in ("home", "tmp", "here"):
        assert list((tmp_path / name).rglob("*")) == []


def test_quota_larger_than_a_category_names_both_numbers_and_the_remedy(
    tmp_path: Path, documents: Documents, write_corpus: Write, make_recipe: Recipe
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    recipe = make_recipe(corpus, stage1={"rows": 300, "shares": {"math": 0.9, "code": 0.1}})
    with pytest.raises(
        CorpusError, match=r"stage1: the quota of 17,281 tokens for math .* max_epochs.math = \d"
    ):
        build(recipe, tmp_path / "out")


def test_stages_shrink_to_the_corpus_only_where_the_recipe_says_so(
    tmp_path: Path, documents: Documents, write_corpus: Write, make_recipe: Recipe
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    big = {"stage1": {"rows": 20_000, "shrink": True}, "stage2": {"rows": 40_000, "shrink": True}}
    result = build(make_recipe(corpus, **big), tmp_path / "out")
    rows = [result.report["stages"][name]["rows"] for name in ("stage1", "stage2")]
    assert 100 < rows[0] < rows[1] < 2.2 * rows[0]
    assert [len(open_shards(result.out / name)) for name in ("stage1", "stage2")] == rows
    with pytest.raises(CorpusError, match=r"stage1: the quota of [\d,]+ tokens for .* is larger than"):
        build(make_recipe(corpus, stage1={"rows": 20_000}), tmp_path / "out")


def test_without_row_counts_the_corpus_is_used_up(
    tmp_path: Path, documents: Documents, write_corpus: Write, make_recipe: Recipe
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    result = build(make_recipe(corpus, stage1={}, stage2={}), tmp_path / "out")
    stages = result.report["stages"]
    held = sum(item["available"] for item in stages["stage2"]["sources"])
    assert 0 <= held - stages["stage2"]["tokens"] <= 64
    assert stages["stage1"]["rows"] * 2 < stages["stage2"]["rows"]


def test_d22_repeats_are_explicit_exact_and_on_record(
    tmp_path: Path, documents: Documents, write_corpus: Write, make_recipe: Recipe
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    stage = {"rows": 400, "shares": {"math": 0.9, "code": 0.1}, "max_epochs": {"math": 3}}
    result = build(make_recipe(corpus, stage2=stage, stage1={"rows": 40}), tmp_path / "out")
    sources = {item["source"]: item for item in result.report["stages"]["stage2"]["sources"]}
    assert sources["exercises"]["tokens"] == 23041
    assert 1 < sources["exercises"]["epochs"] <= 3
    shards = open_shards(result.stage2)
    entries = np.concatenate([shards[number].docs for number in range(len(shards))])
    math = next(source.id for source in shards.manifest.sources if source.name == "exercises")
    epochs = np.unique(entries[entries[:, 1] == math][:, 3])
    assert epochs.tolist() == list(range(int(np.ceil(sources["exercises"]["epochs"]))))


def test_a_given_tokenizer_is_used_as_it_is(
    built: BuildResult, tmp_path: Path, documents: Documents, write_corpus: Write, make_recipe: Recipe
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    result = build(make_recipe(corpus, tokenizer={"path": str(built.tokenizer)}), tmp_path / "out")
    assert result.report["digests"]["stage1"] == built.report["digests"]["stage1"]


def test_report_is_complete_and_free_of_absolute_paths(built: BuildResult) -> None:
    text = (built.out / "build.json").read_text()
    report = json.loads(text)
    assert report["seeds"] == {"heldout": 17, "tokenizer_sample": 23, "stage1": 31, "stage2": 20260603}
    assert str(built.out.parent) not in text
    assert report["funnel"]["read"]["documents"] == 300
    assert 0 < report["unigram"]["domains"]["code"]["bits_per_byte"] < 8


def test_data_report_is_one_page_without_network_and_shows_every_figure(built: BuildResult) -> None:
    text = (built.out / "data_report.html").read_text(encoding="utf-8")
    assert "http" not in text.replace("https://docs", "")
    assert "<script" not in text
    for heading in ("Funnel", "What cleaning lowered", "Duplicates", "complexity", "Shares along", "Lengths"):
        assert heading in text
    assert text.count("<svg") == 3
    assert built.report["digests"]["stage1"] in text


def test_several_datasets_with_fields_and_profiles_of_their_own(
    built: BuildResult, tmp_path: Path, documents: Documents, make_recipe: Recipe
) -> None:
    code = [item for item in documents if item["category"] == "code"]
    rest = [item for item in documents if item["category"] != "code"]
    files = [{"blob_id": item["id"], "content": item["text"], "path": "a/b.py"} for item in code]
    files.append({"blob_id": "lock", "content": "x = 1\ny = 2\nz = 3\n", "path": "go.sum"})
    for name, items in (("programs", files), ("rest", rest)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    datasets = {
        "programs": {"path": str(tmp_path / "programs.jsonl"), "profile": "gharchive"},
        "rest": {"path": str(tmp_path / "rest.jsonl")},
    }
    result = build(make_recipe(tmp_path, input={"datasets": datasets}), tmp_path / "out")
    assert result.report["funnel"]["clean"]["reasons"]["lock_file"] == 1
    assert result.report["funnel"]["read"]["datasets"]["programs"]["documents"] == 81
    assert result.digest == built.digest


def test_documents_that_hold_an_evaluation_passage_leave_and_name_it(
    tmp_path: Path, documents: Documents, write_corpus: Write, make_recipe: Recipe
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    stolen = documents[3]["text"].split()
    evaluation = [
        {"id": "exam-1", "question": "Tell us: " + " ".join(stolen[20:40]).upper(), "answer": "yes"},
        {
            "id": "exam-2",
            "question": "Nothing that the corpus holds stands anywhere in this long question at all",
        },
        {"id": "exam-3", "question": "too short"},
    ]
    exam = write_corpus(tmp_path / "exam.jsonl", evaluation)
    settings = {"paths": [str(exam)], "text_fields": ["question", "answer"]}
    result = build(make_recipe(corpus, decontaminate=settings), tmp_path / "out")
    assert result.report["funnel"]["decontaminate"] == {"texts": 3, "too_short": 1, "documents": 1}
    found = engine.rows(engine.read(tmp_path / "out" / "work" / "contaminated"))
    assert [(row["id"], row["match"]) for row in found] == [(documents[3]["id"], "exam-1")]
    assert found[0]["shared"] >= 8 - 1
    assert documents[3]["id"] not in engine.read(tmp_path / "out" / "work" / "pool").to_pydict()["id"]


def test_corpus_of_code_alone_and_of_prose_alone(
    tmp_path: Path, documents: Documents, write_corpus: Write, make_recipe: Recipe
) -> None:
    for category in ("code", "general_text"):
        chosen = [item for item in documents if item["category"] == category]
        corpus = write_corpus(tmp_path / f"{category}.jsonl", chosen)
        stages = {"stage1": {"rows": 20}, "stage2": {"rows": 20}}
        result = build(make_recipe(corpus, tokenizer={"vocab_size": 400}, **stages), tmp_path / category)
        assert [item["name"] for item in result.report["funnel"]["heldout"]["domains"]] == [category]
        assert len(open_shards(result.stage1)) == 20


def test_corpus_that_is_too_small_says_what_is_missing(
    tmp_path: Path, documents: Documents, write_corpus: Write, make_recipe: Recipe
) -> None:
    one = write_corpus(tmp_path / "one.jsonl", documents[:1])
    with pytest.raises(CorpusError, match="no category has two documents, so nothing can be held out"):
        build(make_recipe(one), tmp_path / "one")
    few = write_corpus(tmp_path / "few.jsonl", documents[:12])
    with pytest.raises(CorpusError, match=r"gives a tokenizer of \d+ entries, not 8192"):
        build(make_recipe(few, tokenizer={}), tmp_path / "few")
    empty = write_corpus(tmp_path / "empty.jsonl", [{"text": " "}, {"text": "short"}])
    with pytest.raises(CorpusError, match=r"cleaning keeps no document .*'empty': 1, 'too_short': 1"):
        build(make_recipe(empty), tmp_path / "empty")
