"""Leave out what the stages and held-out sets of earlier builds hold, so that no document is trained on twice."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from zgcm_data import engine
from zgcm_data.dedup import exclude
from zgcm_data.prepare.heldout import clean_documents
from zgcm_data.prepare.steps import Steps
from zgcm_data.recipe import BuildRecipe, DedupRecipe

SHAPE = ("bands", "rows", "ngram", "min_shingles")
"""Settings that signatures must share to be compared."""


def exclude_earlier(steps: Steps, recipe: BuildRecipe, clean_of: dict[str, Any]) -> dict[str, Any]:
    """List the documents that an earlier build trains on or holds out, exactly or nearly, in ``work/earlier``.

    Args:
        steps: The step runner.
        recipe: The recipe; ``exclude_builds`` names the folders.
        clean_of: Result of decontamination.

    Returns:
        Digest of each earlier build by name, and the documents that leave by kind.

    Raises:
        ValueError: A folder is no finished build, or its signatures are of another shape.
    """
    target, column = steps.work / "earlier", engine.daft().col
    builds = earlier_builds(recipe)
    digests = {name: build.report["digest"] for name, build in builds.items()}

    def work(tell: Any) -> dict[str, Any]:
        ours = engine.read(steps.work / "signatures").join(clean_documents(steps), on="id", how="semi")
        reference = engine.joined([signatures_of(name, build) for name, build in builds.items()])
        found = exclude(ours, reference, recipe.dedup)
        engine.write(found.sort("id"), target)
        kinds = found.groupby("kind").agg(column("id").count().alias("documents"))
        return {
            "digests": digests,
            "documents": {row["kind"]: row["documents"] for row in engine.rows(kinds)},
        }

    inputs = {"decontaminate": clean_of["key"], "digests": digests, "dedup": asdict(recipe.dedup)}
    return steps.run("earlier", inputs, [target], work)


class Earlier(NamedTuple):
    """The folder of an earlier build and its ``build.json``."""

    path: Path
    report: dict[str, Any]


def earlier_builds(recipe: BuildRecipe) -> dict[str, Earlier]:
    """Return the builds of ``exclude_builds`` by the names of their folders, numbered where two have the same.

    Raises:
        ValueError: See ``exclude_earlier``.
    """
    result: dict[str, Earlier] = {}
    for path in map(Path, recipe.exclude_builds):
        name = path.resolve().name
        build = Earlier(path, read_report(path, recipe.dedup))
        result[name if name not in result else f"{name}-{len(result) + 1}"] = build
    return result


def read_report(path: Path, dedup: DedupRecipe) -> dict[str, Any]:
    """Return ``build.json`` of an earlier build.

    Raises:
        ValueError: See ``exclude_earlier``; names the folder and the remedy.
    """
    try:
        report: dict[str, Any] = json.loads((path / "build.json").read_text(encoding="utf-8"))
        used, names = report["recipe"]["dedup"], [path / "work" / name for name in report["stages"]]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"exclude_builds names {path}, which holds no finished build ({error}); "
            "give the folder that `zgcm-data build` wrote"
        ) from error
    missing = [
        folder for folder in (*names, path / "work" / "signatures") if not any(folder.glob("*.parquet"))
    ]
    if missing:
        raise ValueError(f"exclude_builds needs {missing[0]}, which is missing; build {path} again")
    other = [name for name in SHAPE if used[name] != getattr(dedup, name)]
    if other:
        name = other[0]
        raise ValueError(
            f"dedup.{name} is {getattr(dedup, name)}, but {used[name]} in {path}; signatures of different shape "
            "cannot be compared, so use the same"
        )
    return report


def signatures_of(name: str, build: Earlier) -> Any:
    """Return the signatures of what a build trains on or holds out, its name before each id."""
    column, (path, report) = engine.daft().col, build
    used = [
        engine.read(path / "work" / stage).select(column("document").alias("id"))
        for stage in report["stages"]
    ]
    used.append(engine.daft().from_pydict({"id": heldout_ids(path / "heldout")}))
    wanted = engine.joined(used).distinct()
    frame = engine.read(path / "work" / "signatures").join(wanted, on="id", how="semi")
    return frame.with_column("id", engine.daft().lit(f"{name}:") + column("id"))


def heldout_ids(folder: Path) -> list[str]:
    """Return the ids of the documents of held-out sets."""
    return [
        json.loads(line)["id"]
        for file in sorted(folder.glob("*.jsonl"))
        for line in file.read_text(encoding="utf-8").split("\n")
        if line
    ]
