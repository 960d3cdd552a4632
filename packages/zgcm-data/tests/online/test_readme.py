"""The README's example of loading runs as written, with core dependencies alone."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_example_of_loading_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"```py\n(.*?)```", text.partition("## Loading\n")[2], re.DOTALL)
    assert len(blocks) == 1
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {"__name__": "readme"}
    exec(compile(blocks[0], str(README), "exec"), space)
    assert space["state"] == {"next_row": 24, "digest": space["manifest"].digest}
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 3
