"""One function opens shards and Megatron datasets alike, and training from either is the same."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zgcm_data import (
    DatasetFacts,
    IndexedRows,
    Ledger,
    Loader,
    LoaderOptions,
    ManifestHeader,
    ShardError,
    ShardSet,
    open_dataset,
    read_ledger,
)
from zgcm_data.megatron import to_megatron, write_indexed
from zgcm_data.megatron_facts import write_sidecar

pytestmark = pytest.mark.usefixtures("small_steps")

COMPLETE = DatasetFacts(
    sequence_length=16, vocab_size=1000, eos_id=7, tokenizer_sha256="t" * 64, source="web"
)


@pytest.fixture
def pair(tmp_path: Path, shard_set: Callable[..., ShardSet]) -> tuple[ShardSet, IndexedRows]:
    """A set of three sources, and the Megatron dataset made from it."""
    shards = shard_set(tmp_path / "set", 40)
    to_megatron(shards, shards.manifest, tmp_path / "mega" / "text")
    rows = open_dataset(tmp_path / "mega" / "text")
    assert isinstance(rows, IndexedRows)
    return shards, rows


def test_rows_of_the_prefix_are_those_of_the_shards_documents_and_sources_included(
    pair: tuple[ShardSet, IndexedRows],
) -> None:
    shards, rows = pair
    assert len(rows) == len(shards) == 40
    for number in range(40):
        assert rows[number].tokens.tolist() == shards[number].tokens.tolist()
        assert rows[number].docs.tolist() == shards[number].docs.tolist()
    same = (
        "sequence_length",
        "rows",
        "tokens",
        "vocab_size",
        "eos_id",
        "tokenizer_sha256",
        "sources",
        "stage",
    )
    for name in same:
        assert getattr(rows.manifest, name) == getattr(shards.manifest, name), name
    assert shards.manifest.digest in rows.manifest.parents


@given(longest=st.integers(1, 90), length=st.integers(1, 40), micro=st.integers(1, 3), isolate=st.booleans())
@settings(max_examples=25, deadline=None)
def test_batches_and_counts_are_the_same_for_any_documents(
    tmp_path_factory: pytest.TempPathFactory,
    shard_set: Callable[..., ShardSet],
    longest: int,
    length: int,
    micro: int,
    isolate: bool,
) -> None:
    folder = tmp_path_factory.mktemp("pair")
    shards = shard_set(folder / "set", 10, sequence_length=length, longest=longest)
    to_megatron(shards, shards.manifest, folder / "text")
    rows = open_dataset(folder / "text")
    assert rows.manifest.sources == shards.manifest.sources
    options = LoaderOptions(isolate_documents=isolate, remainder="pad")
    loaders = [Loader(source, micro, micro_batch=micro, options=options) for source in (rows, shards)]
    for found, wanted in zip(*loaders, strict=True):
        for name in type(found).__slots__:
            assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name


def test_training_from_a_prefix_resumes_exactly_and_fills_the_ledger(
    tmp_path: Path, pair: tuple[ShardSet, IndexedRows]
) -> None:
    shards, rows = pair
    records = {}
    for name, source in (("shards", shards), ("prefix", rows)):
        ledger = Ledger(tmp_path / f"{name}.jsonl", stage="one", manifest=source.manifest)
        state, seen = Loader(source, 4).state_dict(), []
        for step, dp_size in enumerate((1, 2, 4, 1), 1):
            loaders = [Loader(source, 4, rank, dp_size) for rank in range(dp_size)]
            for loader in loaders:
                loader.load_state_dict(state)
                stream = iter(loader)
                for _ in range(loader.accumulation):
                    batch = next(stream)
                    ledger.add(batch)
                    seen += batch.rows.tolist()
            state = loaders[0].state_dict()
            ledger.write(step=step, global_rows=4 * step, global_tokens=4 * step * 32)
        assert sorted(seen) == list(range(16))
        records[name] = [
            {key: value for key, value in record.items() if key != "digest"}
            for record in read_ledger(tmp_path / f"{name}.jsonl")
        ]
    assert records["prefix"] == records["shards"]
    assert sum(source["documents"] for source in records["prefix"][0]["sources"]) > 0


def test_a_folder_opens_as_shards_and_either_file_names_the_prefix(
    tmp_path: Path, pair: tuple[ShardSet, IndexedRows]
) -> None:
    shards, rows = pair
    assert isinstance(open_dataset(shards.folder), ShardSet)
    for ending in (".bin", ".idx"):
        opened = open_dataset(str(tmp_path / "mega" / f"text{ending}"))
        assert opened.manifest.digest == rows.manifest.digest


def test_a_dataset_that_moved_keeps_its_digest(tmp_path: Path, pair: tuple[ShardSet, IndexedRows]) -> None:
    os.rename(tmp_path / "mega", tmp_path / "elsewhere")
    assert open_dataset(tmp_path / "elsewhere" / "text").manifest.digest == pair[1].manifest.digest


def test_a_prefix_can_be_cut_at_another_length(tmp_path: Path, pair: tuple[ShardSet, IndexedRows]) -> None:
    shards, rows = pair
    longer = open_dataset(tmp_path / "mega" / "text", DatasetFacts(sequence_length=64))
    assert len(longer) == 20
    assert longer.manifest.digest != rows.manifest.digest
    joined = np.concatenate([shards[0].tokens, shards[1].tokens[1:]])
    assert longer[0].tokens.tolist() == joined.tolist()
    assert sum(source.tokens for source in longer.manifest.sources) == 20 * 64


def test_facts_make_up_for_a_missing_sidecar_and_missing_ones_are_named(
    tmp_path: Path, documents: Any, header: Callable[..., ManifestHeader]
) -> None:
    write_indexed(tmp_path / "a", [np.append(d.tokens, 7) for d in documents(40)], vocab_size=1000)
    with pytest.raises(
        ValueError, match=r"vocab_size, eos_id, tokenizer_sha256, source are not known; write"
    ):
        open_dataset(tmp_path / "a", DatasetFacts(sequence_length=16))
    given_facts = open_dataset(tmp_path / "a", COMPLETE)
    assert [source.name for source in given_facts.manifest.sources] == ["web"]
    write_sidecar(tmp_path / "a", header(16, sources=1))
    by_sidecar = open_dataset(tmp_path / "a")
    assert [row.tokens.tolist() for row in by_sidecar] == [row.tokens.tolist() for row in given_facts]


@pytest.mark.parametrize("place", ["set", "mega/text"])
@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (DatasetFacts(vocab_size=999), "has vocab_size 1000, but 999 was asked for"),
        (DatasetFacts(eos_id=8), "has eos_id 7, but 8 was asked for"),
        (DatasetFacts(tokenizer_sha256="u"), "has tokenizer_sha256 t+, but u was asked for"),
    ],
)
def test_a_dataset_that_says_otherwise_is_refused(
    tmp_path: Path, pair: tuple[ShardSet, IndexedRows], place: str, facts: DatasetFacts, message: str
) -> None:
    with pytest.raises(ShardError, match=message):
        open_dataset(tmp_path / place, facts)


def test_shards_have_one_length(tmp_path: Path, pair: tuple[ShardSet, IndexedRows]) -> None:
    with pytest.raises(ShardError, match="has sequence_length 32, but 16 was asked for"):
        open_dataset(tmp_path / "set", DatasetFacts(sequence_length=16))


def test_what_is_neither_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="is neither the folder of a shard set nor the prefix"):
        open_dataset(tmp_path / "nothing")
    with pytest.raises(ShardError, match=r"manifest.json is missing"):
        open_dataset(tmp_path)


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("idx", r"text\.idx is missing or not the file that .*text\.zgcm\.json was written for"),
        ("zgcm.docs", r"text\.zgcm\.docs is missing or not the file"),
        ("zgcm.json", "is not JSON"),
    ],
)
def test_an_altered_file_is_named(
    tmp_path: Path, pair: tuple[ShardSet, IndexedRows], ending: str, message: str
) -> None:
    path = tmp_path / "mega" / f"text.{ending}"
    changed = bytearray(path.read_bytes())
    changed[-9] ^= 255
    path.write_bytes(changed)
    with pytest.raises(ShardError, match=message):
        open_dataset(tmp_path / "mega" / "text")


def test_altered_tokens_are_found_by_the_checksum(tmp_path: Path, pair: tuple[ShardSet, IndexedRows]) -> None:
    path = tmp_path / "mega" / "text.bin"
    assert open_dataset(path, checksum=True).manifest.digest == pair[1].manifest.digest
    changed = bytearray(path.read_bytes())
    changed[5] ^= 1
    path.write_bytes(changed)
    with pytest.raises(ShardError, match=r"text\.bin has SHA-256 .* its sidecar says"):
        open_dataset(path, checksum=True)


@pytest.mark.parametrize("change", ["format", "field", "sources"])
def test_a_sidecar_of_another_shape_is_refused(
    tmp_path: Path, pair: tuple[ShardSet, IndexedRows], change: str
) -> None:
    path = tmp_path / "mega" / "text.zgcm.json"
    values = json.loads(path.read_text())
    if change == "format":
        values["format"] = "other/1"
    elif change == "field":
        del values["header"]["eos_id"]
    else:
        values["header"]["sources"] = values["header"]["sources"][:1]
    path.write_text(json.dumps(values))
    with pytest.raises(ShardError, match=r"is not of the format|do not fit|name sources outside"):
        open_dataset(tmp_path / "mega" / "text")


def test_a_table_for_other_documents_is_refused(tmp_path: Path, pair: tuple[ShardSet, IndexedRows]) -> None:
    path = tmp_path / "mega" / "text.zgcm.docs"
    path.write_bytes(path.read_bytes()[:-24])
    header = json.loads((tmp_path / "mega" / "text.zgcm.json").read_text())["header"]
    assert len(header["sources"]) == 3
    write_sidecar(tmp_path / "mega" / "text", _header(pair[0]))
    with pytest.raises(ShardError, match=r"does not describe \d+ documents"):
        open_dataset(tmp_path / "mega" / "text")


def _header(shards: ShardSet) -> ManifestHeader:
    from zgcm_data.megatron_facts import header_of

    return header_of(shards.manifest)
