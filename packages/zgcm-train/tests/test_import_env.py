"""Env files of the published launcher become recipes; nothing in them is run, and every variable is accounted for."""

import json
import sys
from pathlib import Path

import pytest

from zgcm_testing.tiny_runs import EOS, VOCABULARY, write_byte_tokenizer
from zgcm_train import load_recipe, make_plan
from zgcm_train.cli import main
from zgcm_train.errors import ConfigurationError, MissingSettingError, PathError
from zgcm_train.files import sha256_file
from zgcm_train.interchange import import_env_files
from zgcm_train.interchange.datasets import ELSEWHERE, FACTS
from zgcm_train.interchange.env_file import read_env_file

OUTSIDE = {"SHARED_STORAGE_ROOT": "/share"}
COMMON = """\
#!/usr/bin/env bash
# Settings of a stage.
set -euo pipefail
export SHARED_STORAGE_ROOT="${SHARED_STORAGE_ROOT:?set it}"
export TOKENIZER_PATH="${TOKENIZER_PATH:-${SHARED_STORAGE_ROOT}/tokenizer}"
export NUM_NODES="${NUM_NODES:-${WORLD_SIZE:-24}}"
export GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
export NODE_RANK="${NODE_RANK:-${RANK:?set it}}"
export NUM_LAYERS=32
export HIDDEN_SIZE=4096   # wide
export WINDOW_SIZE="127,0"
export ATTENTION_OUTPUT_GATE='1'
export OPTIMIZER=muon
export LR=2.0e-4
export MIN_LR=2.0e-5
export LR_DECAY_STYLE=constant
export ADAM_BETA1=0.9
export ADAM_BETA2=0.95
export MUON_TP_MODE=blockwise
export MUON_FP32_MATMUL_PREC=medium
export FP8_FORMAT=hybrid
export TP_SIZE=2
export PP_SIZE=1
export CP_SIZE=2
export MICRO_BATCH_SIZE=2
export GLOBAL_BATCH_SIZE=768
export SEQ_LENGTH=16384
export MAX_POSITION_EMBEDDINGS=16384
export LR_WARMUP_ITERS=667
export NO_DATA_SHUFFLE=1
export PRETRAINED_CHECKPOINT=""
"""
FIRST = (
    COMMON
    + """
export EXP_NAME=sequential
export REAL_DATA_PREFIX="${FIRST_PREFIX:-${SHARED_STORAGE_ROOT}/first}"
export TRAIN_ITERS=79473
"""
)
SECOND = (
    COMMON
    + """
export EXP_NAME=shuffled
export REAL_DATA_PREFIX="${SECOND_PREFIX:-${SHARED_STORAGE_ROOT}/second}"
export TRAIN_ITERS=333787
export RESUME_ITER=79473
export RESUME_CONSUMED_SAMPLES=61035264
export MEGATRON_DATASET_SAMPLE_OFFSET=61035264
"""
)
LONG = (
    COMMON.replace("LR=2.0e-4", "LR=2.0e-5")
    .replace("MIN_LR=2.0e-5", "MIN_LR=2.0e-6")
    .replace("constant", "cosine")
    .replace("PP_SIZE=1", "PP_SIZE=2")
    .replace("CP_SIZE=2", "CP_SIZE=4")
    .replace("MICRO_BATCH_SIZE=2", "MICRO_BATCH_SIZE=1")
    .replace("768", "48")
    .replace("16384", "262144")
    .replace("export LR_WARMUP_ITERS=667", "export LR_WARMUP_SAMPLES=6864")
    + """
export EXP_NAME=long
export REAL_DATA_PREFIX=""
export TRAIN_SAMPLES=688560
export LR_DECAY_SAMPLES=688560
export ROTARY_BASE=10000000
export ENABLE_RECOMPUTE=1
export RECOMPUTE_GRANULARITY="full"
"""
)


def write(folder: Path, **texts: str) -> list[Path]:
    for name, text in texts.items():
        (folder / f"{name}.env").write_text(text)
    return [folder / f"{name}.env" for name in texts]


def test_both_stages_become_one_recipe_with_the_published_tokens(tmp_path: Path) -> None:
    imported = import_env_files(write(tmp_path, one=FIRST, two=SECOND), OUTSIDE)
    (tmp_path / "recipe.toml").write_text(imported.text())
    recipe = load_recipe(tmp_path / "recipe.toml")
    assert recipe == imported.recipe
    plan = make_plan(recipe)
    assert [stage.tokens for stage in plan.stages] == [1_000_001_765_376, 3_200_010_682_368]
    assert [stage.name for stage in plan.stages] == ["sequential", "shuffled"]
    assert [stage.data for stage in recipe.stage] == ["/share/first", "/share/second"]
    assert (plan.devices, recipe.parallel.dp_shard, plan.parameters) == (192, 48, 7_392_735_232)
    assert (recipe.optimizer.lr, recipe.optimizer.betas) == (2e-4, (0.9, 0.95))
    assert (recipe.optimizer.sharded, recipe.precision.fp8) == ("blockwise", "hybrid")
    assert recipe.schedule.warmup_updates == 667


