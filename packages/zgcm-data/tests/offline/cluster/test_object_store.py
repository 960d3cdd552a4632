"""Addresses of an object store: read over HTTP from a server that the test starts, changed by nobody on the way."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from zgcm_data.build import BuildResult, build
from zgcm_data.records import CorpusError
from zgcm_data.sources.files import ReadOptions, ReadReport, read_records
from zgcm_data.sources.remote import list_remote

Documents = list[dict[str, Any]]


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    """A bucket named ``texts``, and the environment that leads to it.

    One server for all tests, since Daft keeps the connection of an address for the life of a process.
    """
    monkeypatch = pytest.MonkeyPatch()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="texts")
    yield client
    server.stop()
    monkeypatch.undo()


def lines_of(documents: Documents) -> bytes:
    return "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in documents).encode()


def test_documents_of_a_bucket_give_the_digests_of_the_same_documents_on_disk(
    store: Any, tmp_path: Path, documents: Documents, make_recipe: Callable[..., Any], built: BuildResult
) -> None:
    store.put_object(Bucket="texts", Key="corpus/one.jsonl", Body=lines_of(documents[::2]))
    store.put_object(Bucket="texts", Key="corpus/two.jsonl", Body=lines_of(documents[1::2]))
    recipe = make_recipe(Path("unused"), input={"path": "s3://texts/corpus/*.jsonl"})
    assert build(recipe, tmp_path / "out").report["digests"] == built.report["digests"]
    steps = {step["step"]: step["skipped"] for step in build(recipe, tmp_path / "out").steps}
    assert steps["read"]
    store.put_object(Bucket="texts", Key="corpus/two.jsonl", Body=lines_of(documents[3::2]))
    changed = {step["step"]: step["skipped"] for step in build(recipe, tmp_path / "out").steps}
    assert not changed["read"]


def test_files_of_a_bucket_are_listed_with_their_sizes(store: Any) -> None:
    store.put_object(Bucket="texts", Key="a/x.jsonl", Body=b'{"text": "one"}\n')
    assert list_remote("s3://texts/a/*.jsonl") == {"s3://texts/a/x.jsonl": 16}
    (record,) = read_records("s3://texts/a/x.jsonl", ReadOptions(category="web"), ReadReport())
    assert (record.text, record.source, record.category) == ("one", "x", "web")


@pytest.mark.parametrize("address", ["s3://texts/nothing/*.jsonl", "s3://no-such-bucket/*.jsonl"])
def test_what_is_not_in_the_store_is_named(store: Any, address: str) -> None:
    with pytest.raises(CorpusError, match=r"cannot be listed \(.+\); check address and access"):
        list_remote(address)
