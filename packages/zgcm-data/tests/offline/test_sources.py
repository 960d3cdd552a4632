import gzip
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zgcm_data import engine
from zgcm_data.records import CorpusError, Record
from zgcm_data.sources import collect_default_corpus, read_records
from zgcm_data.sources.docstrings import literal_strings, split_module
from zgcm_data.sources.files import ReadOptions, ReadReport
from zgcm_data.sources.remote import list_remote


def read(path: Path, **options: Any) -> list[Record]:
    return list(read_records(path, ReadOptions(**options), ReadReport()))


def lines(*items: object) -> bytes:
    return b"".join(json.dumps(item, ensure_ascii=False).encode() + b"\n" for item in items)


TWO = ({"id": "a", "text": "one", "source": "s", "category": "code"}, {"id": "b", "text": "two"})


def test_jsonl_plain_gzip_and_zstandard_give_the_same_records(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines(*TWO))
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines(*TWO)))
    with pa.output_stream(str(tmp_path / "x.jsonl.zst"), compression="zstd") as stream:
        stream.write(lines(*TWO))
    results = [read(tmp_path / name) for name in ("x.jsonl", "x.jsonl.gz", "x.jsonl.zst")]
    assert results[0] == results[1] == results[2]
    assert [(r.id, r.text, r.source, r.category) for r in results[0]] == [
        ("a", "one", "s", "code"),
        ("b", "two", "x", "general_text"),
    ]


def test_parquet_with_a_mapped_text_column_and_metadata(tmp_path: Path) -> None:
    pq.write_table(pa.table({"content": ["one", "two"], "stars": [3, 4]}), tmp_path / "x.parquet")
    records = read(tmp_path / "x.parquet", fields={"text": "content"}, category="math")
    assert [(r.text, r.category, r.metadata) for r in records] == [
        ("one", "math", {"stars": 3}),
        ("two", "math", {"stars": 4}),
    ]
    assert len({r.id for r in records}) == 2


def test_folder_of_text_files_takes_category_from_suffix_and_source_from_folder(tmp_path: Path) -> None:
    for name, text in (
        ("lib/a.py", "x = 1\n"),
        ("notes/b.md", "# note"),
        ("c.tex", "$x$"),
        ("photo.png", "no"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {r.id: (r.source, r.category) for r in read(tmp_path)}
    assert found == {
        "lib/a.py": ("lib", "code"),
        "notes/b.md": ("notes", "general_text"),
        "c.tex": (tmp_path.name, "latex"),
    }


def test_unicode_line_separators_inside_a_text_split_nothing(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x85four"
    (tmp_path / "x.jsonl").write_bytes(lines({"text": text}, {"text": "b"}))
    assert [r.text for r in read(tmp_path / "x.jsonl")] == [text, "b"]


FAULTS = [
    (b'{"text": "a"}\n{"text": \n', r"x.jsonl, line 2: not a JSON object", "broken JSON"),
    (b'{"text": "a"}\n[1]\n', r"x.jsonl, line 2: a list where a JSON object must be", "broken JSON"),
    (b'{"text": "a"}\n{"body": "b"}\n', r"x.jsonl, line 2: no field 'text'; .*input.fields", "no text"),
    (b'{"text": "a"}\n{"text": 5}\n', r"x.jsonl, line 2: the text is a int", "no text"),
    (b'{"text": "a"}\n{"text": "\xff"}\n', r"x.jsonl, line 2: not UTF-8 \(byte 10\)", "not UTF-8"),
    (b'{"text": "a"}\n{"text": "\\ud800"}\n', r"x.jsonl, line 2: .*surrogate", "not UTF-8"),
    (
        b'{"id": 7, "text": "a"}\n{"id": "7", "text": "b"}\n',
        r"line 2: id '7' is already that of .*x.jsonl, line 1",
        "two documents with one id",
    ),
]


@pytest.mark.parametrize(("data", "message", "fault"), FAULTS)
def test_bad_document_is_one_clear_error_or_a_counted_skip(
    tmp_path: Path, data: bytes, message: str, fault: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    with pytest.raises(CorpusError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert "skip" in str(caught.value)
    report = ReadReport()
    assert [r.text for r in read_records(path, ReadOptions(skip=True), report)] == ["a"]
    assert report.skipped == {fault: 1}
    assert str(path) in report.examples[fault]


def test_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(CorpusError, match=r"latin.txt: not UTF-8 \(byte 3\)"):
        read(tmp_path)


def test_empty_and_missing_corpora_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CorpusError, match=r"empty.jsonl holds no document"):
        read(tmp_path / "empty.jsonl")
    with pytest.raises(CorpusError, match=r"folder .*folder holds no .jsonl, .parquet or text file"):
        read(tmp_path / "folder")
    with pytest.raises(CorpusError, match=r"nowhere does not exist; check the path"):
        read(tmp_path / "nowhere")


def test_parquet_faults_name_the_file_and_its_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["one"]}), tmp_path / "x.parquet")
    with pytest.raises(CorpusError, match=r"x.parquet has no column 'text' \(it has body\)"):
        read(tmp_path / "x.parquet")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    with pytest.raises(CorpusError, match=r"torn.parquet is not a parquet file"):
        read(tmp_path / "torn.parquet")


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines(*TWO))[:-12])
    with pytest.raises(CorpusError, match=r"x.jsonl.gz cannot be read"):
        read(tmp_path / "x.jsonl.gz")


