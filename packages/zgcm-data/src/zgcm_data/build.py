"""``build``: from raw text to two ordered shard sets, step by step, resumable at every step."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zgcm_data.prepare.heldout import decontaminate, hold_out
from zgcm_data.prepare.ingest import clean, deduplicate, ingest
from zgcm_data.prepare.pack import pack_stage, unigram_baseline
from zgcm_data.prepare.report import write_report
from zgcm_data.prepare.stages import order_stage_1, order_stage_2, score
from zgcm_data.prepare.steps import BuildError, Progress, Steps, digest, write_json
from zgcm_data.prepare.tokens import make_tokenizer, tokenize
from zgcm_data.recipe import BuildRecipe

__all__ = ["BuildError", "BuildResult", "build"]

FORMAT = "zgcm-build/1"
STEPS = (
    "read",
    "clean",
    "dedup",
    "decontaminate",
    "heldout",
    "tokenizer",
    "score",
    "tokenize",
    "order-1",
    "order-2",
    "pack-1",
    "pack-2",
    "unigram",
    "report",
)


@dataclass(frozen=True)
class BuildResult:
    """What a build wrote.

    Args:
        out: The output folder.
        stage1: Shard set of stage 1.
        stage2: Shard set of stage 2.
        tokenizer: ``tokenizer.json``.
        heldout: Folder of the frozen validation sets.
        report: Content of ``build.json``.
        steps: Per step its name, seconds and whether it was skipped; not part of any digest.
    """

    out: Path
    stage1: Path
    stage2: Path
    tokenizer: Path
    heldout: Path
    report: dict[str, Any]
    steps: list[dict[str, Any]]

    @property
    def digest(self) -> str:
        """One digest over the shard sets, the tokenizer and the held-out sets."""
        return str(self.report["digest"])


def build(recipe: BuildRecipe, out: Path, *, progress: Progress | None = None) -> BuildResult:
    """Build both shard sets, the tokenizer and the held-out sets from raw text.

    Every step is skipped when its inputs and settings are unchanged and its output is whole, so an
    interrupted build that is started again goes on where it stopped and ends with the same digests.

    Args:
        recipe: What to build.
        out: The output folder; nothing else is written.
        progress: Called with (step, fraction from 0 to 1, note).

    Returns:
        Where everything is, and the report.

    Raises:
        CorpusError: If the corpus cannot give what the recipe asks for.
        BuildError: If ``out`` cannot be written or the disk is full; finished steps are kept.
        ValueError: If the recipe or the tokenizer is wrong.
        ImportError: If the extra ``prepare`` is not installed.
    """
    out = Path(out)
    steps = Steps(out, progress)
    results = run_until(steps, recipe)
    report = summarize(recipe, results)
    write_json(out / "build.json", report)
    return BuildResult(
        out, out / "stage1", out / "stage2", out / "tokenizer.json", out / "heldout", report, steps.log
    )


def run_until(steps: Steps, recipe: BuildRecipe, last: str = STEPS[-1]) -> dict[str, dict[str, Any]]:
    """Run the steps in their order, up to and with ``last``.

    Args:
        steps: The step runner.
        recipe: The recipe.
        last: One of ``STEPS``.

    Returns:
        The result of each step by name.
    """
    done: dict[str, dict[str, Any]] = {}
    actions: dict[str, Callable[[], dict[str, Any]]] = {
        "read": lambda: ingest(steps, recipe),
        "clean": lambda: clean(steps, recipe, done["read"]),
        "dedup": lambda: deduplicate(steps, recipe, done["clean"]),
        "decontaminate": lambda: decontaminate(steps, recipe, done["dedup"]),
        "heldout": lambda: hold_out(steps, recipe, done["decontaminate"]),
        "tokenizer": lambda: make_tokenizer(steps, recipe, done["heldout"]),
        "score": lambda: score(steps, done["heldout"]),
        "tokenize": lambda: tokenize(steps, recipe, done["heldout"], done["tokenizer"]),
        "order-1": lambda: order_stage_1(steps, recipe, done["tokenize"], done["score"]),
        "order-2": lambda: order_stage_2(steps, recipe, done["order-1"]),
        "pack-1": lambda: pack_stage(steps, recipe, "stage1", done["order-1"], bound(done)),
        "pack-2": lambda: pack_stage(steps, recipe, "stage2", done["order-2"], bound(done)),
        "unigram": lambda: unigram_baseline(steps, recipe, counted(done)),
        "report": lambda: write_report(steps, done, settings_of(recipe)),
    }
    for name in STEPS[: STEPS.index(last) + 1]:
        done[name] = actions[name]()
    return done


def bound(done: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the digests that the next shard set is bound to."""
    parents = {"heldout": done["heldout"]["digest"]}
    if "pack-1" in done:
        parents["stage1"] = done["pack-1"]["digest"]
    return parents


def counted(done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what the unigram baseline depends on."""
    digests = {"stage1": done["pack-1"]["digest"], "stage2": done["pack-2"]["digest"]}
    return {"digests": digests, "heldout": done["heldout"]["digest"]}


def summarize(recipe: BuildRecipe, done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the content of ``build.json``: no times and no absolute path, so equal builds are equal files."""
    digests = counted(done)["digests"] | {
        "tokenizer": done["tokenizer"]["sha256"],
        "heldout": done["heldout"]["digest"],
    }
    plain = {name: without_key(result) for name, result in done.items()}
    return {
        "format": FORMAT,
        "recipe": settings_of(recipe),
        "funnel": {
            name: plain[name] for name in ("read", "clean", "dedup", "decontaminate", "heldout", "tokenize")
        },
        "score": plain["score"],
        "stages": {"stage1": plain["order-1"], "stage2": plain["order-2"]},
        "unigram": plain["unigram"],
        "seeds": seeds(recipe),
        "digests": digests,
        "digest": digest(digests),
    }


def settings_of(recipe: BuildRecipe) -> dict[str, Any]:
    """Return the recipe as data, paths reduced to their names."""
    settings = recipe.to_dict()
    settings["input"]["path"] = Path(recipe.input.path).name
    for dataset in settings["input"]["datasets"].values():
        dataset["path"] = Path(dataset["path"]).name
    settings["decontaminate"]["paths"] = [Path(path).name for path in recipe.decontaminate.paths]
    settings["tokenizer"]["path"] = Path(recipe.tokenizer.path).name
    return settings


def seeds(recipe: BuildRecipe) -> dict[str, int]:
    """Return every seed of a recipe by what it decides."""
    return {
        "heldout": recipe.heldout.seed,
        "tokenizer_sample": recipe.tokenizer.seed,
        "stage1": recipe.curriculum.seed,
        "stage2": recipe.stage2.seed,
    }


def without_key(result: dict[str, Any]) -> dict[str, Any]:
    """Return a step's result without its key."""
    return {name: value for name, value in result.items() if name != "key"}
