import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zgcm_data import cli
from zgcm_data.build import BuildResult
from zgcm_data.dataset import open_dataset
from zgcm_data.recipe import BuildRecipe
from zgcm_data.shards import open_shards

Write = Callable[[Path, list[dict[str, Any]]], Path]


def test_recipe_reads_its_own_output_and_widens_whole_numbers() -> None:
    recipe = BuildRecipe.from_dict({"stage1": {"rows": 5, "shares": {"code": 1}}, "dedup": {"threshold": 1}})
    assert BuildRecipe.from_dict(recipe.to_dict()) == recipe
    assert recipe.stage1.shares == {"code": 1.0}
    assert recipe.stage2.seed == 20260603


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sequence_lenght": 5}, r"unknown recipe key sequence_lenght; did you mean sequence_length\?"),
        ({"stage1": {"row": 5}}, r"unknown recipe key stage1.row; did you mean stage1.rows\?"),
        ({"stage1": {"rows": "5"}}, r"recipe key stage1.rows is '5'; it needs a value of type int"),
        ({"stage1": {"rows": True}}, r"stage1.rows is True; it needs a value of type int"),
        ({"stage1": {"rows": -1}}, r"stage1.rows is -1; it must be 0 or more"),
        ({"stage2": {"shares": {"maths": 1.0}}}, r"stage2.shares is 'maths'; it must be one of code"),
        ({"dedup": {"threshold": 0.0}}, r"dedup.threshold is 0.0; it must be above 0"),
        ({"input": {"on_error": "ignore"}}, r"input.on_error is 'ignore'; it must be 'refuse' or 'skip'"),
        ({"curriculum": {"low_quantile": 0.9, "high_quantile": 0.1}}, r"0 <= low < high <= 1"),
    ],
)
def test_wrong_recipe_keys_and_values_are_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BuildRecipe.from_dict(data)


