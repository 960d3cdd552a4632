"""The embedded default corpus: real text that this Python installation already holds.

Nothing is imported or downloaded. Python files are parsed, long docstrings become documents of their own
(prose, mathematics or LaTeX) and are cut out of the code, so that no sentence stands in two categories.

| source | category | taken from |
|---|---|---|
| torch-python, numpy-python, sympy-python, stdlib-python | code | modules, long docstrings cut out |
| cpp-headers | code | torch/include |
| torch-docs, numpy-docs, matplotlib-docs, stdlib-docs, daft-docs | general_text | docstrings |
| language-reference | general_text | pydoc_data.topics |
| package-descriptions | general_text | METADATA of every installed distribution but our own |
| package-texts | general_text | .md, .rst and licence files beside them |
| sympy-docs, networkx-docs, mpmath-docs | math | docstrings |
| latex-docs | latex | docstrings of any package that hold LaTeX |
"""

import gc
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from zgcm_data.records import CorpusError, keyed_hash
from zgcm_data.sources.docstrings import Module, literal_strings, long_strings, split_module

Progress = Callable[[str, float, str], None]

CORPUS_VERSION = 1
MIN_DOCUMENT = 200
MAX_DOCUMENT = 48_000
DENSE = 0.15  # once a source of code is full, only files with this part of docstrings are worth parsing
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "testing", "__pycache__", "site-packages", "dist-packages", "idlelib"}
)
LATEX = re.compile(
    r"\\(?:frac|sum|int|mathbf|mathbb|mathrm|mathcal|left|sqrt|text|begin\{)|\.\. math::|:math:`[^`]*[\\_^]"
)

# Part of the whole corpus that each source may fill; they sum to 1.
SHARES = {
    "torch-python": 0.17,
    "stdlib-python": 0.11,
    "cpp-headers": 0.10,
    "sympy-python": 0.05,
    "numpy-python": 0.05,
    "torch-docs": 0.11,
    "numpy-docs": 0.04,
    "stdlib-docs": 0.05,
    "matplotlib-docs": 0.04,
    "daft-docs": 0.02,
    "language-reference": 0.03,
    "package-descriptions": 0.04,
    "package-texts": 0.02,
    "sympy-docs": 0.07,
    "networkx-docs": 0.03,
    "mpmath-docs": 0.01,
    "latex-docs": 0.06,
}
CATEGORY = {name: "code" for name in SHARES if name.endswith("-python")}
CATEGORY |= {"cpp-headers": "code", "latex-docs": "latex"}
CATEGORY |= dict.fromkeys(("sympy-docs", "networkx-docs", "mpmath-docs"), "math")
# package folder -> (source of its code, source of its docstrings)
PACKAGES = {
    "torch": ("torch-python", "torch-docs"),
    "numpy": ("numpy-python", "numpy-docs"),
    "sympy": ("sympy-python", "sympy-docs"),
    "networkx": ("", "networkx-docs"),
    "mpmath": ("", "mpmath-docs"),
    "matplotlib": ("", "matplotlib-docs"),
    "daft": ("", "daft-docs"),
}


@dataclass
class Basket:
    """Collects documents of each source up to its share of the size."""

    limit: float
    documents: dict[str, list[dict[str, str]]] = field(default_factory=lambda: {name: [] for name in SHARES})
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SHARES, 0))

    def full(self, source: str) -> bool:
        """Whether ``source`` (empty: none) needs no more documents."""
        return not source or self.sizes[source] >= self.limit * SHARES[source]

    def add(self, source: str, name: str, text: str) -> None:
        """Add one document unless it is too short, too long or its source is full."""
        size = len(text.encode("utf-8", "replace"))
        if self.full(source) or not MIN_DOCUMENT <= size <= MAX_DOCUMENT:
            return
        category = CATEGORY.get(source, "general_text")
        self.documents[source].append(
            {"id": f"{source}/{name}", "source": source, "category": category, "text": text}
        )
        self.sizes[source] += size


def collect_default_corpus(
    out: Path, progress: Progress | None = None, *, megabytes: float = 28.0
) -> dict[str, int]:
    """Collect the embedded default corpus into ``out``, one JSONL file per source.

    The same environment gives the same bytes, wherever it is installed: names are relative, files are
    visited in the order of a keyed hash of their names, and sources are cut at fixed shares of the size.

    Args:
        out: Folder for the files; created, and replaced file by file.
        progress: Called with (step, fraction, note).
        megabytes: Size to collect, in millions of UTF-8 bytes.

    Returns:
        Bytes of text per source, empty sources left out.

    Raises:
        CorpusError: If this installation holds no text at all.
    """
    basket = Basket(megabytes * 1e6)
    tell = progress or (lambda step, fraction, note: None)
    jobs = [*((name, collect_package) for name in PACKAGES), ("stdlib", collect_stdlib)]
    with parsing():
        for position, (name, job) in enumerate(jobs):
            tell("corpus", position / (len(jobs) + 2), name)
            job(basket, name)
    tell("corpus", len(jobs) / (len(jobs) + 2), "headers and descriptions")
    collect_headers(basket)
    collect_descriptions(basket)
    collect_topics(basket)
    if not any(basket.sizes.values()):
        raise CorpusError("this Python installation holds no text to learn from; name a corpus of your own")
    out.mkdir(parents=True, exist_ok=True)
    for source, documents in basket.documents.items():
        write_jsonl(out / f"{source}.jsonl", documents)
    tell(
        "corpus",
        1.0,
        f"{sum(basket.sizes.values()) / 1e6:.1f} MB from {sum(map(bool, basket.sizes.values()))} sources",
    )
    return {source: size for source, size in basket.sizes.items() if size}