def test_the_second_stage_alone_makes_its_own_updates_and_no_second_warm_up(tmp_path: Path) -> None:
    recipe = import_env_files(write(tmp_path, two=SECOND), OUTSIDE).recipe
    assert recipe.stage[0].updates == 254_314
    assert recipe.schedule.warmup_updates == 0


def test_a_budget_in_samples_a_cosine_and_a_pipeline(tmp_path: Path) -> None:
    recipe = import_env_files(write(tmp_path, long=LONG), OUTSIDE).recipe
    assert make_plan(recipe).tokens == 180_501_872_640
    assert (recipe.stage[0].updates, recipe.schedule.warmup_updates) == (14_345, 143)
    assert (recipe.schedule.kind, recipe.schedule.min_lr) == ("cosine", 2e-6)
    assert (recipe.parallel.pp, recipe.parallel.cp, recipe.parallel.dp_shard) == (2, 4, 12)
    assert (recipe.parallel.recompute, recipe.model.rotary_base) == ("full", 1e7)


def test_every_variable_is_reported(tmp_path: Path) -> None:
    imported = import_env_files(write(tmp_path, one=FIRST), OUTSIDE)
    reports = {key.key: key for key in imported.keys}
    assert list(reports) == list(read_env_file(tmp_path / "one.env", OUTSIDE))
    assert (reports["LR"].status, reports["LR"].detail) == ("mapped", "optimizer.lr")
    assert (reports["MIN_LR"].status, reports["MIN_LR"].detail) == (
        "left out",
        "without effect on a constant learning rate",
    )
    assert reports["WINDOW_SIZE"].status == "fixed"
    assert reports["NO_DATA_SHUFFLE"].status == "left out"


def test_variables_that_are_set_nowhere_stay_variables(tmp_path: Path) -> None:
    recipe = import_env_files(write(tmp_path, one=FIRST), {}).recipe
    assert recipe.stage[0].data == "${SHARED_STORAGE_ROOT}/first"
    text = FIRST.replace("TP_SIZE=2", 'TP_SIZE="${TP_SIZE:?set it}"')
    with pytest.raises(MissingSettingError, match=r"TP_SIZE needs \$\{TP_SIZE\}"):
        import_env_files(write(tmp_path, one=text), {})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("RESUME_CONSUMED_SAMPLES=61035264", "RESUME_CONSUMED_SAMPLES=61035265", "is not RESUME_ITER times"),
        ("OFFSET=61035264", "OFFSET=5", "MEGATRON_DATASET_SAMPLE_OFFSET=5 is not RESUME_CONSUMED_SAMPLES"),
        ("RESUME_ITER=79473", "RESUME_ITER=79000", "the stages before make 79473 updates"),
        ("TRAIN_ITERS=333787", "TRAIN_ITERS=254", "79473 updates are made before"),
        ("LR=2.0e-4", "LR=1.0e-4", "optimizer.lr is 0.0001 and 0.0002 in the files before"),
        ('"127,0"', '"4095,0"', "WINDOW_SIZE=4095,0 cannot be imported, 127,0 holds here"),
        ("OPTIMIZER=muon", "OPTIMIZER=adam", "OPTIMIZER=adam cannot be imported"),
        ("=medium", "=high", "MUON_FP32_MATMUL_PREC=high has no counterpart; known are medium, highest"),
        ("CP_SIZE=2", "CP_SIZE=5", "192 devices are no multiple of TP_SIZE x PP_SIZE x CP_SIZE = 10"),
        ("NUM_LAYERS=32", "NUM_LAYERS=many", "NUM_LAYERS=many"),
        ("OPTIMIZER=", "OPTIMISER=", "unknown variable OPTIMISER"),
    ],
)
def test_contradictions_are_refused_and_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SECOND
    with pytest.raises(ConfigurationError) as caught:
        import_env_files(write(tmp_path, one=FIRST, two=SECOND.replace(old, new)), OUTSIDE)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_all_contradictions_are_named_together(tmp_path: Path) -> None:
    text = SECOND.replace("OFFSET=61035264", "OFFSET=5") + "export NEW_FLAG=1\n"
    with pytest.raises(ConfigurationError, match=r"OFFSET=5.*unknown variable NEW_FLAG.*--allow-unknown"):
        import_env_files(write(tmp_path, one=FIRST, two=text), OUTSIDE)


def test_unknown_variables_are_let_through_when_asked(tmp_path: Path) -> None:
    paths = write(tmp_path, one=FIRST + "export NEW_FLAG=1\n")
    imported = import_env_files(paths, OUTSIDE, allow_unknown=True)
    assert [key.key for key in imported.keys if key.status == "unknown"] == ["NEW_FLAG"]


