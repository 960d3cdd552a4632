"""A stage may be a Megatron dataset: the same rows, the same run, the same proof."""

from pathlib import Path

import pytest

from zgcm_data import open_shards, read_ledger
from zgcm_data.megatron import to_megatron
from zgcm_testing.tiny_runs import EOS, VOCABULARY, tiny_recipe
from zgcm_train import Recipe, run_recipe, verify_run
from zgcm_train.check import check_recipe_data
from zgcm_train.errors import PathError
from zgcm_train.files import read_json_lines
from zgcm_train.stage_data import open_stage


@pytest.fixture(scope="module")
def prefixes(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    for name in ("stage1", "stage2"):
        shards = open_shards(data / name)
        to_megatron(shards, shards.manifest, folder / name)
    return folder


def from_prefixes(data: Path, prefixes: Path, **facts: object) -> Recipe:
    recipe = tiny_recipe(data)
    values = recipe.model_dump(mode="json", exclude_none=True)
    for stage, name in zip(values["stage"], ("stage1", "stage2"), strict=True):
        stage["data"] = str(prefixes / name)
    values["data"] |= facts
    return Recipe.model_validate(values)


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in read_json_lines(folder / "metrics.jsonl") if r["kind"] == "train"]


def test_a_run_from_a_prefix_is_the_run_from_the_shards(data: Path, prefixes: Path, tmp_path: Path) -> None:
    recipe = from_prefixes(data, prefixes)
    assert all(check.passed for check in check_recipe_data(recipe)), check_recipe_data(recipe)
    run_recipe(recipe, tmp_path / "prefix")
    run_recipe(tiny_recipe(data), tmp_path / "shards")
    assert losses(tmp_path / "prefix") == losses(tmp_path / "shards")
    counted = [
        [r["sources"] for r in read_ledger(tmp_path / name / "ledger.jsonl") if r["kind"] == "interval"]
        for name in ("prefix", "shards")
    ]
    for ours, theirs in zip(*counted, strict=True):
        keys = ("name", "tokens", "loss_tokens")
        assert [[s[k] for k in keys] for s in ours] == [[s[k] for k in keys] for s in theirs]
    assert all(check.passed for check in verify_run(tmp_path / "prefix")), verify_run(tmp_path / "prefix")


def test_without_a_sidecar_the_recipe_says_what_the_dataset_cannot(
    data: Path, prefixes: Path, tmp_path: Path
) -> None:
    for name in ("stage1.bin", "stage1.idx", "stage2.bin", "stage2.idx"):
        (tmp_path / name).write_bytes((prefixes / name).read_bytes())
    with pytest.raises(PathError, match="vocab_size"):
        open_stage(from_prefixes(data, tmp_path), 0)
    facts = {
        "megatron_vocab_size": VOCABULARY,
        "megatron_eos_id": EOS,
        "megatron_tokenizer_sha256": open_shards(data / "stage1").manifest.tokenizer_sha256,
    }
    rows = open_stage(from_prefixes(data, tmp_path, **facts), 0)
    assert [s.name for s in rows.manifest.sources] == ["first"]
    assert (rows[5].tokens == open_shards(data / "stage1")[5].tokens).all()


def test_a_changed_byte_is_found_before_and_after_a_run(data: Path, prefixes: Path, tmp_path: Path) -> None:
    for path in prefixes.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    recipe = from_prefixes(data, tmp_path)
    run_recipe(recipe, tmp_path / "run")
    content = bytearray((tmp_path / "stage2.bin").read_bytes())
    content[100] ^= 1
    (tmp_path / "stage2.bin").write_bytes(bytes(content))
    for checks in (check_recipe_data(recipe), verify_run(tmp_path / "run")):
        assert [c.name for c in checks if not c.passed] == ["data of stage second"]


def test_a_path_that_is_nothing_is_named(data: Path, tmp_path: Path) -> None:
    recipe = from_prefixes(data, tmp_path)
    with pytest.raises(
        PathError, match="neither the folder of a shard set nor the prefix of a Megatron dataset"
    ):
        open_stage(recipe, 0)


def test_a_dataset_that_is_too_short_is_refused(data: Path, prefixes: Path) -> None:
    recipe = from_prefixes(data, prefixes)
    stage = recipe.stage[0].model_copy(update={"updates": 10_000})
    with pytest.raises(PathError, match="needs 80000 rows"):
        open_stage(recipe.model_copy(update={"stage": (stage, recipe.stage[1])}), 0)
