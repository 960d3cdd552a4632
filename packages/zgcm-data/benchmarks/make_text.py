"""Make a corpus of any size, the same bytes every time: prose of a Zipf vocabulary, mutated code, formulas.

Real text of this size cannot be shipped, and copies of a small corpus would all be duplicates. Prose is drawn
from half a million made words, each document with a topic of its own; code is built from functions of the
standard library with their names replaced document by document; five documents in a hundred repeat an earlier
one, two to the byte and three with some words changed, so that deduplication has something to find.

Run with: python make_text.py OUT --megabytes 100
"""

import argparse
import itertools
import json
import keyword
import re
import string
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

WORDS, TOPIC_WORDS, NAMES = 500_000, 2_000, 200_000
PART_BYTES = 64_000_000
NAME = re.compile(r"\b[A-Za-z_]{4,}\b")
KEPT = frozenset([*keyword.kwlist, "print", "range", "list", "dict", "tuple"])
Document = tuple[str, str, str]


def made_words(rng: np.random.Generator, count: int) -> list[str]:
    """Different words of one to five syllables, short ones first, as frequent words are short."""
    letters = [c + v for c in string.ascii_lowercase for v in ("a", "e", "i", "o", "u", "an", "er", "is", "")]
    words: dict[str, None] = {}
    while len(words) < count:
        size = 1 + min(4, int(np.log10(len(words) + 1)))
        words["".join(letters[i] for i in rng.integers(len(letters), size=size + int(rng.integers(2))))] = (
            None
        )
    return list(words)


class Prose:
    """Paragraphs whose words follow a Zipf law, a tenth of them from the document's topic."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.words = np.array(made_words(rng, WORDS), dtype=object)
        self._bounds = np.cumsum(1 / np.arange(2, WORDS + 2) ** 1.02)

    def make(self, rng: np.random.Generator) -> str:
        count = int(np.clip(rng.lognormal(6.0, 0.9), 40, 20_000))
        ids = np.searchsorted(self._bounds, rng.random(count) * self._bounds[-1])
        topical = rng.random(count) < 0.1
        ids[topical] = (rng.integers(WORDS) + rng.integers(TOPIC_WORDS, size=int(topical.sum()))) % WORDS
        words, place, sentences = self.words[np.minimum(ids, WORDS - 1)].tolist(), 0, []
        while place < count:
            size = int(rng.integers(5, 30))
            end = "\n\n" if rng.random() < 0.15 else " "
            sentences.append(" ".join(words[place : place + size]).capitalize() + "." + end)
            place += size
        return "".join(sentences).strip() + "\n"


class Code:
    """Files put together from top-level blocks of the standard library, with names replaced."""

    def __init__(self, rng: np.random.Generator) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(file for file in library.glob("*.py") if file.stat().st_size < 200_000)
        text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
        blocks = re.split(r"\n(?=def |class |@)", text)
        self._blocks = [block for block in blocks if 200 < len(block) < 6000]
        parts = made_words(rng, 3000)
        pairs = rng.integers(len(parts), size=(NAMES, 2)).tolist()
        self._names = [f"{parts[one]}_{parts[two]}" for one, two in pairs]

    def make(self, rng: np.random.Generator) -> str:
        chosen = rng.integers(len(self._blocks), size=int(rng.integers(1, 8)))
        text = "\n\n".join(self._blocks[i] for i in chosen)
        found = sorted(set(NAME.findall(text)) - KEPT)
        renamed = rng.integers(NAMES, size=len(found)).tolist()
        names = {old: self._names[new] for old, new in zip(found, renamed, strict=True)}
        return NAME.sub(lambda match: names.get(match[0], match[0]), text)


def formulas(prose: Prose, rng: np.random.Generator) -> str:
    """Made exercises: a sentence, then equations."""
    lines = [prose.make(rng)[:300]]
    for _ in range(int(rng.integers(5, 40))):
        a, b, c, d = rng.integers(1, 10_000, size=4).tolist()
        lines.append(f"$$ {a} x^{{{b % 9}}} + \\frac{{{b}}}{{{c}}} y = {d} $$")
    return "\n".join(lines)


def altered(text: str, rng: np.random.Generator) -> str:
    """The same text with one word in two hundred changed: a near duplicate."""
    words = text.split(" ")
    for place in rng.integers(len(words), size=max(1, len(words) // 200)).tolist():
        words[place] = f"changed{place}"
    return " ".join(words)


def documents(seed: int) -> Iterator[Document]:
    """Yield (source, category, text) without end."""
    rng = np.random.default_rng(seed)
    prose, code = Prose(rng), Code(rng)
    earlier: list[Document] = []
    while True:
        kind = rng.random()
        if earlier and kind < 0.05:
            source, category, text = earlier[int(rng.integers(len(earlier)))]
            made = (source, category, text if kind < 0.02 else altered(text, rng))
        elif kind < 0.65:
            made = (f"prose-{int(rng.integers(3))}", "general_text", prose.make(rng))
        elif kind < 0.93:
            made = ("programs", "code", code.make(rng))
        else:
            made = ("exercises", "math", formulas(prose, rng))
        if len(earlier) < 2000:
            earlier.append(made)
        else:
            earlier[int(rng.integers(2000))] = made
        yield made


def write_corpus(folder: Path, megabytes: float, seed: int = 0) -> int:
    """Write JSONL files and return the UTF-8 bytes of their texts."""
    folder.mkdir(parents=True, exist_ok=True)
    stream, total, number = documents(seed), 0, 0
    for part in itertools.count():
        written = 0
        with (folder / f"part-{part:03d}.jsonl").open("w", encoding="utf-8") as file:
            while written < PART_BYTES and total < megabytes * 1e6:
                source, category, text = next(stream)
                line = {"id": f"d{number:08d}", "source": source, "category": category, "text": text}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                written += len(text.encode())
                total, number = total + len(text.encode()), number + 1
                if total >= megabytes * 1e6:
                    return total
    raise AssertionError("itertools.count ended")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=float, default=100.0)
    arguments = parser.parse_args()
    print(f"{write_corpus(arguments.out, arguments.megabytes):,} bytes")
