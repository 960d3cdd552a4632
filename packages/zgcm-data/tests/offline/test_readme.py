import re
import tomllib
from pathlib import Path

import pytest

from zgcm_data.recipe import BuildRecipe

README = Path(__file__).parents[2] / "README.md"


def test_example_of_the_readme_runs_as_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], str(README), "exec"), {"__name__": "readme"})
    assert (tmp_path / "data" / "stage2" / "manifest.json").is_file()


def test_recipes_of_the_readme_are_ones() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    pretraining, midtraining = [BuildRecipe.from_dict(tomllib.loads(block)) for block in blocks]
    assert pretraining.stage1.rows == 10000
    assert [stage.name for stage in midtraining.midtrain.stages] == ["16k", "64k", "256k"]
