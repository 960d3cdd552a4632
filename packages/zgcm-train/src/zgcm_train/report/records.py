"""What a report shows, read from a run folder."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zgcm_data import read_ledger
from zgcm_train.config import Recipe
from zgcm_train.errors import PathError
from zgcm_train.files import read_json_lines
from zgcm_train.recipe_file import load_run_recipe

LABELS = {"start": "start", "switch": "stage switch", "interval": "on the way", "end": "end"}


@dataclass(frozen=True)
class RunRecords:
    """Everything that a report shows.

    Attributes:
        recipe: the effective recipe.
        recipe_text: the same as TOML.
        train: the ``train`` records of ``metrics.jsonl``.
        evaluations: its ``eval`` records, each with a ``label``.
        sources: the ledger summed per stage and source.
        switches: the ledger's switch events.
        after_switch: per switch, by its step, the ledger's record of the first held-out figures after it.
        events: what went wrong, from ``metrics.jsonl`` and ``logs/hangs.jsonl``.
        environment: what the run was made with.
        baseline: bits per byte of the unigram-token baseline per domain; empty where none was made.
        build: the report of the data build; empty where none is beside the held-out sets.
    """

    recipe: Recipe
    recipe_text: str
    train: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    sources: list[dict[str, Any]]
    switches: list[dict[str, Any]]
    after_switch: dict[int, dict[str, Any]]
    events: list[dict[str, Any]]
    environment: dict[str, Any]
    baseline: dict[str, float]
    build: dict[str, Any]


def read_records(folder: Path) -> RunRecords:
    """Read a run folder.

    Raises:
        PathError: it is not a run folder, or nothing was trained in it yet.
    """
    recipe = load_run_recipe(folder)
    metrics = list(read_json_lines(folder / "metrics.jsonl"))
    train = [r for r in metrics if r["kind"] == "train"]
    if not train:
        raise PathError(f"{folder} holds no training record yet; train first, then write the report.")
    evaluations = [r | {"label": LABELS[r["event"]]} for r in metrics if r["kind"] == "eval"]
    ledger = read_ledger(folder / "ledger.jsonl")
    data = Path(recipe.eval.heldout).parent if recipe.eval.heldout else folder
    return RunRecords(
        recipe=recipe,
        recipe_text=(folder / "recipe.toml").read_text(encoding="utf-8"),
        train=train,
        evaluations=evaluations,
        sources=sum_sources([r for r in ledger if r["kind"] == "interval"]),
        switches=[r for r in ledger if r["kind"] == "switch"],
        after_switch={r["switch_step"]: r for r in ledger if r["kind"] == "after_switch"},
        events=[r for r in metrics if r["kind"] == "event"] + read_hangs(folder),
        environment=_read_json(folder / "environment.json"),
        baseline=_baseline(data / "unigram.json"),
        build=_read_json(data / "build.json"),
    )


def read_hangs(folder: Path) -> list[dict[str, Any]]:
    """Return one event per hang, from the records of all ranks that noticed it."""
    found: dict[str, dict[str, Any]] = {}
    for record in read_json_lines(folder / "logs" / "hangs.jsonl"):
        found.setdefault(str(record["ranks"]), {"event": "hang", "message": record["message"]})
    return list(found.values())


def sum_sources(intervals: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum the ledger's intervals per stage and source; observed share is of the stage's tokens.

    Args:
        intervals: the ledger's interval records.

    Returns:
        One row per stage and source, in the order of the run.
    """
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    totals: dict[str, int] = defaultdict(int)
    for record in intervals:
        for source in record["sources"]:
            row = sums.setdefault((record["stage"], source["name"]), _empty_row(record["stage"], source))
            for key in ("tokens", "loss_tokens", "documents"):
                row[key] += source[key]
            row["epochs"] = source["epochs"]
            totals[record["stage"]] += source["tokens"]
    return [row | {"observed_share": row["tokens"] / max(totals[row["stage"]], 1)} for row in sums.values()]


def _empty_row(stage: str, source: dict[str, Any]) -> dict[str, Any]:
    return {
        "stage": stage,
        "source": source["name"],
        "category": source["category"],
        "nominal_share": source["nominal_share"],
        "tokens": 0,
        "loss_tokens": 0,
        "documents": 0,
    }


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _baseline(path: Path) -> dict[str, float]:
    domains = _read_json(path).get("domains", {})
    return {name: float(figures["bits_per_byte"]) for name, figures in domains.items()}
