"""Anyone's WebDataset reader reads our shards, and we refuse a WebDataset that would lose rows."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from zgcm_data import ManifestHeader, Row, ShardError, ShardSet, open_shards, write_shards
from zgcm_data.shards import read_webdataset


def test_plain_webdataset_reads_the_shards(shards25: ShardSet) -> None:
    """The webdataset library alone, from the paths alone."""
    import webdataset

    paths = [str(shards25.folder / shard.name) for shard in shards25.manifest.shards]
    samples = list(webdataset.WebDataset(paths, shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [f"{row:012d}" for row in range(25)]
    for sample, row in zip(samples, shards25, strict=True):
        assert np.frombuffer(sample["tokens.bin"], "<u4").tolist() == row.tokens.tolist()
        assert np.frombuffer(sample["docs.bin"], "<i8").reshape(-1, 4).tolist() == row.docs.tolist()


def test_a_set_read_as_plain_webdataset_gives_the_same_set(
    tmp_path: Path, shards25: ShardSet, header: Callable[..., ManifestHeader]
) -> None:
    paths = [shards25.folder / shard.name for shard in shards25.manifest.shards]
    manifest = write_shards(tmp_path, read_webdataset(paths), header(32, seed=0), rows_per_shard=7)
    assert manifest.digest == shards25.manifest.digest


def foreign(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


TOKENS = np.arange(5, dtype="<u4").tobytes()
DOCS = np.array([[0, 0, 0, 0]], "<i8").tobytes()


def sample(key: str) -> list[tuple[str, bytes]]:
    return [(f"{key}.tokens.bin", TOKENS), (f"{key}.docs.bin", DOCS)]


def test_keys_without_dots_are_read_in_order(tmp_path: Path) -> None:
    path = foreign(tmp_path / "a.tar", [*sample("b"), *sample("a"), *sample("part/a")])
    rows = list(read_webdataset([path]))
    assert [row.tokens.tolist() for row in rows] == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("key", ["doc.1", "v1.0/doc", "a.b.c", ".hidden"])
def test_d08_a_dotted_key_is_refused_by_name(tmp_path: Path, key: str) -> None:
    path = foreign(tmp_path / "a.tar", [*sample("first"), *sample(key)])
    with pytest.raises(ShardError) as error:
        list(read_webdataset([path]))
    assert f"member {key}.tokens.bin is not KEY.tokens.bin" in str(error.value)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([*sample("a"), *sample("b"), *sample("a")], "key 'a' of member a.tokens.bin comes twice"),
        (
            [sample("a")[0], sample("b")[0], sample("a")[1], sample("b")[1]],
            "sample 'a' is not tokens.bin directly followed by docs.bin (found b.tokens.bin)",
        ),
        ([sample("a")[1], sample("a")[0]], "sample 'a' is not tokens.bin directly followed by docs.bin"),
        ([sample("a")[0]], "(found the end of the archive)"),
        ([*sample("a"), sample("b")[1]], "sample 'b' is not tokens.bin"),
        ([*sample("a"), ("a.txt", b"x")], "member a.txt is not KEY.tokens.bin"),
        ([("a.tokens.bin", b"123"), ("a.docs.bin", DOCS)], "3 bytes of tokens"),
    ],
)
def test_a_foreign_set_is_refused_by_name_rather_than_losing_rows(
    tmp_path: Path, members: list[tuple[str, bytes]], message: str
) -> None:
    path = foreign(tmp_path / "a.tar", members)
    with pytest.raises(ShardError) as error:
        list(read_webdataset([path]))
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_key_that_comes_again_in_another_shard_is_refused(tmp_path: Path) -> None:
    paths = [foreign(tmp_path / name, sample("a")) for name in ("a.tar", "b.tar")]
    with pytest.raises(ShardError, match=r"b\.tar: key 'a' of member"):
        list(read_webdataset(paths))


def test_what_is_no_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"not a tar archive" * 100)
    with pytest.raises(ShardError, match=r"a\.tar is not a whole tar archive"):
        list(read_webdataset([tmp_path / "a.tar"]))


def test_a_folder_of_foreign_shards_is_no_shard_set(tmp_path: Path) -> None:
    foreign(tmp_path / "shard-000000.tar", sample("a"))
    with pytest.raises(ShardError, match="is not a finished shard set"):
        open_shards(tmp_path)


def test_rows_from_elsewhere_are_checked_like_any_other(
    tmp_path: Path, header: Callable[..., ManifestHeader]
) -> None:
    path = foreign(tmp_path / "a.tar", sample("a"))
    rows: list[Row] = list(read_webdataset([path]))
    with pytest.raises(ValueError, match=r"row 0 cannot be written: tokens are uint32 \[5\]"):
        write_shards(tmp_path / "set", rows, header(32))
