import re
from pathlib import Path

import zgcm_model

README = Path(__file__).parents[1] / "README.md"


def test_every_python_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert names["loss"].isfinite()


def test_all_is_true():
    assert all(hasattr(zgcm_model, exported) for exported in zgcm_model.__all__)
    assert len(set(zgcm_model.__all__)) == len(zgcm_model.__all__)