def test_recipe_file_that_is_not_toml_is_named(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("rows = = 3")
    with pytest.raises(ValueError, match=r"r.toml is not a TOML file"):
        BuildRecipe.from_toml(tmp_path / "r.toml")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main([str(item) for item in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def recipe_file(tmp_path: Path, documents: list[dict[str, Any]], write_corpus: Write) -> Path:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    text = f'sequence_length = 64\nrows_per_shard = 50\n[input]\npath = "{corpus}"\n[heldout]\nbytes = 1500\n'
    text += "[tokenizer]\nvocab_size = 600\n[stage1]\nrows = 120\n[stage2]\nrows = 200\n"
    (tmp_path / "recipe.toml").write_text(text)
    return tmp_path / "recipe.toml"


def test_commands_build_inspect_and_verify(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, recipe_file: Path, built: BuildResult
) -> None:
    out = tmp_path / "out"
    code, text, errors = run(capsys, "clean", recipe_file, "--out", out, "--json")
    assert code == 0
    assert sum(row["documents"] for row in json.loads(text)["decisions"]) == 300
    assert "clean: done" in errors
    code, text, _ = run(capsys, "dedup", recipe_file, "--out", out, "--json")
    assert json.loads(text) == {"kept": 300, "exact": 0, "near": 0}
    assert run(capsys, "order", recipe_file, "--out", out)[0] == 0
    assert run(capsys, "pack", recipe_file, "--out", out)[0] == 0
    code, text, errors = run(capsys, "build", recipe_file, "--out", out)
    assert code == 0
    assert f"digest {built.digest}" in text
    assert "pack-2: unchanged" in errors
    code, text, _ = run(capsys, "verify", out / "stage1", out / "stage2")
    assert (code, text.count("all right")) == (0, 2)
    code, text, _ = run(capsys, "inspect", out / "stage1", "--row", 0, "--json")
    shown = json.loads(text)
    assert shown["rows"] == 120
    assert len(shown["decoded"][0]["text"]) > 60
    code, text, _ = run(capsys, "inspect", out / "stage2", "--row", 3)
    assert "novels" in text


def test_clean_writes_records_with_the_keys_of_the_public_contract(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, recipe_file: Path
) -> None:
    lines = [
        {
            "id": "a",
            "text": "x = 1\ny = 2\nz = 3\n",
            "category": "code",
            "path": "vendor/b.py",
            "source": "s",
        },
        {
            "id": "b",
            "text": "# do not edit\u2028x = 1\n" * 2,
            "category": "code",
            "license": "MIT",
            "source": "s",
        },
    ]
    with (tmp_path / "corpus.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    command = [
        "clean",
        recipe_file,
        "--out",
        tmp_path / "out",
        "--records",
        tmp_path / "records.jsonl",
        "--json",
    ]
    code, text, _ = run(capsys, *command)
    assert (code, json.loads(text)["records"]) == (0, 301)
    assert json.loads(run(capsys, *command, "--keep-dropped")[1])["records"] == 302
    written = (tmp_path / "records.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    found = {item["source_id"]: item for item in map(json.loads, written)}
    assert (found["a"]["decision"], found["a"]["reasons"]) == ("drop", ["vendored_path"])
    assert found["b"]["data"]["license"] == "MIT"
    assert (found["b"]["decision"], found["b"]["metrics"]["estimated_tokens"]) == ("review", 10)
    assert len(found["novels-000"]["record_sha256"]) == 64


def test_verify_of_a_damaged_set_is_code_6_and_names_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, built: BuildResult
) -> None:
    import shutil

    shutil.copytree(built.stage1, tmp_path / "set")
    shard = tmp_path / "set" / "shard-000001.tar"
    data = bytearray(shard.read_bytes())
    data[700] ^= 1
    shard.write_bytes(data)
    code, text, _ = run(capsys, "verify", tmp_path / "set")
    assert code == 6
    assert "shard-000001.tar" in text


def test_megatron_commands_give_the_rows_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, built: BuildResult
) -> None:
    prefix = tmp_path / "megatron" / "text_document"
    code, text, _ = run(capsys, "to-megatron", built.stage1, "--out", prefix, "--json")
    assert code == 0
    assert json.loads(text)["documents"] > 20
    again = ["from-megatron", prefix, "--out", tmp_path / "again", "--tokenizer", built.tokenizer]
    code, text, _ = run(capsys, *again, "--sequence-length", 64, "--json")
    assert (code, json.loads(text)["rows"]) == (0, 120)
    one, two = open_shards(built.stage1), open_shards(tmp_path / "again")
    assert all((one[number].tokens == two[number].tokens).all() for number in range(120))
    direct = open_dataset(prefix)
    assert all((one[number].docs == direct[number].docs).all() for number in range(120))
    assert direct.manifest.sources == one.manifest.sources
    again = ["describe", prefix, "--tokenizer", built.tokenizer, "--sequence-length", 128, "--json"]
    code, text, _ = run(capsys, *again)
    assert (code, json.loads(text)["rows"]) == (0, 60)
    assert [source.name for source in open_dataset(prefix).manifest.sources] == ["text_document"]


def test_exit_codes_of_wrong_use(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, recipe_file: Path
) -> None:
    code, _, errors = run(capsys, "build", tmp_path / "none.toml", "--out", tmp_path / "out")
    assert (code, "none.toml" in errors) == (3, True)
    recipe_file.write_text("nonsense = 1")
    code, _, errors = run(capsys, "build", recipe_file, "--out", tmp_path / "out")
    assert (code, "unknown recipe key nonsense" in errors) == (2, True)
    recipe_file.write_text('[input]\npath = "/nowhere/at/all"')
    code, _, errors = run(capsys, "build", recipe_file, "--out", tmp_path / "out")
    assert (code, errors.strip()) == (3, "zgcm-data: corpus /nowhere/at/all does not exist; check the path")
    assert run(capsys, "inspect", tmp_path / "none")[0] == 3
    with pytest.raises(SystemExit) as caught:
        cli.main(["fly"])
    assert caught.value.code == 2


def test_every_command_teaches_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (
        "corpus",
        "build",
        "clean",
        "dedup",
        "order",
        "pack",
        "inspect",
        "verify",
        "to-megatron",
        "from-megatron",
        "describe",
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main([name, "--help"])
        assert caught.value.code == 0
        assert f"example: zgcm-data {name}" in " ".join(capsys.readouterr().out.split())
