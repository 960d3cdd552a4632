"""What training must not hold: passages of evaluation texts, and the frozen validation sets."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zgcm_data import engine
from zgcm_data.dedup import exclude
from zgcm_data.dedup.contamination import contaminated, passage_index
from zgcm_data.prepare.ingest import content_of, trainable
from zgcm_data.prepare.steps import Steps, digest, write_bytes, write_json
from zgcm_data.recipe import BuildRecipe, DecontaminateRecipe, HeldoutRecipe
from zgcm_data.records import CorpusError
from zgcm_data.sources.files import ReadOptions, ReadReport, read_records

FORMAT = "zgcm-heldout/1"


def decontaminate(steps: Steps, recipe: BuildRecipe, dedup: dict[str, Any]) -> dict[str, Any]:
    """List the documents that hold passages of evaluation texts, in ``work/contaminated``.

    Args:
        steps: The step runner.
        recipe: The recipe.
        dedup: Result of deduplication.

    Returns:
        Numbers of evaluation texts and of contaminated documents.
    """
    target, wish = steps.work / "contaminated", recipe.decontaminate

    def work(tell: Any) -> dict[str, Any]:
        texts = evaluation_texts(wish)
        index = passage_index(texts, wish.ngram)
        documents = trainable(steps, recipe).join(survivors(steps), on="id", how="semi")
        if not texts:  # nothing to look for, so no text needs to be read
            documents = documents.limit(0)
        engine.write(contaminated(documents, index, wish.min_shared).sort("id"), target)
        count = engine.read(target).count_rows()
        return {"texts": len(texts), "too_short": index.too_short, "documents": count}

    files = [content_of(Path(path)) for path in wish.paths]
    inputs = {"dedup": dedup["key"], "files": files, "settings": asdict(wish) | {"paths": []}}
    return steps.run("decontaminate", inputs, [target], work)


def evaluation_texts(wish: DecontaminateRecipe) -> dict[str, str]:
    """Read the evaluation texts by id."""
    options = ReadOptions(text_fields=tuple(wish.text_fields))
    seen: dict[str, str] = {}
    found = (read_records(Path(path), options, ReadReport(), seen) for path in wish.paths)
    return {record.id: record.text for records in found for record in records}


def survivors(steps: Steps) -> Any:
    """Return the ids that deduplication keeps."""
    return engine.read(steps.work / "duplicates").where(engine.daft().col("kind") == "").select("id")


def clean_documents(steps: Steps) -> Any:
    """Return the ids that deduplication keeps and that hold no passage of an evaluation text."""
    return survivors(steps).join(engine.read(steps.work / "contaminated"), on="id", how="anti")


def hold_out(steps: Steps, recipe: BuildRecipe, clean_of: dict[str, Any]) -> dict[str, Any]:
    """Freeze a validation set per domain and list what training must do without because of it.

    Writes ``heldout/``, ``work/excluded`` (training documents that nearly hold a held-out one) and
    ``work/pool`` (the documents left for training, numbered within their source).

    Args:
        steps: The step runner.
        recipe: The recipe.
        clean_of: Result of the step before, decontamination or the exclusion of earlier builds.

    Returns:
        Domains, digest and the number of documents left out.
    """
    folder, excluded, pool = steps.out / "heldout", steps.work / "excluded", steps.work / "pool"

    def work(tell: Any) -> dict[str, Any]:
        kept = clean_documents(steps)
        if recipe.exclude_builds:
            kept = kept.join(engine.read(steps.work / "earlier"), on="id", how="anti")
        documents = (
            trainable(steps, recipe).select("id", "source", "category", "bytes").join(kept, on="id").collect()
        )
        chosen = choose(documents, recipe.heldout)
        result = freeze(steps, chosen, folder)
        tell(0.5, "near duplicates")
        signatures = engine.read(steps.work / "signatures").join(kept, on="id", how="semi")
        reference = signatures.join(chosen.select("id"), on="id", how="semi")
        rest = signatures.join(chosen.select("id"), on="id", how="anti")
        engine.write(exclude(rest, reference, recipe.dedup).sort("id"), excluded)
        gone = engine.read(excluded).select("id").concat(chosen.select("id"))
        engine.write(documents.join(gone, on="id", how="anti").sort("id"), pool)
        return result | {
            "excluded_near": engine.read(excluded).count_rows(),
            "pool": engine.read(pool).count_rows(),
        }

    inputs = {"decontaminate": clean_of["key"], "heldout": asdict(recipe.heldout)}
    return steps.run("heldout", inputs, [folder, excluded, pool], work)


def choose(documents: Any, recipe: HeldoutRecipe) -> Any:
    """Choose documents of each domain in the order of a keyed hash until the size is reached.

    Documents longer than the limit come last, so they are used only where there are no others.

    Args:
        documents: Frame (id, category, bytes).
        recipe: Size, limits and seed.

    Returns:
        A collected frame (id, category).

    Raises:
        CorpusError: If no domain has two documents.
    """
    column = engine.daft().col
    kind = engine.daft().DataType
    totals = documents.groupby("category").agg(
        column("bytes").sum().alias("total"), column("id").count().alias("documents")
    )
    frame = documents.join(totals.where(column("documents") > 1), on="category")
    frame = frame.with_column("place", engine.keyed(column("id"), f"heldout:{recipe.seed}"))
    frame = frame.with_column("long", (column("bytes") > recipe.max_document_bytes).cast(kind.int64()))
    until = engine.running_sum(column("bytes"), partition=("category",), order=("long", "place", "id"))
    frame = frame.with_column("before", until - column("bytes"))
    within = (column("before") < recipe.bytes) & (
        column("before").cast(kind.float64()) < column("total").cast(kind.float64()) * recipe.max_fraction
    )
    chosen = frame.where(within).select("id", "category").collect()
    if chosen.count_rows() == 0:
        raise CorpusError(
            "no category has two documents, so nothing can be held out; add documents to the corpus"
        )
    return chosen


def freeze(steps: Steps, chosen: Any, folder: Path) -> dict[str, Any]:
    """Write the chosen documents, one file per domain, and their manifest last."""
    texts = (
        engine.read(steps.work / "clean").select("id", "text").join(chosen, on="id").sort(["category", "id"])
    )
    domains: dict[str, list[dict[str, str]]] = {}
    for row in engine.rows(texts):
        line = {"id": row["id"], "domain": row["category"], "text": row["text"]}
        domains.setdefault(row["category"], []).append(line)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.iterdir():
        stale.unlink()
    entries = [write_domain(folder, name, documents) for name, documents in sorted(domains.items())]
    manifest: dict[str, Any] = {"format": FORMAT, "domains": entries}
    manifest["digest"] = digest(manifest)
    write_json(folder / "manifest.json", manifest)
    return {"domains": entries, "digest": manifest["digest"]}


def write_domain(folder: Path, name: str, documents: list[dict[str, str]]) -> dict[str, Any]:
    """Write one domain's file and return its manifest entry."""
    data = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in documents).encode()
    write_bytes(folder / f"{name}.jsonl", data)
    return {
        "name": name,
        "documents": len(documents),
        "bytes": sum(len(item["text"].encode()) for item in documents),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
