"""The shard set on disk: deterministic, resumable, read by anyone, and named when broken."""

import errno
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zgcm_data import (
    Loader,
    ManifestHeader,
    Row,
    ShardError,
    ShardSet,
    open_shards,
    verify_shards,
    write_shards,
)
from zgcm_data.shards import inspect


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def rows(tmp_path_factory: pytest.TempPathFactory, shard_set: Callable[..., ShardSet]) -> list[Row]:
    return list(shard_set(tmp_path_factory.mktemp("source"), 20))


def test_rows_come_back_as_they_went_in(
    tmp_path: Path, rows: list[Row], header: Callable[..., ManifestHeader]
) -> None:
    manifest = write_shards(tmp_path, rows, header(32), rows_per_shard=6)
    shards = open_shards(tmp_path)
    assert len(shards) == manifest.rows == 20
    assert [shard.rows for shard in manifest.shards] == [6, 6, 6, 2]
    for wanted, found in zip(rows, shards, strict=True):
        assert (found.tokens.dtype, found.docs.dtype) == (np.uint32, np.int64)
        assert found.tokens.tolist() == wanted.tokens.tolist()
        assert found.docs.tolist() == wanted.docs.tolist()
    with pytest.raises(IndexError, match="row 20 is not among the 20 rows"):
        shards[20]


def test_the_manifest_holds_the_contract(shards25: ShardSet) -> None:
    values = json.loads((shards25.folder / "manifest.json").read_text())
    assert values["format"] == "zgcm-shards/1"
    assert (values["rows"], values["sequence_length"], values["tokens"]) == (25, 32, 25 * 32)
    assert {"vocab_size", "eos_id", "tokenizer_sha256", "packing", "stage", "parents"} <= set(values)
    assert values["order"] == {"kind": "shuffle", "seed": 0, "metric": None}
    assert sum(source["tokens"] for source in values["sources"]) == 25 * 32
    for shard in values["shards"]:
        data = (shards25.folder / shard["name"]).read_bytes()
        assert (shard["bytes"], shard["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    fields = {key: value for key, value in values.items() if key != "digest"}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    assert values["digest"] == hashlib.sha256(text.encode()).hexdigest()


def test_the_same_rows_give_the_same_bytes(
    tmp_path: Path, rows: list[Row], header: Callable[..., ManifestHeader]
) -> None:
    for name in ("a", "b"):
        write_shards(tmp_path / name, iter(rows), header(32), rows_per_shard=6)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_members_are_plain_ustar(tmp_path: Path, shards25: ShardSet) -> None:
    """Rebuild a shard with the standard library; it must agree to the byte."""
    first = shards25.manifest.shards[0]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for number in range(first.rows):
            row = shards25[number]
            for suffix, data in (("tokens.bin", row.tokens.tobytes()), ("docs.bin", row.docs.tobytes())):
                info = tarfile.TarInfo(f"{number:012d}.{suffix}")
                info.size, info.mode = len(data), 0o644
                archive.addfile(info, io.BytesIO(data))
    ours = (shards25.folder / first.name).read_bytes()
    assert buffer.getvalue()[: len(ours)] == ours


class Killed(RuntimeError):
    pass


def _dying(rows: list[Row], after: int) -> Any:
    for number, row in enumerate(rows):
        if number == after:
            raise Killed
        yield row


def test_an_interrupted_writer_goes_on_and_keeps_finished_shards(
    tmp_path: Path, rows: list[Row], header: Callable[..., ManifestHeader]
) -> None:
    write_shards(tmp_path / "whole", rows, header(32), rows_per_shard=6)
    with pytest.raises(Killed):
        write_shards(tmp_path / "set", _dying(rows, 14), header(32), rows_per_shard=6)
    with pytest.raises(ShardError, match="not a finished shard set"):
        open_shards(tmp_path / "set")
    kept = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "set").glob("shard-00000[01].tar")}
    assert len(kept) == 2
    write_shards(tmp_path / "set", rows, header(32), rows_per_shard=6)
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")
    assert kept == {name: (tmp_path / "set" / name).stat().st_mtime_ns for name in kept}


