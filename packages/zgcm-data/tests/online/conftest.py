"""Small documents and shard sets for the tests of loading."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from zgcm_data import (
    ManifestHeader,
    OrderInfo,
    ShardSet,
    SourceInfo,
    TokenizedDocument,
    best_fit,
    concatenate,
    open_shards,
    write_shards,
)

VOCAB, EOS = 1000, 7


def make_documents(
    count: int, *, seed: int = 0, longest: int = 60, sources: int = 3
) -> list[TokenizedDocument]:
    """Random documents of 1 to ``longest`` tokens, none of which is the end-of-document id."""
    rng = np.random.default_rng(seed)
    made = []
    for ordinal in range(count):
        tokens = rng.integers(8, VOCAB, size=rng.integers(1, longest + 1)).astype(np.uint32)
        made.append(TokenizedDocument(int(rng.integers(sources)), ordinal, 0, tokens))
    return made


def make_header(
    sequence_length: int, *, sources: int = 3, packing: str = "concatenate", seed: int = 5, eos_id: int = EOS
) -> ManifestHeader:
    return ManifestHeader(
        sequence_length=sequence_length,
        vocab_size=VOCAB,
        eos_id=eos_id,
        tokenizer_sha256="t" * 64,
        packing=packing,
        stage="one",
        order=OrderInfo("shuffle", seed),
        sources=tuple(SourceInfo(i, f"source-{i}", "code", 1 / sources) for i in range(sources)),
    )


def make_set(
    folder: Path,
    rows: int,
    *,
    sequence_length: int = 32,
    rows_per_shard: int = 7,
    packing: str = "concatenate",
    seed: int = 0,
    longest: int = 60,
) -> ShardSet:
    """Write and open a set of exactly ``rows`` rows."""
    pack = concatenate if packing == "concatenate" else best_fit
    documents = make_documents(rows * sequence_length, seed=seed, longest=longest)
    packed = list(pack(documents, sequence_length, EOS))
    assert len(packed) >= rows
    header = make_header(sequence_length, packing=packing, seed=seed)
    write_shards(folder, packed[:rows], header, rows_per_shard=rows_per_shard)
    return open_shards(folder)


@pytest.fixture(scope="session")
def documents() -> Callable[..., list[TokenizedDocument]]:
    return make_documents


@pytest.fixture(scope="session")
def header() -> Callable[..., ManifestHeader]:
    return make_header


@pytest.fixture(scope="session")
def shard_set() -> Callable[..., ShardSet]:
    return make_set


@pytest.fixture(scope="session")
def shards25(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """25 rows of 32 inputs in 4 shards."""
    return make_set(tmp_path_factory.mktemp("shards25"), 25)


@pytest.fixture(scope="module")
def small_steps() -> Iterator[None]:
    """Make the loader look up 6 rows and read 2 at a time, so that small sets have many seams."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zgcm_data.loader.fields.BLOCK_ROWS", 6)
        patch.setattr("zgcm_data.loader.fields.PIECE_TOKENS", 64)
        yield
