"""Prove after a run that its records agree with each other and with its data."""

from pathlib import Path

from zgcm_data import read_ledger
from zgcm_eval import load_heldout
from zgcm_train.checkpoint import checkpoints, newest_complete, verify_checkpoint
from zgcm_train.checkpoint.progress import Progress
from zgcm_train.checks import Check
from zgcm_train.config import Recipe
from zgcm_train.errors import CheckpointError, PathError
from zgcm_train.files import read_json_lines
from zgcm_train.recipe_file import load_run_recipe
from zgcm_train.stage_data import find_problems


def verify_run(folder: Path) -> list[Check]:
    """Check a run folder.

    Args:
        folder: the run folder.

    Returns:
        One result per check, failed ones included.

    Raises:
        PathError: it is not a run folder.
    """
    recipe = load_run_recipe(folder)
    results = [_check_checkpoint(path) for path in checkpoints(folder / "checkpoints")]
    newest, _ = newest_complete(folder / "checkpoints")
    if newest is None:
        return [*results, Check("newest checkpoint", False, "no whole checkpoint", CheckpointError)]
    progress = newest.progress
    results.append(_check_counters(recipe, progress))
    results.append(_check_ledger(folder, recipe, progress))
    results.append(_check_metrics(folder, progress))
    results.extend(_check_data(recipe, newest.identity.data))
    results.extend(_check_heldout(folder, recipe))
    return results


def _check_checkpoint(path: Path) -> Check:
    faults = verify_checkpoint(path)
    return Check(path.name, not faults, faults[0] if faults else "whole, every digest equal", CheckpointError)


def _check_counters(recipe: Recipe, progress: Progress) -> Check:
    rows = progress.step * recipe.data.global_batch
    tokens = rows * recipe.data.sequence_length
    passed = (progress.rows, progress.tokens) == (rows, tokens)
    return Check(
        "counters",
        passed,
        f"{progress.step:,} updates, {progress.rows:,} rows, {progress.tokens:,} tokens; "
        f"the recipe gives {rows:,} rows and {tokens:,} tokens",
    )


def _check_ledger(folder: Path, recipe: Recipe, progress: Progress) -> Check:
    records = [
        r
        for r in read_ledger(folder / "ledger.jsonl")
        if r["kind"] == "interval" and r["step"] <= progress.step
    ]
    tokens = sum(source["tokens"] for r in records for source in r["sources"])
    learned = sum(source["loss_tokens"] for r in records for source in r["sources"])
    passed = (tokens, learned) == (progress.tokens, progress.loss_tokens)
    return Check(
        "ledger",
        passed,
        f"{tokens:,} tokens and {learned:,} loss tokens booked; the checkpoint counts "
        f"{progress.tokens:,} and {progress.loss_tokens:,}",
    )


def _check_metrics(folder: Path, progress: Progress) -> Check:
    steps = [r["step"] for r in read_json_lines(folder / "metrics.jsonl") if r["kind"] == "train"]
    passed = steps == sorted(set(steps)) and bool(steps) and steps[-1] >= progress.step
    return Check("metrics", passed, f"{len(steps)} records, the last at update {steps[-1] if steps else 0}")


def _check_data(recipe: Recipe, digests: dict[str, str]) -> list[Check]:
    results = []
    for number, stage in enumerate(recipe.stage):
        try:
            problems, digest = find_problems(recipe, number)
        except PathError as error:
            results.append(Check(f"data of stage {stage.name}", False, str(error).rstrip(".")))
            continue
        if digest != digests[stage.name]:
            problems.append(f"digest {digest[:16]}, trained on {digests[stage.name][:16]}")
        detail = problems[0] if problems else f"digest {digest[:16]}"
        results.append(Check(f"data of stage {stage.name}", not problems, detail))
    return results


def _check_heldout(folder: Path, recipe: Recipe) -> list[Check]:
    if recipe.eval.heldout is None:
        return []
    try:
        load_heldout(Path(recipe.eval.heldout))
    except (OSError, ValueError) as error:
        return [Check("held-out sets", False, str(error).rstrip("."))]
    digests = {r["heldout_digest"] for r in read_json_lines(folder / "metrics.jsonl") if r["kind"] == "eval"}
    return [Check("held-out sets", len(digests) <= 1, f"{len(digests)} version of the sets was measured")]
