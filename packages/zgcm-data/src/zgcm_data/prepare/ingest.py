"""The first steps: collect or read the corpus, clean it, deduplicate it."""

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from zgcm_data import engine
from zgcm_data.clean.plan import INPUTS, clean_frame, funnel
from zgcm_data.dedup import decide_duplicates, signature_frame
from zgcm_data.prepare.steps import Steps, file_digest
from zgcm_data.recipe import BuildRecipe
from zgcm_data.records import CorpusError, Record
from zgcm_data.sources import collect_default_corpus, read_records
from zgcm_data.sources.files import ReadOptions, ReadReport, list_files
from zgcm_data.sources.installation import CORPUS_VERSION

BATCH_BYTES = 16_000_000


def ingest(steps: Steps, recipe: BuildRecipe) -> dict[str, Any]:
    """Bring the corpus into ``work/records`` as one table of raw documents.

    Args:
        steps: The step runner.
        recipe: The recipe.

    Returns:
        The result of the step: what was read and skipped.
    """
    path = Path(recipe.input.path) if recipe.input.path else collected(steps, recipe)
    options = ReadOptions(recipe.input.category, recipe.input.on_error == "skip", recipe.input.fields)
    files = {file.relative_to(path).as_posix(): file_digest(file) for file in list_files(path)}
    target = steps.work / "records"

    def work(tell: Any) -> dict[str, Any]:
        report = ReadReport()
        write_records(read_records(path, options, report), target, tell)
        return asdict(report)

    return steps.run("read", {"files": files, "input": asdict(recipe.input) | {"path": ""}}, [target], work)


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
    temporary = engine.fresh_folder(target)
    schema = pyarrow.schema([(name, pyarrow.large_string()) for name in INPUTS])
    batch: list[Record] = []
    size = total = 0
    with pyarrow.parquet.ParquetWriter(temporary / "part-000000.parquet", schema) as writer:
        for record in records:
            batch.append(record)
            size += len(record.text)
            if size >= BATCH_BYTES:
                writer.write_table(record_table(batch, schema))
                total += size
                batch, size = [], 0
                tell(0.5, f"{total / 1e6:.0f} million characters")
        if batch:
            writer.write_table(record_table(batch, schema))
    engine.replace_folder(temporary, target)


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
