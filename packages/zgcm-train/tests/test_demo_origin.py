"""A demo that has trained is left alone where its text would be another: refused at once, and nothing is changed."""

import json
from pathlib import Path

import pytest

from zgcm_train.demo.demo import run_demo
from zgcm_train.demo.origin import FILE, check_origin, describe_origin, differences
from zgcm_train.errors import ConfigurationError


def trained(out: Path, origin: dict[str, str], corpus: Path | None) -> None:
    """Make what a demo leaves behind that has trained: its settings, its origin, a checkpoint and data."""
    (out / "checkpoints" / "step-000000002").mkdir(parents=True)
    (out / "data" / "work" / "state").mkdir(parents=True)
    (out / "data" / "work" / "state" / "corpus.json").write_text("{}")
    (out / "demo.json").write_text(json.dumps({"minutes": 1.0, "corpus": str(corpus) if corpus else None}))
    (out / FILE).write_text(json.dumps(origin))


def content(out: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in out.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_another_environment_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    began = describe_origin(None) | {"Python": "3.10.1", "numpy": "1.0", "only-there": "2.0"}
    trained(tmp_path, began, None)
    before = content(tmp_path)
    with pytest.raises(ConfigurationError, match=r"Python 3\.10\.1 -> .*only-there 2\.0 -> absent") as caught:
        run_demo(tmp_path, minutes=1.0)
    assert "go on from the environment that began it, or choose another --out" in str(caught.value)
    assert content(tmp_path) == before


def test_changed_text_of_the_user_is_refused_by_the_files_name(tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    corpus.mkdir()
    (corpus / "a.txt").write_text("text")
    trained(out, describe_origin(corpus), corpus)
    (corpus / "a.txt").write_text("other text")
    (corpus / "b.txt").write_text("more")
    before = content(out)
    with pytest.raises(ConfigurationError, match=r"a\.txt \w{12} -> \w{12}; b\.txt absent -> \w{12}\."):
        run_demo(out, minutes=1.0, corpus=corpus)
    assert content(out) == before


def test_before_the_first_checkpoint_the_text_may_change(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (tmp_path / FILE).write_text("{}")
    (corpus / "a.txt").write_text("text")
    check_origin(tmp_path, corpus)
    assert json.loads((tmp_path / FILE).read_text()) == describe_origin(corpus)


def test_a_folder_of_a_version_that_noted_nothing_goes_on(tmp_path: Path) -> None:
    trained(tmp_path, {}, None)
    (tmp_path / FILE).unlink()
    check_origin(tmp_path, None)
    assert json.loads((tmp_path / FILE).read_text()) == describe_origin(None)


def test_equal_origins_do_not_differ() -> None:
    origin = describe_origin(None)
    assert origin["Python"]
    assert differences(origin, dict(origin)) == []