def test_unknown_category_suggests_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines({"text": "a", "category": "maths"}))
    with pytest.raises(CorpusError, match=r"line 1: unknown category 'maths'; did you mean 'math'"):
        read(tmp_path / "x.jsonl")


def test_documents_without_id_get_one_from_their_content(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines({"text": "a"}, {"text": "b"}, {"text": "a"}))
    (tmp_path / "y.jsonl").write_bytes(lines({"text": "b", "source": "x"}, {"text": "a", "source": "x"}))
    first, second = read(tmp_path / "x.jsonl"), read(tmp_path / "y.jsonl")
    assert {r.text: r.id for r in second} == {r.text: r.id for r in first[:2]}
    assert first[2].id == first[0].id + "+2"


def test_long_docstrings_leave_the_code_and_nothing_else_changes() -> None:
    text = (
        'class A:\n    """Short."""\n\n    def f(self):\n\t"""Long one\n\n\tof two lines."""\n\n    x = 1  \n'
    )
    text = text.replace("\t", "        ")
    module = split_module(text, 10)
    assert module is not None
    assert module.docstrings == ["Long one\n\nof two lines."]
    assert module.code == 'class A:\n    """Short."""\n\n    def f(self):\n        ...\n\n    x = 1  \n'
    assert split_module("def broken(:", 10) is None


def test_pydoc_topics_are_read_without_importing_them() -> None:
    assert literal_strings("topics = {'a': 'one', 'b': 'two' 'three'}") == {"a": "one", "b": "twothree"}


@pytest.mark.slow
def test_default_corpus_is_large_and_varied_and_names_nothing_of_this_machine(tmp_path: Path) -> None:
    sizes = collect_default_corpus(tmp_path / "one")
    assert sum(sizes.values()) >= 20_000_000
    records = read(tmp_path / "one")
    categories: dict[str, set[str]] = {}
    for record in records:
        categories.setdefault(record.category, set()).add(record.source)
    assert set(categories) == {"code", "general_text", "math", "latex"}
    assert sum(map(len, categories.values())) >= 10
    assert not any(r.id.startswith("/") or "site-packages" in r.id or "zgcm" in r.id for r in records)


def test_default_corpus_is_the_same_every_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        collect_default_corpus(tmp_path / name, megabytes=1.5)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_default_corpus_without_any_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import zgcm_data.sources.installation as installation

    monkeypatch.setattr(installation, "find_package", lambda name: None)
    monkeypatch.setattr(installation.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(installation.metadata, "distributions", list)
    with pytest.raises(CorpusError, match="holds no text"):
        collect_default_corpus(tmp_path / "out")


def test_address_is_read_through_daft_like_a_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a", "b"], "text": ["one", "two"]}), tmp_path / "x.parquet")
    remote = list(read_records(f"file://{tmp_path}/x.parquet", ReadOptions(), ReadReport()))
    assert remote == read(tmp_path / "x.parquet")
    with pytest.raises(CorpusError, match=r"nothing.parquet cannot be read .*; check address and access"):
        list(read_records(f"file://{tmp_path}/nothing.parquet", ReadOptions(), ReadReport()))


def test_text_is_composed_of_fields_or_of_code_cut_for_the_middle(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(
        lines({"problem": "1 + 1", "solution": "2"}, {"prefix": "def f(", "middle": "x", "suffix": "): pass"})
    )
    records = read(tmp_path / "x.jsonl", text_fields=("problem", "solution"))
    assert [r.text for r in records] == ["1 + 1\n2", "def f(x): pass"]


@pytest.mark.parametrize(
    "address", ["s3://bucket/a b/*.parquet", "hf://datasets/owner/name", "gs://bucket/x.jsonl"]
)
def test_an_address_reaches_daft_unchanged(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    asked: list[str] = []

    class ReachedError(Exception):
        pass

    def note(path: str, **settings: Any) -> Any:
        asked.append(path)
        raise ReachedError

    for name in ("from_glob_path", "read_parquet", "read_json"):
        monkeypatch.setattr(engine.daft(), name, note)
    with pytest.raises(CorpusError, match="cannot be read"):
        list(read_records(address, ReadOptions(), ReadReport()))
    if not address.startswith("hf://"):
        with pytest.raises(CorpusError, match="cannot be listed"):
            list_remote(address)
    assert set(asked) == {address}


def test_a_store_out_of_reach_is_an_error_within_seconds() -> None:
    """In a process of its own, since Daft keeps the connection of an address for the life of a process."""
    code = "from zgcm_data.sources.remote import list_remote; list_remote('s3://texts/*.jsonl')"
    access = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"), "us-east-1")
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        access["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=os.environ | access, capture_output=True, text=True, timeout=100)
    assert re.search(r"CorpusError: s3://texts/\*.jsonl cannot be listed \(.*Connection refused", done.stderr)