def test_a_full_disk_names_the_file_and_loses_no_finished_shard(
    tmp_path: Path, rows: list[Row], header: Callable[..., ManifestHeader], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.fsync, []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=r"No space left on device; make room and run again") as error:
        write_shards(tmp_path, rows, header(32), rows_per_shard=6)
    assert error.value.filename == str(tmp_path / "shard-000002.tar")
    kept = (tmp_path / "shard-000000.tar").stat().st_mtime_ns
    write_shards(tmp_path, rows, header(32), rows_per_shard=6)
    assert verify_shards(tmp_path) == []
    assert (tmp_path / "shard-000000.tar").stat().st_mtime_ns == kept


def test_other_rows_replace_a_set_and_leave_nothing_of_it(
    tmp_path: Path, rows: list[Row], header: Callable[..., ManifestHeader]
) -> None:
    write_shards(tmp_path / "set", rows, header(32), rows_per_shard=6)
    changed = [*rows[:3], rows[10], *rows[4:8]]
    write_shards(tmp_path / "set", changed, header(32), rows_per_shard=6)
    write_shards(tmp_path / "fresh", changed, header(32), rows_per_shard=6)
    assert contents(tmp_path / "set") == contents(tmp_path / "fresh")
    assert verify_shards(tmp_path / "set") == []