@pytest.mark.parametrize(
    "line",
    [
        "export A=$(touch ran)",
        "export A=`touch ran`",
        'export A="`touch ran`"',
        'export A="$(touch ran)"',
        "touch ran",
        "export A=1; touch ran",
        "export A=1 && touch ran",
        "export A=1 B=2",
        "source other.env",
        "export A=${B:-$(touch ran)}",
        'export A="open',
        "export A=${B",
    ],
)
def test_whatever_is_more_than_a_value_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (path,) = write(tmp_path, one=f"export FIRST=1\n{line}\n")
    with pytest.raises(ConfigurationError, match=r"one\.env, line 2: "):
        read_env_file(path, {})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A=plain", "plain"),
        ("export A='single $B'", "single $B"),
        ('export A="double $B"  # why', "double out"),
        ("export A=${B}/x", "out/x"),
        ("export A=${C:-${B}/y}", "out/y"),
        ("export A=${EMPTY:-full}", "full"),
        ("export A=${EMPTY-full}", ""),
        ("export A=${C:?needed}/z", "${C}/z"),
        ("export A=a\\\nb", "ab"),
        ('export A=""', ""),
        ("export B=in\nexport A=$B", "in"),
        ("export A=1\nexport A=2", "2"),
    ],
)
def test_values_are_expanded_as_a_shell_does(tmp_path: Path, text: str, value: str) -> None:
    (path,) = write(tmp_path, one=text + "\n")
    assert read_env_file(path, {"B": "out", "EMPTY": ""})["A"].value == value


def test_facts_of_a_megatron_dataset_come_from_its_tokenizer(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path / "tokenizer.json")
    outside = {"SHARED_STORAGE_ROOT": str(tmp_path), "TOKENIZER_PATH": str(tmp_path)}
    imported = import_env_files(write(tmp_path, one=FIRST), outside)
    data = imported.recipe.data
    assert (data.megatron_vocab_size, data.megatron_eos_id) == (VOCABULARY, EOS)
    assert data.megatron_tokenizer_sha256 == sha256_file(tmp_path / "tokenizer.json")
    told = {key.key: (key.status, key.detail) for key in imported.keys}
    assert told["TOKENIZER_PATH"] == ("mapped", FACTS)
    assert told["REAL_DATA_PREFIX"] == ("mapped", "stage.data")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    with pytest.raises(ConfigurationError, match=r"TOKENIZER_PATH=.* has no token '<\|end\|>'"):
        import_env_files(write(tmp_path, one=FIRST), outside)


def test_a_dataset_that_says_all_itself_or_lies_elsewhere_sets_no_facts(tmp_path: Path) -> None:
    outside = {"SHARED_STORAGE_ROOT": str(tmp_path)}
    elsewhere = import_env_files(write(tmp_path, one=FIRST), outside)
    assert elsewhere.recipe.data.megatron_vocab_size is None
    assert {key.key: key.detail for key in elsewhere.keys}["REAL_DATA_PREFIX"] == ELSEWHERE
    (tmp_path / "first.bin").write_bytes(b"")
    with pytest.raises(
        ConfigurationError, match=r"first\.zgcm\.json, and TOKENIZER_PATH=.*zgcm-data describe"
    ):
        import_env_files(write(tmp_path, one=FIRST), outside)
    (tmp_path / "first.zgcm.json").write_text("{}")
    described = import_env_files(write(tmp_path, one=FIRST), outside)
    assert described.recipe.data.megatron_vocab_size is None
    assert {key.key: key.detail for key in described.keys}["REAL_DATA_PREFIX"] == "stage.data"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PathError, match=r"There is no env file .*none\.env"):
        import_env_files([tmp_path / "none.env"], {})


def test_the_command_prints_a_recipe_or_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_env(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["zgcm-train", "import-env", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capsys.readouterr()

    monkeypatch.setenv("SHARED_STORAGE_ROOT", "/share")
    monkeypatch.setenv("COLUMNS", "120")
    paths = write(tmp_path, one=FIRST, two=SECOND)
    code, recipe, table = import_env(*paths)
    assert code == 0, table
    assert "updates = 254314" in recipe
    assert "stage.updates" in table
    _, table, _ = import_env(*paths, "--out", tmp_path / "recipe.toml")
    assert (tmp_path / "recipe.toml").read_text() == recipe
    assert "without effect on a constant learning rate" in table
    both = json.loads(import_env(*paths, "--json")[1])
    assert both["recipe"] == recipe
    assert {key["status"] for key in both["keys"]} == {"mapped", "fixed", "left out"}
    assert import_env(tmp_path / "none.env")[0] == 3
    assert import_env(*write(tmp_path, bad=FIRST.replace("muon", "adam")))[0] == 2
    assert import_env(*write(tmp_path, short=FIRST.replace("export TRAIN_ITERS=79473", "")))[0] == 1
