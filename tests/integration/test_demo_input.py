"""The demo on input that cannot be trained on; in this process, as nothing is trained."""

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from zgcm_train.cli import main


def demo(out: Path, *arguments: object) -> tuple[Any, str]:
    """Run the command and return its exit code and what it said."""
    errors = io.StringIO()
    with (
        contextlib.redirect_stdout(errors),
        contextlib.redirect_stderr(errors),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "argv", ["zgcm-train", "demo", "--out", str(out), *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    return end.value.code, errors.getvalue()


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "nothing", "nothing"),
        (lambda p: p, "holds no .jsonl, .parquet or text file"),
        (lambda p: write_lines(p / "a.jsonl", '{"id": "1", "body": "text"}'), "text"),
        (lambda p: write_lines(p / "a.jsonl", '{"text": "good"}', '{"text": '), "line 2"),
        (lambda p: write_bytes(p / "a.txt", b"caf\xe9 au lait"), "UTF-8"),
        (lambda p: write_lines(p / "a.jsonl", '{"text": "too small a corpus to train on"}'), "."),
    ],
    ids=["missing", "empty", "no-text-column", "broken-line", "not-utf-8", "too-small"],
)
def test_a_wrong_corpus_gets_one_sentence(tmp_path: Path, make: Any, message: str) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    code, errors = demo(tmp_path / "out", "--corpus", make(folder))
    assert code == 3, errors
    assert "Traceback" not in errors
    last = errors.strip().splitlines()[-1]
    assert last.startswith("zgcm-train: ")
    assert re.search(message, last), last


def write_bytes(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, errors = demo(tmp_path / "file" / "out")
    assert code == 3
    assert "file" in errors
    assert "Traceback" not in errors