@contextmanager
def parsing() -> Iterator[None]:
    """Parse other people's code quickly and quietly.

    Syntax trees hold no cycles, and looking for some takes as long as parsing; what Python warns of in the
    code of others is not for our users.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if enabled:
            gc.enable()


def collect_package(basket: Basket, name: str) -> None:
    """Collect code and docstrings of one installed package; a missing one is passed over."""
    root = find_package(name)
    if root is not None:
        collect_python(basket, root, name, PACKAGES[name])


def collect_stdlib(basket: Basket, name: str) -> None:
    """Collect code and docstrings of the standard library."""
    collect_python(basket, Path(sysconfig.get_path("stdlib")), name, ("stdlib-python", "stdlib-docs"))


def collect_python(basket: Basket, root: Path, name: str, sources: tuple[str, str]) -> None:
    """Split the Python files below ``root`` into code and docstrings until their sources are full."""
    code, docs = sources
    for path, relative in visit(root, name, (".py",)):
        if basket.full(code) and basket.full(docs):
            return
        text = read_text(path)
        if text is None:
            continue
        long = long_strings(text, MIN_DOCUMENT)
        if basket.full(code) and long < DENSE * len(text):
            continue
        module = split_module(text, MIN_DOCUMENT) if long else Module(text, [])
        if module is None:
            continue
        if code:
            basket.add(code, relative, module.code)
        for position, docstring in enumerate(module.docstrings):
            source = "latex-docs" if LATEX.search(docstring) else docs
            basket.add(source, f"{relative}#{position}", docstring)


def collect_headers(basket: Basket) -> None:
    """Collect C++ headers that PyTorch ships, without the generated operator stubs."""
    root = find_package("torch")
    if root is None:
        return
    for path, relative in visit(root / "include", "include", (".h", ".hpp", ".cuh")):
        if basket.full("cpp-headers"):
            return
        text = None if "/ops/" in relative else read_text(path)
        if text is not None:
            basket.add("cpp-headers", relative, text)


def collect_descriptions(basket: Basket) -> None:
    """Collect long descriptions, licences and notes of installed distributions, our own left out."""
    found: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        name = str(distribution.metadata["Name"] or "").lower()
        if name and not name.startswith("zgcm"):
            found.setdefault(name, distribution)
    for name in sorted(found, key=lambda item: keyed_hash("descriptions", item)):
        _, _, description = (found[name].read_text("METADATA") or "").partition("\n\n")
        basket.add(
            "package-descriptions", name, description or str(found[name].metadata["Description"] or "")
        )
        for file in sorted(found[name].files or [], key=str):
            if file.suffix.lower() in (".md", ".rst") or "license" in file.name.lower():
                text = (
                    None
                    if file.suffix == ".py" or ".." in file.parts
                    else read_text(Path(str(file.locate())))
                )
                basket.add("package-texts", f"{name}/{file}", text or "")


def collect_topics(basket: Basket) -> None:
    """Collect the language reference that ``pydoc`` carries, read without importing it."""
    path = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"
    text = read_text(path) if path.is_file() else None
    for name, topic in sorted(literal_strings(text or "").items()):
        basket.add("language-reference", name, topic)


def find_package(name: str) -> Path | None:
    """Return the folder of an installed package without importing it, or ``None``."""
    for key in ("platlib", "purelib"):
        folder = Path(sysconfig.get_path(key)) / name
        if folder.is_dir():
            return folder
    import importlib.util

    found = importlib.util.find_spec(name)
    places = list(found.submodule_search_locations or []) if found else []
    return Path(places[0]) if places else None


def visit(root: Path, name: str, suffixes: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """Yield (file, stable relative name) below ``root`` in the order of a keyed hash of the name."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [item for item in folders if item not in SKIPPED_FOLDERS and not item.startswith("zgcm")]
        relative = Path(folder).relative_to(root).as_posix()
        names += [f"{relative}/{item}".removeprefix("./") for item in files if item.endswith(suffixes)]
    for item in sorted(names, key=lambda value: (keyed_hash("visit", value), value)):
        yield root / item, f"{name}/{item}"


def read_text(path: Path) -> str | None:
    """Return the text of a UTF-8 file, or ``None`` if it is not one or cannot be read."""
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def write_jsonl(path: Path, documents: list[dict[str, str]]) -> None:
    """Write documents as one JSONL file, atomically."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("w", encoding="utf-8", newline="\n", errors="backslashreplace") as file:
        for document in documents:
            file.write(json.dumps(document, ensure_ascii=False, sort_keys=True) + "\n")
    temporary.replace(path)
