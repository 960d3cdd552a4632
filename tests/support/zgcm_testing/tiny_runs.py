"""A small run: two shard sets, a held-out set, a tokenizer and a recipe that trains on them in seconds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from zgcm_data import ManifestHeader, OrderInfo, SourceInfo, TokenizedDocument, concatenate, write_shards
from zgcm_eval import HeldoutDocument, HeldoutSet, freeze_heldout
from zgcm_train import Recipe
from zgcm_train.files import sha256_file
from zgcm_train.recipe_file import check_recipe

EOS = 256
VOCABULARY = 257
SENTENCES = (
    "the cat sat on the mat and looked at the rain ",
    "def add(a, b):\n    return a + b\n",
    "if x = 2 then x * x = 4 and x + x = 4 ",
)


def write_byte_tokenizer(path: Path) -> None:
    """Write a tokenizer whose ids are bytes, with the end-of-document token after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))


def documents(tokenizer: Tokenizer, seed: int) -> Iterator[TokenizedDocument]:
    """Yield documents of three sources for ever, the same for the same seed."""
    random = np.random.default_rng(seed)
    ordinals = [0, 0, 0]
    while True:
        source = int(random.integers(3))
        text = SENTENCES[source] * int(random.integers(1, 6)) + str(random.integers(1000))
        tokens = np.array(tokenizer.encode(text).ids, np.uint32)
        yield TokenizedDocument(source, ordinals[source], 0, tokens)
        ordinals[source] += 1


def write_tiny_stage(folder: Path, tokenizer_file: Path, *, rows: int, length: int, seed: int) -> None:
    """Write a shard set of exactly ``rows`` rows of ``length`` positions."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    names = ("prose", "code", "sums")
    header = ManifestHeader(
        sequence_length=length,
        vocab_size=VOCABULARY,
        eos_id=EOS,
        tokenizer_sha256=sha256_file(tokenizer_file),
        packing="concatenate",
        stage=folder.name,
        order=OrderInfo("shuffle", seed=seed),
        sources=tuple(SourceInfo(i, name, name, 1 / 3) for i, name in enumerate(names)),
    )
    stream = concatenate(documents(tokenizer, seed), length, EOS)
    write_shards(
        folder, (row for row, _ in zip(stream, range(rows), strict=False)), header, rows_per_shard=32
    )


def write_tiny_data(folder: Path, *, length: int = 32, rows: int = 96) -> None:
    """Write ``tokenizer.json``, ``stage1``, ``stage2`` and ``heldout`` below ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_byte_tokenizer(folder / "tokenizer.json")
    for seed, name in enumerate(("stage1", "stage2")):
        write_tiny_stage(folder / name, folder / "tokenizer.json", rows=rows, length=length, seed=seed)
    sets = [
        HeldoutSet(name, (HeldoutDocument(f"{name}/0", text * 3),))
        for name, text in zip(("prose", "code", "sums"), SENTENCES, strict=True)
    ]
    freeze_heldout(folder / "heldout", sets)


def tiny_recipe(folder: Path, /, **changes: dict[str, Any]) -> Recipe:
    """Return a recipe over ``write_tiny_data``: a real ZGCM of 17 thousand parameters, 6 updates per stage.

    Args:
        folder: where the data are.
        **changes: per section, keys that differ.
    """
    values: dict[str, Any] = {
        "run": {"name": "tiny"},
        "model": {
            "preset": "zgcm-1-tiny",
            "vocab_size": VOCABULARY + 7,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 8,
            "max_positions": 64,
        },
        "optimizer": {"lr": 0.01, "dtype": "float32"},
        "schedule": {"warmup_updates": 2},
        "data": {"sequence_length": 32, "global_batch": 8, "micro_batch": 4},
        "checkpoint": {"interval": 2, "keep": 2},
        "log": {"interval": 1, "tensorboard": False},
        "eval": {"heldout": str(folder / "heldout"), "tokenizer": str(folder / "tokenizer.json")},
        "stage": [
            {"name": "first", "data": str(folder / "stage1"), "updates": 6},
            {"name": "second", "data": str(folder / "stage2"), "updates": 6},
        ],
    }
    for section, keys in changes.items():
        values[section] = values.get(section, {}) | keys
    return check_recipe(values, "tiny")
