"""``build``: from raw text to two ordered shard sets, step by step, resumable at every step."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zgcm_data.prepare.heldout import hold_out
from zgcm_data.prepare.ingest import clean, deduplicate, ingest
from zgcm_data.prepare.pack import pack_stage, unigram_baseline
from zgcm_data.prepare.stages import order_stage_1, order_stage_2, score
from zgcm_data.prepare.steps import BuildError, Progress, Steps, digest, write_json
from zgcm_data.prepare.tokens import make_tokenizer, tokenize
from zgcm_data.recipe import BuildRecipe

__all__ = ["BuildError", "BuildResult", "build"]

FORMAT = "zgcm-build/1"


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
    read = ingest(steps, recipe)
    cleaned = clean(steps, recipe, read)
    deduplicated = deduplicate(steps, recipe, cleaned)
    heldout = hold_out(steps, recipe, deduplicated)
    tokenizer = make_tokenizer(steps, recipe, heldout)
    scored = score(steps, heldout)
    tokens = tokenize(steps, recipe, heldout, tokenizer)
    stage1 = order_stage_1(steps, recipe, tokens, scored)
    stage2 = order_stage_2(steps, recipe, stage1)
    parents = {"heldout": heldout["digest"]}
    packed1 = pack_stage(steps, recipe, "stage1", stage1, parents)
    packed2 = pack_stage(steps, recipe, "stage2", stage2, parents | {"stage1": packed1["digest"]})
    digests = {"stage1": packed1["digest"], "stage2": packed2["digest"]}
    unigram = unigram_baseline(steps, recipe, {"digests": digests, "heldout": heldout["digest"]})
    digests |= {"tokenizer": tokenizer["sha256"], "heldout": heldout["digest"]}
    funnel = {"read": read, "clean": cleaned, "dedup": deduplicated, "heldout": heldout, "tokenize": tokens}
    report = {
        "format": FORMAT,
        "recipe": recipe.to_dict()
        | {"input": recipe.to_dict()["input"] | {"path": Path(recipe.input.path).name}},
        "funnel": {name: without_key(result) for name, result in funnel.items()},
        "score": without_key(scored),
        "stages": {"stage1": without_key(stage1), "stage2": without_key(stage2)},
        "unigram": without_key(unigram),
        "seeds": seeds(recipe),
        "digests": digests,
        "digest": digest(digests),
    }
    write_json(out / "build.json", report)
    return BuildResult(
        out, out / "stage1", out / "stage2", out / "tokenizer.json", out / "heldout", report, steps.log
    )


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
