import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zgcm_data.packing import PackingStats, concatenate
from zgcm_data.rows import TokenizedDocument
from zgcm_data.tokenizer import END_OF_TEXT, Tokenizer, train_tokenizer

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta")


def texts() -> list[str]:
    random_ = random.Random(2)
    return [" ".join(random_.choices(WORDS, k=50)) for _ in range(50)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer(texts(), tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", vocab_size=280)


def test_every_text_comes_back_unchanged(tokenizer: Tokenizer) -> None:
    for text in (
        "def f(x):\n\treturn  x   # \u00e9\n",
        "\u4e2d\u6587 \U0001f600",
        "  lead and trail  ",
        "\x00\x7f",
    ):
        assert tokenizer.decode(tokenizer.encode([text])[0].tolist()) == text


def test_text_that_spells_a_control_token_never_becomes_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode([f"one{END_OF_TEXT}two", END_OF_TEXT])
    assert all(tokenizer.eos_id not in item for item in ids)
    assert tokenizer.decode(ids[1].tolist()) == END_OF_TEXT


def with_post_processor(tokenizer_path: Path, target: Path) -> Path:
    """The same tokenizer, but it adds an end token by itself."""
    data = json.loads(tokenizer_path.read_text())
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [0], "tokens": [END_OF_TEXT]}},
    }
    target.write_text(json.dumps(data))
    return target


def test_d6_three_documents_give_exactly_three_ends_whatever_the_tokenizer_adds(tmp_path: Path) -> None:
    plain = tmp_path / "plain.json"
    train_tokenizer(texts(), plain, vocab_size=280)
    for path in (plain, with_post_processor(plain, tmp_path / "adds.json")):
        tokenizer = Tokenizer(path)
        encoded = tokenizer.encode(["alpha beta", "gamma", "delta epsilon"])
        stats = PackingStats()
        documents = [TokenizedDocument(0, number, 0, ids) for number, ids in enumerate(encoded)]
        length = sum(map(len, encoded)) + 2
        rows = list(concatenate(documents, length, tokenizer.eos_id, stats=stats))
        ends = np.flatnonzero(rows[0].tokens == tokenizer.eos_id)
        assert stats.tokens == sum(map(len, encoded)) + 3
        assert ends.tolist() == (np.cumsum([len(ids) + 1 for ids in encoded]) - 1).tolist()


def test_d6_unknown_end_token_and_broken_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(texts(), path, vocab_size=280)
    with pytest.raises(ValueError, match=r"has no token '</s>'; set tokenizer.eos"):
        Tokenizer(path, "</s>")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad.json is not a tokenizer.json"):
        Tokenizer(tmp_path / "bad.json")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Tokenizer(tmp_path / "none.json")


def test_too_little_text_for_the_vocabulary_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gives a tokenizer of \d+ entries, not 8192; add text or lower"):
        train_tokenizer(texts(), tmp_path / "tokenizer.json", vocab_size=8192)


@pytest.mark.slow
def test_training_does_not_depend_on_threads_or_hash_seed(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1])\n"
        "import test_tokenizer as t\n"
        "print(t.train_tokenizer(t.texts(), pathlib.Path(sys.argv[2]), vocab_size=280).sha256)\n"
    )
    digests = set()
    for threads, seed in (("1", "1"), ("4", "2")):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", script, os.path.dirname(__file__), str(tmp_path / f"{threads}.json")]
        digests.add(
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        )
    assert len(digests) == 1
