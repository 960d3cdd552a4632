import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zgcm_data.build import BuildResult, build
from zgcm_data.recipe import BuildRecipe

# These need more than the extra "prepare": zgcm-data[ray], and a server that stands in for an object store.
NEEDS = {"cluster/test_ray.py": "ray", "cluster/test_object_store.py": "moto"}
collect_ignore = [path for path, package in NEEDS.items() if not importlib.util.find_spec(package)]

Document = dict[str, Any]

SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "is")]


def made_words(random_: random.Random, count: int, rare: float) -> list[str]:
    """Words of two to five syllables; ``rare`` moves from a small common stock to long rare ones."""
    common = ["".join(pair) for pair in zip(SYLLABLES, SYLLABLES[7:], strict=False)][:60]
    words = []
    for _ in range(count):
        if random_.random() < rare:
            words.append("".join(random_.choices(SYLLABLES, k=random_.randint(3, 5))))
        else:
            words.append(random_.choice(common))
    return words


def made_prose(random_: random.Random, rare: float) -> str:
    sentences = []
    for _ in range(random_.randint(8, 20)):
        sentences.append(" ".join(made_words(random_, random_.randint(6, 14), rare)).capitalize() + ".")
    return " ".join(sentences)


def made_code(random_: random.Random) -> str:
    lines = []
    for _ in range(random_.randint(4, 10)):
        name, one, two = made_words(random_, 3, 0.7)
        lines += [f"def {name}({one}):", f"    if {one}:", f"\treturn {two}", ""]
    return "\n".join(lines)


def made_math(random_: random.Random) -> str:
    parts = [made_prose(random_, 0.2)[:300]]
    parts += [
        f"x^{random_.randint(2, 99)} + {random_.randint(1, 999)} y = {random_.randint(1, 9999)}"
        for _ in range(9)
    ]
    return "\n".join(parts)


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    """A made corpus of three categories and four sources, without duplicates."""
    random_ = random.Random(5)
    made = [("novels", "general_text", made_prose(random_, i / 120)) for i in range(120)]
    made += [("letters", "general_text", made_prose(random_, 0.3)) for _ in range(40)]
    made += [("programs", "code", made_code(random_)) for _ in range(80)]
    made += [("exercises", "math", made_math(random_)) for _ in range(60)]
    return [
        {"id": f"{source}-{number:03d}", "source": source, "category": category, "text": text}
        for number, (source, category, text) in enumerate(made)
    ]


@pytest.fixture(scope="session")
def write_corpus() -> Callable[[Path, list[Document]], Path]:
    """Write documents as one JSONL file."""

    def write(path: Path, items: list[Document]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items), encoding="utf-8"
        )
        return path

    return write


@pytest.fixture(scope="session")
def make_recipe() -> Callable[..., BuildRecipe]:
    """A recipe for the made corpus; keyword arguments replace sections."""

    def make(path: Path, **sections: Any) -> BuildRecipe:
        data: dict[str, Any] = {
            "sequence_length": 64,
            "rows_per_shard": 50,
            "input": {"path": str(path)},
            "heldout": {"bytes": 1500},
            "tokenizer": {"vocab_size": 600},
            "stage1": {"rows": 120},
            "stage2": {"rows": 200},
        }
        return BuildRecipe.from_dict(data | sections)

    return make


@pytest.fixture(scope="session")
def built(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[Document],
    write_corpus: Callable[[Path, list[Document]], Path],
    make_recipe: Callable[..., BuildRecipe],
) -> BuildResult:
    """One finished build of the made corpus, shared by tests that only read it."""
    folder = tmp_path_factory.mktemp("built")
    return build(make_recipe(write_corpus(folder / "corpus.jsonl", documents)), folder / "out")
