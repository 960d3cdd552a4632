"""The first steps: collect or read the corpus, clean it, deduplicate it."""

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

from zgcm_data import engine
from zgcm_data.clean.plan import INPUTS, clean_frame, funnel
from zgcm_data.clean.profiles import find_profile
from zgcm_data.dedup import decide_duplicates, signature_frame
from zgcm_data.prepare.steps import Steps, file_digest
from zgcm_data.recipe import BuildRecipe, DatasetRecipe
from zgcm_data.records import CorpusError, Record, check_category
from zgcm_data.sources import collect_default_corpus, read_records
from zgcm_data.sources.files import ReadOptions, ReadReport, list_files
from zgcm_data.sources.installation import CORPUS_VERSION
from zgcm_data.sources.remote import is_remote, list_remote

BATCH_BYTES = 16_000_000


def ingest(steps: Steps, recipe: BuildRecipe) -> dict[str, Any]:
    """Bring the corpus into ``work/records`` as one table of raw documents.

    Args:
        steps: The step runner.
        recipe: The recipe.

    Returns:
        The result of the step: what was read and skipped, per data set.
    """
    datasets = inputs_of(steps, recipe)
    files = {name: content_of(path) for name, (path, _) in datasets.items()}
    target = steps.work / "records"

    def work(tell: Any) -> dict[str, Any]:
        reports = {name: ReadReport() for name in datasets}
        seen: dict[str, str] = {}
        parts = (read_records(path, how, reports[name], seen) for name, (path, how) in datasets.items())
        write_records(chain.from_iterable(parts), target, tell)
        return totals(reports)

    settings = {name: asdict(how) for name, (_, how) in datasets.items()}
    return steps.run("read", {"files": files, "settings": settings}, [target], work)


def inputs_of(steps: Steps, recipe: BuildRecipe) -> dict[str, tuple[Path | str, ReadOptions]]:
    """Return every input by name, with how it is read; collects the default corpus where none is named.

    Raises:
        ValueError: If both a path and data sets are named, or a profile is unknown.
    """
    wish = recipe.input
    skip = wish.on_error == "skip"
    if wish.datasets:
        if wish.path:
            raise ValueError("input.path and input.datasets exclude each other; keep one of them")
        return {
            name: (place(item.path), options_of(item, skip, name))
            for name, item in sorted(wish.datasets.items())
        }
    path = place(wish.path) if wish.path else collected(steps, recipe)
    alone = DatasetRecipe(str(path), wish.category, wish.fields, wish.text_fields, wish.profile)
    return {"input": (path, options_of(alone, skip, ""))}


def options_of(dataset: DatasetRecipe, skip: bool, source: str) -> ReadOptions:
    """Join what a recipe and the profile it names say about a data set; the recipe comes first."""
    profile = find_profile(dataset.profile)
    category = dataset.category or profile.category
    return ReadOptions(
        category=check_category(category, "input") if category else "",
        skip=skip,
        fields={**profile.fields, **dataset.fields},
        text_fields=tuple(dataset.text_fields) or profile.text_fields,
        profile=dataset.profile,
        source=source,
    )


def place(path: str) -> Path | str:
    """Return a local path as such and an address as it is."""
    return path if is_remote(path) else Path(path)


def content_of(path: Path | str) -> dict[str, Any]:
    """Return the files of an input with the digests (sizes, for an address) that decide its content."""
    if is_remote(str(path)):
        return dict(list_remote(str(path)))
    root = Path(path)
    return {
        (file.relative_to(root).as_posix() if root.is_dir() else file.name): file_digest(file)
        for file in list_files(root)
    }


def totals(reports: dict[str, ReadReport]) -> dict[str, Any]:
    """Sum the reports of all inputs and keep each where there are several."""
    skipped: dict[str, int] = {}
    for report in reports.values():
        for fault, count in report.skipped.items():
            skipped[fault] = skipped.get(fault, 0) + count
    result: dict[str, Any] = {
        "documents": sum(report.documents for report in reports.values()),
        "bytes": sum(report.bytes for report in reports.values()),
        "skipped": skipped,
        "examples": {fault: text for report in reports.values() for fault, text in report.examples.items()},
    }
    if len(reports) > 1:
        result["datasets"] = {name: asdict(report) for name, report in reports.items()}
    return result


