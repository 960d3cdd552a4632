"""Compose the demo from the same parts that drive a full run."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from zgcm_data import open_shards
from zgcm_data.build import BuildError, build
from zgcm_data.recipe import BuildRecipe, HeldoutRecipe, InputRecipe, StageRecipe
from zgcm_data.records import CorpusError
from zgcm_train.config import Recipe
from zgcm_train.console import short_time
from zgcm_train.demo.display import DemoDisplay
from zgcm_train.demo.origin import check_origin
from zgcm_train.errors import ConfigurationError, PathError, explain_os_error
from zgcm_train.files import write_atomic
from zgcm_train.recipe_file import check_recipe, load_recipe
from zgcm_train.report import write_report
from zgcm_train.report.records import read_records
from zgcm_train.run import run_recipe

HELDOUT_BYTES = 30_000  # per domain; small, because it is measured three times on a laptop
BUDGET_MINUTES = 5.0  # the updates of recipes/demo.toml fit this on two cores


@dataclass(frozen=True)
class DemoSummary:
    """What the demo made and measured.

    Attributes:
        folder: where everything is.
        report: the page.
        picture: the loss curve.
        updates: optimizer updates done.
        tokens: input positions trained on.
        seconds: wall time of this call.
        bits_per_byte: per domain, at the start, the stage switch and the end.
        baseline: per domain, the unigram-token baseline.
    """

    folder: str
    report: str
    picture: str
    updates: int
    tokens: int
    seconds: float
    bits_per_byte: dict[str, dict[str, float]]
    baseline: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def print(self, console: Console) -> None:
        """Print the summary for people."""
        events = list(next(iter(self.bits_per_byte.values())))
        table = Table("held-out bits per byte", "unigram baseline", *events)
        for name, values in self.bits_per_byte.items():
            table.add_row(name, f"{self.baseline[name]:.3f}", *(f"{values[e]:.3f}" for e in events))
        console.print(table)
        console.print(
            f"{self.updates:,} updates on {self.tokens:,} tokens; this call took {short_time(self.seconds)}."
        )
        for name, path in (("report", self.report), ("picture", self.picture), ("everything", self.folder)):
            console.print(f"{name}: {path}", soft_wrap=True, highlight=False)


def run_demo(out: Path, *, minutes: float = BUDGET_MINUTES, corpus: Path | None = None) -> DemoSummary:
    """Build the data, train both stages, evaluate and report; go on where an earlier call stopped.

    Args:
        out: folder for everything.
        minutes: scales the token budgets of both stages.
        corpus: the user's own text instead of the embedded corpus.

    Returns:
        What was made and measured.

    Raises:
        PathError: the corpus or the folder is missing or wrong, or the disk is full.
        ConfigurationError: ``out`` holds a demo with other settings, or one that trained on text which is another now.
    """
    started, out = time.perf_counter(), out.absolute()
    plan = demo_recipe(out, minutes)
    prepare(out, {"minutes": minutes, "corpus": str(corpus.absolute()) if corpus else None})
    with DemoDisplay(plan.total_updates) as display:
        build_data(out / "data", plan, corpus, display)
        recipe = fit_to_data(plan)
        display.total = recipe.total_updates
        run_recipe(recipe, out, observe=display.event)
    page = write_report(out)
    return summarize(out, page, time.perf_counter() - started)


def demo_recipe(out: Path, minutes: float) -> Recipe:
    """Return the demo's recipe with both budgets scaled to ``minutes``."""
    recipe = load_recipe("demo", environment={"ZGCM_DEMO": str(out)})
    scaled = [max(2, round(stage.updates * minutes / BUDGET_MINUTES)) for stage in recipe.stage]
    return with_updates(recipe, scaled)


def with_updates(recipe: Recipe, updates: list[int]) -> Recipe:
    """Return the recipe with other budgets per stage."""
    values = recipe.model_dump(mode="json", exclude_none=True)
    for stage, number in zip(values["stage"], updates, strict=True):
        stage["updates"] = number
    return check_recipe(values, "demo")


def prepare(out: Path, settings: dict[str, Any]) -> None:
    """Make the folder, or check that it holds a demo with the same settings.

    Raises:
        ConfigurationError: it holds another demo, or has trained on text that is another now.
        PathError: it cannot be written, or the corpus cannot be read.
    """
    file = out / "demo.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if file.exists() and (old := json.loads(file.read_text(encoding="utf-8"))) != settings:
            raise ConfigurationError(f"{out} holds a demo with {old}, not {settings}; choose another --out.")
        check_origin(out, None if settings["corpus"] is None else Path(settings["corpus"]))
        write_atomic(file, json.dumps(settings) + "\n")
    except CorpusError as error:
        raise PathError(str(error)) from error
    except OSError as error:
        raise explain_os_error(error, f"preparing the folder {out}") from error


def build_data(folder: Path, recipe: Recipe, corpus: Path | None, display: DemoDisplay) -> None:
    """Build tokenizer, held-out sets and both shard sets; finished steps are not done twice.

    Raises:
        PathError: the corpus is missing, empty or wrong, or the disk is full.
    """
    first, second = (stage.updates * recipe.data.global_batch for stage in recipe.stage)
    wanted = BuildRecipe(
        sequence_length=recipe.data.sequence_length,
        # Longer documents would fill rows alone, and a few of them whole log intervals.
        max_document_tokens=recipe.data.sequence_length // 2,
        heldout=HeldoutRecipe(bytes=HELDOUT_BYTES),
        input=InputRecipe(path=str(corpus.absolute()) if corpus else ""),
        stage1=StageRecipe(rows=first, shrink=True),
        stage2=StageRecipe(rows=second, shrink=True),
    )
    try:
        build(wanted, folder, progress=display.data_step)
    except (CorpusError, BuildError) as error:
        raise PathError(str(error)) from error
    except OSError as error:
        raise explain_os_error(error, "building the data") from error


def fit_to_data(recipe: Recipe) -> Recipe:
    """Return the recipe with as many updates per stage as its rows allow.

    Raises:
        PathError: the corpus is too small for one update per stage.
    """
    rows = [len(open_shards(Path(stage.data))) for stage in recipe.stage]
    updates = [min(s.updates, n // recipe.data.global_batch) for s, n in zip(recipe.stage, rows, strict=True)]
    if min(updates) < 1:
        raise PathError(
            f"The corpus gives {rows} rows for the two stages and one update takes "
            f"{recipe.data.global_batch}; use a larger corpus."
        )
    return with_updates(recipe, updates)


def summarize(out: Path, page: Path, seconds: float) -> DemoSummary:
    """Return the figures of a finished demo."""
    records = read_records(out)
    domains = list(records.evaluations[-1]["domains"])
    return DemoSummary(
        folder=str(out),
        report=str(page),
        picture=os.fspath(out / "loss.png"),
        updates=records.train[-1]["step"],
        tokens=records.train[-1]["tokens"],
        seconds=seconds,
        bits_per_byte={
            name: {e["label"]: e["domains"][name]["bits_per_byte"] for e in records.evaluations}
            for name in domains
        },
        baseline=records.baseline,
    )
