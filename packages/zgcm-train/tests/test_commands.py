"""The command line: its list of commands, exit codes, and what is printed where."""

import contextlib
import io
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from zgcm_testing.tiny_runs import tiny_recipe
from zgcm_train import dump_recipe, run_recipe
from zgcm_train.cli import app, main

COMMANDS = ["check", "demo", "export", "import-env", "launch", "plan", "recipes", "report", "run", "verify"]


@dataclass(frozen=True)
class Result:
    """What a command printed and returned."""

    returncode: int
    stdout: str
    stderr: str


def zgcm_train(*arguments: object) -> Result:
    """Run the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "argv", ["zgcm-train", *map(str, arguments)])
        patch.setenv("COLUMNS", "120")
        try:
            main()
        except SystemExit as end:
            code = end.code
    return Result(code or 0, out.getvalue(), err.getvalue())


def test_as_a_process_it_starts_without_torch() -> None:
    program = "import sys, zgcm_train.cli; assert 'torch' not in sys.modules; print('light')"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout == "light\n", result.stderr
    version = subprocess.run(
        [sys.executable, "-m", "zgcm_train", "--version"], capture_output=True, text=True, timeout=60
    )
    assert version.stdout == zgcm_train("--version").stdout


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_recipe(tiny_recipe(data), folder)
    return folder


def test_the_list_of_commands() -> None:
    names = [
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    ]
    assert sorted(names) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_an_example(command: str) -> None:
    result = zgcm_train(command, "--help")
    assert result.returncode == 0
    assert f"Example: zgcm-train {command}" in result.stdout


def test_version() -> None:
    assert re.fullmatch(r"zgcm-train \d+\.\d+\.\d+\n", zgcm_train("--version").stdout)


def test_plan_as_json() -> None:
    plan = json.loads(zgcm_train("plan", "zgcm-1", "--no-assembly", "--json").stdout)
    assert plan["stages"][0]["tokens"] == 1_000_001_765_376
    assert "7,392,735,232 parameters on 192 devices" in zgcm_train("plan", "zgcm-1", "--no-assembly").stdout


def test_run_prints_progress_on_stderr_and_its_result_on_stdout(data: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(dump_recipe(tiny_recipe(data)))
    result = zgcm_train("run", recipe, "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{tmp_path}/run/report.html\n"
    assert "step 12/12  second  loss" in result.stderr
    assert result.stderr.count("precision 1, storage") == 2
    assert "held-out bits per byte at the stage switch: prose" in result.stderr
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_check_passes_on_whole_data(data: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(dump_recipe(tiny_recipe(data)))
    result = zgcm_train("check", recipe, "--json")
    assert result.returncode == 0, result.stdout
    assert all(check["passed"] for check in json.loads(result.stdout))


def test_check_names_what_is_missing(data: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(dump_recipe(tiny_recipe(data)))
    result = zgcm_train("check", recipe, "--set", "stage.1.updates=99")
    assert result.returncode == 3
    assert "needs 792 rows (99 updates of 8)" in result.stderr
    result = zgcm_train(
        "check", recipe, "--set", f"stage.0.data={tmp_path}/none", "--set", "stage.1.updates=99"
    )
    assert result.returncode == 3
    assert "of 5 checks failed; the first:" in result.stderr


def test_verify_and_its_failure(run: Path, tmp_path: Path) -> None:
    assert zgcm_train("verify", run).returncode == 0
    ledger = run / "ledger.jsonl"
    whole = ledger.read_text()
    intervals = [line for line in whole.splitlines(keepends=True) if '"interval"' in line]
    ledger.write_text("".join(intervals[:-1]))
    result = zgcm_train("verify", run, "--json")
    ledger.write_text(whole)
    assert result.returncode == 6
    assert [c["name"] for c in json.loads(result.stdout) if not c["passed"]] == ["ledger"]


def test_export_and_load_back(run: Path, tmp_path: Path) -> None:
    result = zgcm_train("export", run, "--out", tmp_path / "model")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "model" / "config.json").exists()
    result = zgcm_train("export", run, "--out", tmp_path / "model", "--step", 7)
    assert result.returncode == 4
    assert "no checkpoint of step 7 in" in result.stderr
    assert "there are: 6, 10, 12." in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", "nothing.toml"], 3, "There is no recipe file nothing.toml"),
        (["plan", "zgcm-1", "--set", "optimizer.learning_rate=1"], 2, "unknown key optimizer.learning_rate"),
        (["plan", "zgcm-1", "--set", "run.name=${NOT_SET}"], 1, "needs the environment variable NOT_SET"),
        (["verify", "nowhere"], 3, "The run folder is not a folder: nowhere"),
        (["report", "nowhere"], 3, "The run folder is not a folder: nowhere"),
        (["export", "nowhere", "--out", "x"], 3, "The run folder is not a folder: nowhere"),
        (["recipes", "zgcm-2"], 2, "no recipe 'zgcm-2'; known: demo, zgcm-1; did you mean zgcm-1?"),
        (["verify", "/"], 3, "/ holds no recipe.toml, so it is not the folder of a run"),
        (["report", "/"], 3, "/ holds no recipe.toml, so it is not the folder of a run"),
        (["export", "/", "--out", "x"], 3, "/ holds no recipe.toml, so it is not the folder of a run"),
        (["plan", "demo", "--set", "lr=1"], 2, "unknown key lr; keys stand in sections, as in optimizer.lr"),
        (["import-env", "none.env"], 3, "There is no env file none.env; check the path."),
        (["nonsense"], 2, "No such command 'nonsense'"),
        (["demo", "--minutes", "0"], 2, "--minutes"),
    ],
)
def test_wrong_input_gets_one_sentence_and_its_exit_code(
    arguments: list[str], code: int, message: str
) -> None:
    result = zgcm_train(*arguments)
    assert result.returncode == code, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_recipes_are_listed_and_printed() -> None:
    assert zgcm_train("recipes").stdout.split() == ["demo", "zgcm-1"]
    assert "warmup_updates = 667" in zgcm_train("recipes", "zgcm-1").stdout
