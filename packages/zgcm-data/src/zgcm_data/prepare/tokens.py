"""Train the tokenizer and encode the pool into one flat file of token ids."""

import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zgcm_data import engine, fim
from zgcm_data.prepare.steps import Steps, file_digest
from zgcm_data.recipe import BuildRecipe, TokenizerRecipe
from zgcm_data.records import CorpusError
from zgcm_data.tokenizer import Tokenizer, library, train_tokenizer

BATCH_CHARACTERS = 4_000_000
STORED = ("id", "document", "source", "category", "start", "tokens")
"""Columns of the table: a part of a longer document has an id of its own."""
Encoded = list[list[NDArray[np.uint32]]]
"""Of each document its parts, of each part its tokens."""


def make_tokenizer(steps: Steps, recipe: BuildRecipe, heldout: dict[str, Any]) -> dict[str, Any]:
    """Write ``tokenizer.json``: a copy of the given one, or one trained on a sample of the pool.

    Args:
        steps: The step runner.
        recipe: The recipe.
        heldout: Result of the held-out step, which leaves the pool.

    Returns:
        Digest, vocabulary size and end-of-document id.
    """
    target, wish = steps.out / "tokenizer.json", recipe.tokenizer

    def work(tell: Any) -> dict[str, Any]:
        if wish.path:
            shutil.copyfile(wish.path, target)
            tokenizer = Tokenizer(target, wish.eos)
        else:
            texts = sample(steps, wish)
            tell(0.3, f"training on {sum(map(len, texts)) / 1e6:.1f} million characters")
            specials = fim.TOKENS if wish.fim_rate else ()
            tokenizer = train_tokenizer(
                texts, target, vocab_size=wish.vocab_size, eos=wish.eos, specials=specials
            )
        return {"sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id}

    given = file_digest(Path(wish.path)) if wish.path else ""
    inputs = {
        "tokenizer": asdict(wish) | {"path": given},
        "pool": "" if wish.path else heldout["key"],
        "library": library().__version__,
    }
    return steps.run("tokenizer", inputs, [target], work)


def sample(steps: Steps, recipe: TokenizerRecipe) -> list[str]:
    """Return training texts for the tokenizer, chosen and ordered by keyed hash."""
    column, lit = engine.daft().col, engine.daft().lit
    pool = engine.read(steps.work / "pool").with_column(
        "place", engine.keyed(column("id"), f"tokenizer:{recipe.seed}")
    )
    pool = pool.with_column("all", lit(0))
    until = engine.running_sum(column("bytes"), partition=("all",), order=("place", "id"))
    chosen = pool.with_column("before", until - column("bytes")).where(column("before") < recipe.sample_bytes)
    texts = engine.read(steps.work / "clean").select("id", "text").join(chosen.select("id", "place"), on="id")
    result: list[str] = texts.sort(["place", "id"]).select("text").to_pydict()["text"]
    return result


def tokenize(
    steps: Steps, recipe: BuildRecipe, heldout: dict[str, Any], tokenizer: dict[str, Any]
) -> dict[str, Any]:
    """Encode every document of the pool into ``work/tokens/ids.bin`` with a table of where each one lies."""
    target = steps.work / "tokens"

    def work(tell: Any) -> dict[str, Any]:
        encoder = DocumentEncoder(
            Tokenizer(steps.out / "tokenizer.json", recipe.tokenizer.eos),
            recipe.tokenizer,
            recipe.max_document_tokens,
        )
        temporary = engine.fresh_folder(target)
        total = heldout["pool"]
        count = write_tokens(
            texts(steps), encoder, temporary, lambda done: tell(done / total, f"{done:,} documents")
        )
        engine.replace_folder(temporary, target)
        stored = engine.read(target).count_rows()
        return {"documents": total, "tokens": count} | (
            {"parts": stored} if recipe.max_document_tokens else {}
        )

    inputs = {"pool": heldout["key"], "tokenizer": tokenizer["sha256"]}
    inputs["fim"] = [recipe.tokenizer.fim_rate, recipe.tokenizer.seed]
    inputs |= {"max_document_tokens": recipe.max_document_tokens} if recipe.max_document_tokens else {}
    return steps.run("tokenize", inputs, [target], work)


def texts(steps: Steps) -> Iterator[Any]:
    """Stream the pool as Arrow batches of (id, text, source, category)."""
    pool = engine.read(steps.work / "pool").select("id")
    frame = engine.read(steps.work / "clean").select("id", "text", "source", "category")
    yield from frame.join(pool, on="id", how="semi").to_arrow_iter()


class DocumentEncoder:
    """Encodes documents, code partly cut for fill-in-the-middle.

    Args:
        tokenizer: The tokenizer.
        recipe: Rate and seed of the cuts.
        limit: Longest document in tokens, its end included; 0 for any length.
    """

    def __init__(self, tokenizer: Tokenizer, recipe: TokenizerRecipe, limit: int = 0) -> None:
        self._tokenizer, self._recipe, self._limit = tokenizer, recipe, limit
        self._controls = [tokenizer.control(token) for token in fim.TOKENS] if recipe.fim_rate else []

    def encode(
        self, names: list[str], categories: list[str], texts: list[str]
    ) -> list[list[NDArray[np.uint32]]]:
        """Return the tokens of each document, a longer one than the limit in several parts."""
        parts = [self._parts(*document) for document in zip(names, categories, texts, strict=True)]
        encoded = iter(self._tokenizer.encode([piece for document in parts for piece in document]))
        joined = [self._joined([next(encoded) for _ in document]) for document in parts]
        return [self._within(*item) for item in zip(texts, parts, joined, strict=True)]

    def _within(
        self, text: str, parts: tuple[str, ...], tokens: NDArray[np.uint32]
    ) -> list[NDArray[np.uint32]]:
        if not self._limit or len(tokens) < self._limit:
            return [tokens]
        if len(parts) > 1:  # a part of a document for fill-in-the-middle would lack its other parts
            tokens = self._tokenizer.encode([text])[0]
        return np.array_split(tokens, -(-len(tokens) // (self._limit - 1)))

    def _parts(self, name: str, category: str, text: str) -> tuple[str, ...]:
        rate = self._recipe.fim_rate if category == "code" else 0.0
        cut = fim.choose_cut(name, len(text), rate, self._recipe.seed) if rate else None
        return cut.parts(text) if cut else (text,)

    def _joined(self, pieces: list[NDArray[np.uint32]]) -> NDArray[np.uint32]:
        if len(pieces) == 1:
            return pieces[0]
        marked = [
            part
            for control, piece in zip(self._controls, pieces, strict=True)
            for part in (np.array([control], dtype=np.uint32), piece)
        ]
        return np.concatenate(marked)


def write_tokens(stream: Iterator[Any], encoder: DocumentEncoder, folder: Path, tell: Any) -> int:
    """Encode a stream of batches; returns the number of tokens."""
    pyarrow = engine.arrow()
    table: dict[str, list[Any]] = {name: [] for name in STORED}
    position = done = 0
    with (folder / "ids.bin").open("wb") as file:
        for part, encoded in ahead(stream, encoder):
            for row, found in zip(
                part.select(["id", "source", "category"]).to_pylist(), encoded, strict=True
            ):
                for number, ids in enumerate(found):
                    file.write(ids.astype("<u4", copy=False).data)
                    name = row["id"] if len(found) == 1 else f"{row['id']}#{number:06d}"
                    stored = (name, row["id"], row["source"], row["category"], position, len(ids))
                    for column, value in zip(STORED, stored, strict=True):
                        table[column].append(value)
                    position += len(ids)
            done += len(encoded)
            tell(done)
    if len(set(table["id"])) < len(table["id"]):
        raise CorpusError(
            "an id of the corpus is that of a part of another document (ID#NUMBER); change that id"
        )
    pyarrow.parquet.write_table(pyarrow.table(table), folder / "part-000000.parquet")
    return position


def ahead(stream: Iterator[Any], encoder: DocumentEncoder) -> Iterator[tuple[Any, Encoded]]:
    """Yield pieces of a stream with their tokens; the next piece is encoded while the last one is used."""

    def encode(part: Any) -> Encoded:
        return encoder.encode(*(part.column(name).to_pylist() for name in ("id", "category", "text")))

    with ThreadPoolExecutor(1) as thread:
        before: tuple[Any, Future[Encoded]] | None = None
        for batch in stream:
            for part in pieces(batch):
                following = part, thread.submit(encode, part)
                if before:
                    yield before[0], before[1].result()
                before = following
        if before:
            yield before[0], before[1].result()


def pieces(batch: Any) -> Iterator[Any]:
    """Cut a batch so that no piece holds much more than a few million characters."""
    lengths = np.cumsum(
        engine.arrow().compute.utf8_length(batch.column("text")).to_numpy(zero_copy_only=False)
    )
    start = 0
    while start < len(lengths):
        base = int(lengths[start - 1]) if start else 0
        stop = max(int(np.searchsorted(lengths, base + BATCH_CHARACTERS)), start + 1)
        yield batch.slice(start, stop - start)
        start = stop


@dataclass(frozen=True)
class TokenStore:
    """Random access to the tokens of the pool.

    Args:
        ids: All token ids, one document after another, on disk.
        place: Document id to (start, tokens).
    """

    ids: NDArray[np.uint32]
    place: dict[str, tuple[int, int]]

    @classmethod
    def open(cls, folder: Path) -> "TokenStore":
        """Open a folder that ``tokenize`` wrote."""
        table = engine.read(folder).select("id", "start", "tokens").to_pydict()
        places = zip(table["start"], table["tokens"], strict=True)
        ids = np.memmap(folder / "ids.bin", dtype="<u4", mode="r")
        return cls(ids, dict(zip(table["id"], places, strict=True)))

    def document(self, name: str) -> NDArray[np.uint32]:
        """Return the tokens of one document."""
        start, count = self.place[name]
        return self.ids[start : start + count]