def test_a_half_replaced_set_cannot_be_opened(
    tmp_path: Path, rows: list[Row], header: Callable[..., ManifestHeader]
) -> None:
    write_shards(tmp_path, rows, header(32), rows_per_shard=6)
    with pytest.raises(Killed):
        write_shards(tmp_path, _dying(rows[::-1], 8), header(32), rows_per_shard=6)
    with pytest.raises(ShardError, match="not a finished shard set"):
        open_shards(tmp_path)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda r: Row(r.tokens[:-1], r.docs), r"expected uint32 \[33\]"),
        (lambda r: Row(r.tokens.astype(np.int64), r.docs), "tokens are int64"),
        (lambda r: Row(np.full(33, 1000, np.uint32), r.docs), "not below the vocabulary size 1000"),
        (lambda r: Row(r.tokens, r.docs[:0]), "n >= 1"),
        (lambda r: Row(r.tokens, r.docs + 1), "do not ascend from 0"),
        (lambda r: Row(r.tokens, np.array([[0, 3, 0, 0]])), "not all among the 3 declared sources"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(
    tmp_path: Path, rows: list[Row], header: Callable[..., ManifestHeader], fault: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        write_shards(tmp_path, [rows[0], fault(rows[1])], header(32))
    assert "row 1 cannot be written" in str(error.value)


def test_no_rows_are_refused(tmp_path: Path, header: Callable[..., ManifestHeader]) -> None:
    with pytest.raises(ValueError, match="less than one row"):
        write_shards(tmp_path, [], header(32))


def test_inspect_shows_shares(shards25: ShardSet) -> None:
    values = inspect(shards25.folder)
    assert (values["rows"], values["shards"]) == (25, 4)
    assert sum(source["observed_share"] for source in values["sources"]) == pytest.approx(1.0)


def _truncate(folder: Path) -> None:
    os.truncate(folder / "shard-000001.tar", 2048)


def _remove(folder: Path) -> None:
    (folder / "shard-000001.tar").unlink()


def _remove_index(folder: Path) -> None:
    (folder / "shard-000001.idx").unlink()


def _alter_token(folder: Path) -> None:
    with (folder / "shard-000001.tar").open("r+b") as file:
        file.seek(512 + 8)
        file.write(b"\x09\x00\x00\x00")


def _swap_shards(folder: Path) -> None:
    """Two shards of equal size change places: same names, other bytes."""
    a, b = folder / "shard-000001.tar", folder / "shard-000002.tar"
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


def _stale_index(folder: Path) -> None:
    path = folder / "shard-000001.idx"
    path.write_bytes(path.read_bytes().replace(b"512 ", b"513 ", 1))


def _wrong_docs(folder: Path) -> None:
    with (folder / "shard-000001.tar").open("r+b") as file:
        file.seek(512 * 3)
        file.write((5).to_bytes(8, "little"))


def _edit_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"stage": "one"', '"stage": "two"'))


def _cut_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 100)


def _stray(folder: Path) -> None:
    (folder / "shard-000009.tar").write_bytes(b"")


_FAULTS: dict[str, tuple[Callable[[Path], None], str, str | None]] = {
    "truncated": (_truncate, "shard-000001.tar: has SHA-256", "has 2048 bytes, the manifest says"),
    "missing": (_remove, "shard-000001.tar: is missing", "shard-000001.tar is missing"),
    "index missing": (_remove_index, "shard-000001.idx: is missing", "shard-000001.idx is missing"),
    "altered": (_alter_token, "shard-000001.tar: has SHA-256", None),
    "swapped": (_swap_shards, "shard-000001.tar: has SHA-256", "the member of row 7 has another key"),
    "stale index": (_stale_index, "shard-000001.idx: has SHA-256", "shard-000001.idx is stale"),
    "wrong docs": (_wrong_docs, "shard-000001.tar: has SHA-256", "row 7 has an impossible docs table"),
    "edited manifest": (_edit_manifest, "manifest was edited", "manifest was edited"),
    "cut manifest": (_cut_manifest, "is not JSON", "is not JSON"),
    "stray": (_stray, "shard-000009.tar: is not in the manifest", None),
}


@pytest.mark.parametrize("name", _FAULTS)
@pytest.mark.parametrize("workers", [0, 1])
def test_faults_are_named_and_no_row_is_skipped(
    tmp_path: Path, shard_set: Callable[..., ShardSet], name: str, workers: int
) -> None:
    from zgcm_data import LoaderOptions

    break_it, found, raised = _FAULTS[name]
    shard_set(tmp_path, 21)
    assert verify_shards(tmp_path) == []
    break_it(tmp_path)
    assert any(found in str(problem) for problem in verify_shards(tmp_path))
    if raised is None:
        return
    read: list[int] = []

    def read_all() -> None:
        for batch in Loader(open_shards(tmp_path), 1, options=LoaderOptions(workers=workers)):
            read.extend(batch.rows.tolist())

    with pytest.raises(ShardError, match=raised):
        read_all()
    assert read == list(range(len(read)))


def test_a_shard_cut_while_it_is_open_is_an_error_not_a_crash(
    tmp_path: Path, shard_set: Callable[..., ShardSet]
) -> None:
    shards = shard_set(tmp_path, 21)
    assert shards[8].tokens.shape == (33,)
    _truncate(tmp_path)
    with pytest.raises(ShardError, match="truncated or altered"):
        shards[8]


def test_d25_bytes_replaced_under_the_same_name_are_rejected_by_content(
    tmp_path: Path, shard_set: Callable[..., ShardSet]
) -> None:
    old, new = shard_set(tmp_path / "old", 21), shard_set(tmp_path / "new", 21, seed=4)
    assert old.manifest.digest != new.manifest.digest
    for name in ("shard-000001.tar", "shard-000001.idx"):
        (tmp_path / "old" / name).write_bytes((tmp_path / "new" / name).read_bytes())
    found = {problem.file for problem in verify_shards(tmp_path / "old")}
    assert "shard-000001.tar" in found


def test_verify_counts_what_the_manifest_says(tmp_path: Path, shard_set: Callable[..., ShardSet]) -> None:
    """A manifest whose digest is right but whose counts are not."""
    import dataclasses

    from zgcm_data.shards.manifest import Manifest, save_manifest

    manifest = shard_set(tmp_path, 21).manifest
    names = [field.name for field in dataclasses.fields(ManifestHeader)]
    plain = ManifestHeader(**{name: getattr(manifest, name) for name in names})
    wrong = (dataclasses.replace(manifest.sources[0], tokens=1), *manifest.sources[1:])
    save_manifest(tmp_path, Manifest.build(plain, wrong, manifest.shards))
    (problem,) = verify_shards(tmp_path)
    assert "source source-0: tokens 1, counted" in str(problem)
