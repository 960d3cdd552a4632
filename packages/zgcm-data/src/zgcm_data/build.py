"""``build``: from raw text to ordered shard sets, step by step, resumable at every step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zgcm_data.prepare.earlier import earlier_builds, exclude_earlier
from zgcm_data.prepare.heldout import decontaminate, hold_out
from zgcm_data.prepare.ingest import clean, deduplicate, ingest
from zgcm_data.prepare.midtrain import order_length_stage
from zgcm_data.prepare.pack import pack_stage, suffix, unigram_baseline
from zgcm_data.prepare.report import write_report
from zgcm_data.prepare.stages import order_stage_1, order_stage_2, score
from zgcm_data.prepare.steps import BuildError, Progress, Steps, digest, write_json
from zgcm_data.prepare.tokens import make_tokenizer, tokenize
from zgcm_data.recipe import BuildRecipe, LengthStageRecipe

__all__ = ["BuildError", "BuildResult", "build"]

FORMAT = "zgcm-build/1"
Results = dict[str, dict[str, Any]]
Action = Callable[[], dict[str, Any]]
BEFORE = ("read", "clean", "dedup", "decontaminate")
THEN = ("heldout", "tokenizer")
AFTER = ("unigram", "report")
PRETRAINING = ("stage1", "stage2")


@dataclass(frozen=True)
class BuildResult:
    """What a build wrote.

    Args:
        out: The output folder.
        sets: Shard set of each stage by name, ``stage1`` and ``stage2`` or the stages of mid-training.
        tokenizer: ``tokenizer.json``.
        heldout: Folder of the frozen validation sets.
        report: Content of ``build.json``.
        steps: Per step its name, seconds and whether it was skipped; not part of any digest.
    """

    out: Path
    sets: dict[str, Path]
    tokenizer: Path
    heldout: Path
    report: dict[str, Any]
    steps: list[dict[str, Any]]

    @property
    def stage1(self) -> Path:
        """Shard set of stage 1 of pretraining."""
        return self.sets["stage1"]

    @property
    def stage2(self) -> Path:
        """Shard set of stage 2 of pretraining."""
        return self.sets["stage2"]

    @property
    def digest(self) -> str:
        """One digest over the shard sets, the tokenizer and the held-out sets."""
        return str(self.report["digest"])


def build(recipe: BuildRecipe, out: Path, *, progress: Progress | None = None) -> BuildResult:
    """Build the shard sets of all stages, the tokenizer and the held-out sets from raw text.

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
    earlier_builds(recipe)  # a wrong name is said before any work is done
    steps = Steps(out, progress)
    results = run_until(steps, recipe)
    report = summarize(recipe, results)
    write_json(out / "build.json", report)
    sets = {name: out / name for name in set_names(recipe)}
    return BuildResult(out, sets, out / "tokenizer.json", out / "heldout", report, steps.log)


def set_names(recipe: BuildRecipe) -> list[str]:
    """Return the names of the shard sets that a recipe builds."""
    return [stage.name for stage in recipe.midtrain.stages] or list(PRETRAINING)


def step_names(recipe: BuildRecipe) -> list[str]:
    """Return the steps of a recipe in their order."""
    names = [suffix(name) for name in set_names(recipe)]
    middle = ["tokenize"] if recipe.midtrain.stages else ["score", "tokenize"]
    before = [*BEFORE, *(["earlier"] if recipe.exclude_builds else []), *THEN]
    return [*before, *middle, *(f"order-{n}" for n in names), *(f"pack-{n}" for n in names), *AFTER]


def run_until(steps: Steps, recipe: BuildRecipe, last: str = AFTER[-1]) -> Results:
    """Run the steps in their order, up to and with ``last``.

    Args:
        steps: The step runner.
        recipe: The recipe.
        last: One of ``step_names``, or the beginning of the names of several, such as ``order``.

    Returns:
        The result of each step by name.
    """
    done: Results = {}
    actions: dict[str, Action] = {
        "read": lambda: ingest(steps, recipe),
        "clean": lambda: clean(steps, recipe, done["read"]),
        "dedup": lambda: deduplicate(steps, recipe, done["clean"]),
        "decontaminate": lambda: decontaminate(steps, recipe, done["dedup"]),
        "earlier": lambda: exclude_earlier(steps, recipe, done["decontaminate"]),
        "heldout": lambda: hold_out(steps, recipe, done.get("earlier", done["decontaminate"])),
        "tokenizer": lambda: make_tokenizer(steps, recipe, done["heldout"]),
        "tokenize": lambda: tokenize(steps, recipe, done["heldout"], done["tokenizer"]),
        "unigram": lambda: unigram_baseline(steps, recipe, counted(recipe, done)),
        "report": lambda: write_report(steps, done, settings_of(recipe)),
    }
    actions |= (
        midtraining(steps, recipe, done) if recipe.midtrain.stages else pretraining(steps, recipe, done)
    )
    names = step_names(recipe)
    stop = max(number for number, name in enumerate(names) if name.startswith(last))
    for name in names[: stop + 1]:
        done[name] = actions[name]()
    return done