def collected(steps: Steps, recipe: BuildRecipe) -> Path:
    """Collect the embedded default corpus into ``corpus/`` and return that folder."""
    target = steps.out / "corpus"

    def work(tell: Any) -> dict[str, Any]:
        megabytes = recipe.input.default_megabytes
        sizes = collect_default_corpus(
            target, lambda _, fraction, note: tell(fraction, note), megabytes=megabytes
        )
        return {"bytes": sizes}

    inputs = {"megabytes": recipe.input.default_megabytes, "environment": environment()}
    steps.run("corpus", inputs, [target], work)
    return target


def environment() -> dict[str, Any]:
    """Return what decides the content of the embedded corpus: versions of Python and of all distributions."""
    found = {(str(item.metadata["Name"]).lower(), item.version) for item in metadata.distributions()}
    names = sorted(f"{name}=={version}" for name, version in found if not name.startswith("zgcm"))
    return {"python": platform.python_version(), "distributions": names, "corpus": CORPUS_VERSION}


def write_records(records: Iterator[Record], target: Path, tell: Any) -> None:
    """Write records as a parquet folder, a few megabytes at a time."""
    pyarrow = engine.arrow()
    schema = pyarrow.schema([(name, pyarrow.large_string()) for name in INPUTS])
    batch: list[Record] = []
    size = total = 0
    with engine.FolderWriter(target, schema) as writer:
        for record in records:
            batch.append(record)
            size += len(record.text)
            if size >= BATCH_BYTES:
                writer.write(record_table(batch, schema))
                total += size
                batch, size = [], 0
                tell(0.5, f"{total / 1e6:.0f} million characters")
        if batch:
            writer.write(record_table(batch, schema))


def record_table(records: list[Record], schema: Any) -> Any:
    """Return records as an Arrow table with the columns ``INPUTS``."""
    columns = {name: [getattr(item, name) for item in records] for name in INPUTS if name != "metadata"}
    columns["metadata"] = [json.dumps(item.metadata, sort_keys=True, default=str) for item in records]
    return engine.arrow().table(columns, schema=schema)


def clean(steps: Steps, recipe: BuildRecipe, read: dict[str, Any]) -> dict[str, Any]:
    """Clean every document; returns the funnel of decisions and reasons.

    Raises:
        CorpusError: If nothing is left to train on.
    """
    target = steps.work / "clean"

    def work(tell: Any) -> dict[str, Any]:
        engine.write(clean_frame(engine.read(steps.work / "records"), recipe.clean), target)
        result = funnel(target)
        if not any(row["decision"] == "keep" for row in result["decisions"]):
            raise CorpusError(
                f"cleaning keeps no document (reasons: {result['reasons']}); see clean.* in the recipe"
            )
        return result

    return steps.run("clean", {"read": read["key"], "clean": asdict(recipe.clean)}, [target], work)


def trainable(steps: Steps, recipe: BuildRecipe) -> Any:
    """Return the cleaned documents that may be trained on."""
    wanted = ["keep", "review"] if recipe.clean.include_review else ["keep"]
    return engine.read(steps.work / "clean").where(engine.daft().col("decision").is_in(wanted))


def deduplicate(steps: Steps, recipe: BuildRecipe, cleaned: dict[str, Any]) -> dict[str, Any]:
    """Decide which documents stay; writes ``work/signatures`` and ``work/duplicates``."""
    signatures, decisions = steps.work / "signatures", steps.work / "duplicates"
    column = engine.daft().col

    def work(tell: Any) -> dict[str, Any]:
        engine.write(signature_frame(trainable(steps, recipe), recipe.dedup), signatures)
        tell(0.5, "clusters")
        engine.write(decide_duplicates(engine.read(signatures), recipe.dedup).sort("id"), decisions)
        counts = engine.read(decisions).groupby("kind").agg(column("id").count().alias("documents"))
        found = {row["kind"] or "kept": row["documents"] for row in engine.rows(counts)}
        return {name: found.get(name, 0) for name in ("kept", "exact", "near")}

    inputs = {"clean": cleaned["key"], "dedup": asdict(recipe.dedup), "review": recipe.clean.include_review}
    return steps.run("dedup", inputs, [signatures, decisions], work)
