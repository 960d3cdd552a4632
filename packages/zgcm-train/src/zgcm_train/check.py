"""Prove before a run that its data are there, whole and long enough."""

import os
import shutil
from pathlib import Path

from zgcm_data import Dataset
from zgcm_eval import load_heldout
from zgcm_train.checks import Check
from zgcm_train.config import Recipe
from zgcm_train.errors import PathError
from zgcm_train.stage_data import find_problems, open_stage

BYTES_PER_PARAMETER = 16  # float32 weights, one or two float32 moments, rounded up to four tensors


def check_recipe_data(recipe: Recipe) -> list[Check]:
    """Check every stage's rows, the tokenizers, the held-out sets and the disk.

    Args:
        recipe: the effective recipe.

    Returns:
        One result per check, failed ones included.
    """
    results, sets = [], []
    for number, stage in enumerate(recipe.stage):
        try:
            shards = open_stage(recipe, number)
        except PathError as error:
            results.append(Check(f"data of stage {stage.name}", False, str(error).rstrip("."), PathError))
            continue
        sets.append(shards)
        results.append(_check_rows(recipe, number, shards))
    results.append(_check_tokenizers(sets))
    results.extend(_check_heldout(recipe))
    results.append(_check_disk(recipe))
    return results


def _check_rows(recipe: Recipe, number: int, rows: Dataset) -> Check:
    name = f"data of stage {recipe.stage[number].name}"
    try:
        problems, digest = find_problems(recipe, number)
    except PathError as error:
        return Check(name, False, str(error).rstrip("."), PathError)
    detail = f"{len(rows):,} rows, digest {digest[:16]}"
    if problems:
        detail = f"{len(problems)} problems, first: {problems[0]}"
    return Check(name, not problems, detail, PathError)


def _check_tokenizers(sets: list[Dataset]) -> Check:
    digests = sorted({s.manifest.tokenizer_sha256 for s in sets})
    detail = (
        f"{len(digests)} in use: {', '.join(d[:16] for d in digests)}"
        if digests
        else "no dataset could be opened"
    )
    return Check("one tokenizer for all stages", len(digests) == 1, detail, PathError)


def _check_heldout(recipe: Recipe) -> list[Check]:
    if recipe.eval.heldout is None:
        return []
    try:
        sets = load_heldout(Path(recipe.eval.heldout))
    except (OSError, ValueError) as error:
        return [Check("held-out sets", False, str(error).rstrip("."), PathError)]
    return [Check("held-out sets", True, f"{len(sets)} domains: {', '.join(s.name for s in sets)}")]


def _check_disk(recipe: Recipe) -> Check:
    needed = recipe.model.architecture().num_parameters() * BYTES_PER_PARAMETER * (recipe.checkpoint.keep + 1)
    free = shutil.disk_usage(os.getcwd()).free
    detail = f"{free / 2**30:.1f} GiB free here, checkpoints need about {needed / 2**30:.1f} GiB"
    return Check("disk space for checkpoints", free > needed, detail, PathError)
