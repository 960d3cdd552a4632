"""Recipes: refused when wrong, complete when written, exact in their arithmetic."""

from pathlib import Path

import pytest

from zgcm_testing.tiny_runs import tiny_recipe
from zgcm_train import dump_recipe, load_recipe, make_plan
from zgcm_train.config import Recipe
from zgcm_train.errors import ConfigurationError, MissingSettingError, PathError
from zgcm_train.recipe_file import check_recipe, recipe_names, recipe_text

STAGE = '[[stage]]\nname = "a"\ndata = "x"\nupdates = 1\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def test_t20_token_arithmetic_of_the_published_run() -> None:
    plan = make_plan(load_recipe("zgcm-1"))
    first, second = plan.stages
    assert plan.parameters == 7_392_735_232
    assert (first.tokens, second.tokens) == (1_000_001_765_376, 3_200_010_682_368)
    assert (first.rows, second.rows) == (61_035_264, 195_313_152)
    assert (second.updates, second.first_update, second.last_update) == (254_314, 79_474, 333_787)
    assert plan.tokens == 4_200_012_447_744
    assert plan.tokens_per_update == 12_582_912
    assert plan.accumulation == 8
    assert plan.devices == 192
    assert plan.flops_per_token == pytest.approx(42.731e9, rel=1e-4)
    assert plan.flops_per_token_if_all_full == pytest.approx(53.433e9, rel=1e-4)


@pytest.mark.parametrize("name", recipe_names())
def test_every_built_in_recipe_is_valid_and_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert load_recipe(write(tmp_path, dump_recipe(recipe))) == recipe


def test_t19_unknown_keys_are_refused_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"unknown key optimizer\.weight_decai; did you mean weight_decay\?"
    ):
        load_recipe(write(tmp_path, "[optimizer]\nweight_decai = 0.1\n" + STAGE))
    with pytest.raises(ConfigurationError, match=r"unknown key stage\.0\.update; did you mean updates\?"):
        load_recipe(write(tmp_path, STAGE + "update = 3\n"))
    wrong = {"name": "a", "data": "nowhere", "updates": 0}
    with pytest.raises(ConfigurationError) as caught:
        check_recipe({"model": {"preset": "zgcm-1-tiny"}, "stage": [wrong]}, "r")
    assert "at least 1 item" not in str(caught.value)
    assert "stage.0.updates: Input should be greater than 0 (got 0)" in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"unknown key optimiser; did you mean optimizer\?"):
        load_recipe(write(tmp_path, "[optimiser]\nlr = 1\n" + STAGE))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[schedule]\nmin_lr = 1e-5\n", "no effect when schedule.kind"),
        ('[schedule]\nkind = "warmup_stable_decay"\n', "needs schedule.decay_updates above 0"),
        ("[eval]\ninterval = 5\n", "no effect without eval.heldout"),
        ('[eval]\nheldout = "x"\n', "go together"),
        ("[data]\nglobal_batch = 7\n", "not a multiple of data.micro_batch"),
        ("[data]\nsequence_length = 32768\n", "exceeds model.max_positions"),
        ('[model]\npreset = "zgcm-9"\n', "'zgcm-9' is unknown"),
        ("[model]\nnum_kv_heads = 5\n", "num_kv_heads"),
        ("[optimizer]\nmomentum = 1.5\n", "less than 1"),
        ("[optimizer]\nlr = nan\n", "finite number"),
        ('[optimizer]\nscale = "big"\n', "spectral"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_recipe(write(tmp_path, text + STAGE))
    assert caught.value.exit_code == 2


def test_o10_explicit_zeros_stay(tmp_path: Path) -> None:
    text = "[optimizer]\nlr = 0.0\nweight_decay = 0.0\nmomentum = 0.0\nclip_norm = 0.0\n" + STAGE
    kept = load_recipe(write(tmp_path, text)).optimizer
    assert (kept.lr, kept.weight_decay, kept.momentum, kept.clip_norm) == (0.0, 0.0, 0.0, 0.0)


def test_variables_are_filled_from_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path, STAGE.replace('"x"', '"${ROOT}/${NAME:-shards}"'))
    assert load_recipe(path, environment={"ROOT": "/data"}).stage[0].data == "/data/shards"
    with pytest.raises(MissingSettingError, match="needs the environment variable ROOT") as caught:
        load_recipe(path, environment={})
    assert caught.value.exit_code == 1


def test_overrides_reach_every_section(tmp_path: Path) -> None:
    path = write(tmp_path, STAGE)
    recipe = load_recipe(
        path, ["optimizer.lr=3e-4", "stage.0.updates=9", "run.name=mine", "log.tensorboard=false"]
    )
    assert (recipe.optimizer.lr, recipe.stage[0].updates, recipe.run.name) == (3e-4, 9, "mine")
    assert recipe.log.tensorboard is False
    for wrong in ("optimizer.lr", "=3", "stage.1.updates=9", "stage.updates=2", "run.name.x=1", "log=2"):
        with pytest.raises(ConfigurationError, match=r"--set|valid"):
            load_recipe(path, [wrong])


def test_a_folder_with_the_name_of_a_recipe_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = load_recipe("demo")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert load_recipe("demo") == reference


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(PathError, match="There is no recipe file"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'[run]\nname = "\xe9"\n')
    with pytest.raises(PathError, match="cannot be read as UTF-8"):
        load_recipe(tmp_path / "latin.toml")
    with pytest.raises(ConfigurationError, match="not valid TOML"):
        load_recipe(write(tmp_path, "run = ["))
    with pytest.raises(
        ConfigurationError, match="no recipe 'zgcm-l'; known: demo, zgcm-1; did you mean zgcm-1"
    ):
        recipe_text("zgcm-l")


def test_effective_recipe_is_complete(data: Path) -> None:
    recipe: Recipe = tiny_recipe(data)
    text = dump_recipe(recipe)
    for section in Recipe.model_fields:
        assert f"[{section}]" in text or f"[[{section}]]" in text
    for key in type(recipe.optimizer).model_fields:
        assert f"\n{key} = " in text


def test_plan_warns_when_things_switch_together(data: Path) -> None:
    plan = make_plan(tiny_recipe(data, schedule={"warmup_updates": 6}))
    assert any("data and learning rate switch together" in w for w in plan.warnings)
    assert any("depend on parallel.tp 2" in w for w in make_plan(load_recipe("zgcm-1")).warnings)
    assert len([line for line in plan.precision if line.startswith("precision")]) == 5