def pretraining(steps: Steps, recipe: BuildRecipe, done: Results) -> dict[str, Action]:
    """Return the steps of the two stages of pretraining."""
    return {
        "score": lambda: score(steps, done["heldout"]),
        "order-1": lambda: order_stage_1(steps, recipe, done["tokenize"], done["score"]),
        "order-2": lambda: order_stage_2(steps, recipe, done["order-1"]),
        "pack-1": lambda: pack_stage(steps, recipe, "stage1", done["order-1"], bound(recipe, done)),
        "pack-2": lambda: pack_stage(steps, recipe, "stage2", done["order-2"], bound(recipe, done)),
    }


def midtraining(steps: Steps, recipe: BuildRecipe, done: Results) -> dict[str, Action]:
    """Return the steps of the stages of mid-training."""
    actions: dict[str, Action] = {}
    for stage in recipe.midtrain.stages:
        own = replace(recipe, sequence_length=stage.sequence_length)
        actions[f"order-{stage.name}"] = choosing(steps, own, stage, done)
        actions[f"pack-{stage.name}"] = packing(steps, own, stage, done)
    return actions


def choosing(steps: Steps, recipe: BuildRecipe, stage: LengthStageRecipe, done: Results) -> Action:
    """Return the step that chooses the documents of one stage of mid-training."""
    return lambda: order_length_stage(steps, recipe, stage, done["tokenize"])


def packing(steps: Steps, recipe: BuildRecipe, stage: LengthStageRecipe, done: Results) -> Action:
    """Return the step that writes one stage of mid-training."""
    return lambda: pack_stage(steps, recipe, stage.name, done[f"order-{stage.name}"], bound(recipe, done))


def bound(recipe: BuildRecipe, done: Results) -> dict[str, str]:
    """Return the digests that the next shard set is bound to."""
    earlier = done.get("earlier", {}).get("digests", {})
    before = {f"earlier {name}": value for name, value in earlier.items()}
    return before | {"heldout": done["heldout"]["digest"]} | set_digests(recipe, done)


def set_digests(recipe: BuildRecipe, done: Results) -> dict[str, str]:
    """Return the digests of the shard sets that are packed, by name."""
    steps = {name: f"pack-{suffix(name)}" for name in set_names(recipe)}
    return {name: done[step]["digest"] for name, step in steps.items() if step in done}


def counted(recipe: BuildRecipe, done: Results) -> dict[str, Any]:
    """Return what the unigram baseline depends on."""
    return {"digests": set_digests(recipe, done), "heldout": done["heldout"]["digest"]}


def summarize(recipe: BuildRecipe, done: Results) -> dict[str, Any]:
    """Return the content of ``build.json``: no times and no absolute path, so equal builds are equal files."""
    digests = set_digests(recipe, done) | {
        "tokenizer": done["tokenizer"]["sha256"],
        "heldout": done["heldout"]["digest"],
    }
    plain = {name: without_key(result) for name, result in done.items()}
    return {
        "format": FORMAT,
        "recipe": settings_of(recipe),
        "funnel": {
            name: plain[name] for name in (*BEFORE, "earlier", "heldout", "tokenize") if name in plain
        },
        "score": plain.get("score", {}),
        "stages": {name: plain[f"order-{suffix(name)}"] for name in set_names(recipe)},
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
    settings["exclude_builds"] = [Path(path).name for path in recipe.exclude_builds]
    settings["tokenizer"]["path"] = Path(recipe.tokenizer.path).name
    return settings


def seeds(recipe: BuildRecipe) -> dict[str, int]:
    """Return every seed of a recipe by what it decides."""
    stages = {"stage1": recipe.curriculum.seed, "stage2": recipe.stage2.seed}
    if recipe.midtrain.stages:
        stages = {"midtrain": recipe.midtrain.seed}
    return {"heldout": recipe.heldout.seed, "tokenizer_sample": recipe.tokenizer.seed, **stages}


def without_key(result: dict[str, Any]) -> dict[str, Any]:
    """Return a step's result without its key."""
    return {name: value for name, value in result.items() if name != "key"}
